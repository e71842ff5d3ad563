"""Adapt other libraries' calling conventions of the elementwise scan to the operator's argument names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foci.core.spec import Candidate
from foci.ops import words


def adapt(function: Callable[..., Any], *, name: str = "") -> Candidate:
    """A callable `f(x, log_decay, ...)` as a Candidate of the scan, by the keywords in its signature.

    State: `state`, `initial_state`; documents: `offsets`, `cu_seqlens`; `return_state`, `output_final_state`: True.
    """
    return words.adapt(function, ("x", "log_decay"), words.REST, name)
