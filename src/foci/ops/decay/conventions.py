"""Adapt other libraries' calling conventions of linear attention to the operator's argument names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foci.core.spec import Aside, Candidate, run_in_process
from foci.ops import conventions

WORDS = conventions.WORDS | {"bonus": ("bonus", "u"), "causal": ("causal", "is_causal")}


def adapt(
    function: Callable[..., Any], *, layout: str = "bthd", name: str = "", aside: Aside = run_in_process
) -> Candidate:
    """A callable `f(q, k, v, ...)` as a Candidate of linear attention, by the keywords in its signature.

    decay: `log_decay` or `g`, of the ranks that it takes; `g_gamma` [H]; `gk` or `w` [B,T,H,K]. bonus: `bonus` or `u`.
    Order: `causal` or `is_causal`, False only where a case has none. scale: `scale`, `softmax_scale`, `sm_scale`.
    State: `state`, `initial_state`; documents: `offsets`, `cu_seqlens`; `return_state`, `output_final_state`: True.
    """
    return conventions.adapt(function, WORDS, layout=layout, name=name, aside=aside)
