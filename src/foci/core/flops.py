"""What torch's flop counter (torch.utils.flop_counter) counts for foci's ops: the work of their Spec."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, get_type_hints

import torch

from foci.core.spec import Spec

# Its import imports Triton, so it's left to whoever counts; until then nobody needs the formulas.
_COUNTER = "torch.utils.flop_counter"
_FORMULAS: dict[Any, Callable[..., int]] = {}  # by op, all overloads together
_REGISTERED: set[Any] = set()  # those that torch's registry has


def add_formulas(spec: Spec, *ops: Any) -> None:
    """Remember what these ops of the Spec cost: forwards, or backwards, whose last arguments are those of a forward.

    Told at once to who counts already: by itself in inference mode, as saved programs run it, an op tells nobody.
    """
    assert spec.call is not None
    if spec.work is not None:
        for op in ops:
            before = len(op._schema.arguments) - len(get_type_hints(spec.call))
            _FORMULAS[op.overloadpacket] = _formula(spec, before)
        tell_counters()


def _formula(spec: Spec, before: int) -> Callable[..., int]:
    """The operations of one op, whose arguments are `before` others (0 for a forward) and the values of a Call."""

    def formula(*values: Any, out_val: Any = None, **named: Any) -> int:
        assert spec.call is not None and spec.work is not None
        work = spec.work(spec.call(*values[before:], **named))
        operations = work.flops if work.counted is None else work.counted
        return round(operations * work.backward) if before else operations

    return formula


def tell_counters() -> None:
    """Give the formulas to torch's registry, and to the counters that are on: each copied the registry when made."""
    counting = _imported()
    if counting is None:
        return
    if len(_REGISTERED) < len(_FORMULAS):
        _give(counting.flop_registry)
        _REGISTERED.update(_FORMULAS)
    for counter in _on(counting):
        _give(counter.flop_registry)


def _give(registry: dict[Any, Any]) -> None:
    """The formulas, where it has none. register_flop_formula raises where another thread has been first."""
    for op, formula in _FORMULAS.items():
        registry.setdefault(op, formula)


def warn_uncounted(function: str, instead: str) -> None:
    """Warn where a counter is on and what this function computes is no op, which counters would miss without a word."""
    counting = None if torch.compiler.is_compiling() else _imported()
    if counting is not None and any(_on(counting)):
        warnings.warn(
            f"{function}: torch's flop counter sees a part of its operations, or none; count {instead}", stacklevel=3
        )


def _imported() -> ModuleType | None:
    """The module of torch's flop counter, if somebody has imported it, and its import has ended."""
    counting = sys.modules.get(_COUNTER)
    return counting if hasattr(counting, "FlopCounterMode") else None


def _on(counting: ModuleType) -> Iterator[Any]:
    """The counters that are on; each is held by a mode of its own."""
    for place in range(torch._C._len_torch_dispatch_stack()):
        counter = getattr(torch._C._get_dispatch_stack_at(place), "counter", None)
        if isinstance(counter, counting.FlopCounterMode):
            yield counter
