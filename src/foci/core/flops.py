"""What torch's flop counter (torch.utils.flop_counter) counts for foci's ops: the work of their Spec."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, get_type_hints

import torch

from foci.core.spec import Spec

# Its import imports Triton, so it's left to whoever counts; until then nobody needs the formulas.
_COUNTER = "torch.utils.flop_counter"
_FORMULAS: dict[Any, Callable[..., int]] = {}  # by op, all overloads together


def add_formulas(spec: Spec, *ops: Any) -> None:
    """Remember what these ops of the Spec cost: forwards, or backwards, whose last arguments are those of a forward."""
    assert spec.call is not None
    if spec.work is not None:
        for op in ops:
            before = len(op._schema.arguments) - len(get_type_hints(spec.call))
            _FORMULAS[op.overloadpacket] = _formula(spec, before)


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
    counting = sys.modules.get(_COUNTER)
    if counting is not None:
        _tell(counting)


def _tell(counting: ModuleType) -> None:
    for op, formula in _FORMULAS.items():
        if op not in counting.flop_registry:
            counting.register_flop_formula(op, get_raw=True)(formula)
    for place in range(torch._C._len_torch_dispatch_stack()):
        mode = torch._C._get_dispatch_stack_at(place)
        if isinstance(mode, counting._FlopCounterMode):
            for op, formula in _FORMULAS.items():
                mode.counter.flop_registry.setdefault(op, formula)
