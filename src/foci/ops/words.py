"""Adapt a callable that takes an operator's tensors by position and other arguments by its own keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from foci.core.spec import Candidate, Case, Inputs, Outputs, as_outputs
from foci.ops.conventions import OURS, RETURNS, UNNAMED, WORDS

REST = {name: WORDS[name] for name in ("state", "offsets")}


def adapt(
    function: Callable[..., Any], positions: tuple[str, ...], words: Mapping[str, tuple[str, ...]], name: str = ""
) -> Candidate:
    """`f(*positions, ...)` as a Candidate: the keywords of `words` that it names are used, the others are listed.

    The final state is requested if there is a keyword for it. A callable with foci's own keywords is `strict`:
    its errors must name the argument.
    """
    parameters = inspect.signature(function).parameters
    chosen = {kind: next((w for w in spellings if w in parameters), "") for kind, spellings in words.items()}
    asks = next((word for word in RETURNS if word in parameters), "")
    gives = ("out", "state") if asks else ("out",)

    def call(inputs: Inputs) -> Outputs:
        if _unnamed(inputs):
            raise NotImplementedError(UNNAMED)
        named = {chosen[n]: x for n, x in inputs.items() if n not in positions and x is not None}
        result = function(*(inputs[n] for n in positions), **named, **({asks: True} if asks else {}))
        if not asks and isinstance(result, tuple | list) and len(result) == 2 and result[1] is None:
            result = result[0]
        return as_outputs(result, gives)

    def refuses(case: Case) -> list[str]:
        return [UNNAMED] if _unnamed(case.make(torch.float32, torch.device("cpu"), 0)) else []

    def _unnamed(inputs: Inputs) -> bool:
        return any(x is not None and n not in positions and not chosen.get(n) for n, x in inputs.items())

    missing = ", ".join(kind for kind, word in chosen.items() if not word)
    told = (f"{missing}: its signature names none of them" if missing else "", "" if asks else "the final state")
    strict = parameters.keys() >= OURS - {"log_decay"}
    return Candidate(
        name or getattr(function, "__name__", type(function).__name__), call, refuses, tuple(filter(None, told)), gives,
        strict,
    )  # fmt: skip
