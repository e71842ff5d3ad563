"""Adapt other libraries' calling conventions of the selective scan to the operator's argument names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foci.core.spec import Candidate
from foci.ops import words


def adapt(function: Callable[..., Any], *, name: str = "") -> Candidate:
    """A callable `f(x, dt, A, B, C, ...)` as a Candidate of the selective scan, by the keywords in its signature.

    skip: `skip`, `D`. State: `state`, `initial_state`; documents: `offsets`, `cu_seqlens`; `return_state`,
    `output_final_state`: True.
    """
    return words.adapt(function, ("x", "dt", "A", "B", "C"), {"skip": ("skip", "D"), **words.REST}, name)
