"""Adapt other libraries' calling conventions of the delta rule to the operator's argument names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foci.core.spec import Aside, Candidate, run_in_process
from foci.ops import conventions

WORDS = conventions.WORDS | {"beta": ("beta",), "erase": ("erase", "p")}


def adapt(
    function: Callable[..., Any], *, layout: str = "bthd", name: str = "", aside: Aside = run_in_process
) -> Candidate:
    """A callable `f(q, k, v, beta, ...)` as a Candidate of the delta rule, by the keywords in its signature.

    beta: by its name wherever it stands, else fourth. decay: `log_decay` or `g`, of the ranks that it takes; `g_gamma`
    [H]; `gk` or `w` [B,T,H,K]. erase: `erase` or `p` (Comba). scale: `scale`, `softmax_scale`, `sm_scale`.
    State: `state`, `initial_state`; documents: `offsets`, `cu_seqlens`; `return_state`, `output_final_state`: True.
    """
    return conventions.adapt(function, WORDS, ("q", "k", "v", "beta"), layout=layout, name=name, aside=aside)
