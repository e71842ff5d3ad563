"""foci's own layers in any model: `install(model, plan)` sets the backend of each, `handle.restore()` undoes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakSet

from torch import nn

from foci.core.errors import Unsupported
from foci.integrations.site_plan import check_plan, require_module
from foci.integrations.undoable import Undoable
from foci.nn.attention import Attention
from foci.nn.recurrent import Recurrent
from foci.ops.decay.spec import SPEC as RECURRENT  # delta_rule's backends have the same names
from foci.ops.softmax.spec import SPEC as SOFTMAX

_INSTALLED: WeakSet[nn.Module] = WeakSet()


@dataclass(eq=False)
class Handle(Undoable):
    """Backends set in one model: the `sites`, those `skipped` with the reason, and `restore()` to undo it."""

    sites: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    _before: list[tuple[Attention | Recurrent, str | None]] = field(repr=False)

    def restore(self) -> None:
        """Restore every layer's backend. Calling it twice has no further effect."""
        for layer, backend in self._before:
            layer.backend = backend
            _INSTALLED.discard(layer)
        self._before = []


def find_sites(model: nn.Module) -> dict[str, Attention | Recurrent]:
    """foci's layers in the model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Attention | Recurrent)}


def install(model: nn.Module, plan: Mapping[str, str | None] | None = None) -> Handle:
    """Run each layer on the backend that `plan` names for it; on foci's choice, call by call, without a plan.

    Layers that the plan does not name, or for which it names None, are left. Raises Unsupported for a model without
    layers of foci, ValueError for a plan that names others, unknown backends or layers that have one by `install`
    already, TypeError for what is no model or plan.
    """
    require_module(model)
    sites = find_sites(model)
    if not sites:
        raise Unsupported(f"foci cannot choose backends in {type(model).__name__}", ["no layer in it is foci's"])
    check_plan(plan, {name: SOFTMAX if isinstance(layer, Attention) else RECURRENT for name, layer in sites.items()})
    routed = dict.fromkeys(sites) if plan is None else {name: backend for name, backend in plan.items() if backend}
    if any(sites[name] in _INSTALLED for name in routed):
        raise ValueError("foci is installed in this model already; call restore() on its handle first")
    before = [(sites[name], sites[name].backend) for name in routed]
    _INSTALLED.update(layer for layer, _ in before)
    for name, backend in routed.items():
        sites[name].backend = backend
    left = tuple((name, "left by the plan") for name in sites if name not in routed)
    return Handle(tuple(routed), left, before)
