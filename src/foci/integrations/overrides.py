"""Replace the forward of single modules, and restore it exactly, in whatever order several handles are restored."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from foci.integrations.undoable import Undoable

_NOTHING = object()


class Overrides(Undoable):
    """The forwards replaced on module instances; `restore()` puts back the original of each."""

    def __init__(self) -> None:
        self._put: list[_Replaced] = []

    def put(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Make `module` run `forward(*args, **kwargs)`; returns the previous forward, as a bound callable."""
        before = vars(module).get("forward", _NOTHING)
        replaced = _Replaced(module, module.forward, before, forward)
        vars(module)["forward"] = replaced
        self._put.append(replaced)
        return replaced.inner

    def restore(self) -> None:
        """Restore every instance. One whose forward was replaced again since keeps that replacement, without ours."""
        for replaced in reversed(self._put):
            replaced.at_rest = True
            _unwrap(replaced.module)
        self._put.clear()


class _Replaced:
    """A replacement forward with the signature of the one it replaced, which pipelines inspect."""

    def __init__(self, module: nn.Module, inner: Callable[..., Any], before: Any, outer: Callable[..., Any]) -> None:
        self.module, self.inner, self.before, self.outer = module, inner, before, outer
        self.at_rest = False
        self.__signature__ = inspect.signature(inner)

    @torch.compiler.disable  # communication is not traced; inner modules that were compiled themselves stay compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.inner if self.at_rest else self.outer)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Replaced:
        # A copy of the model has no handle and no process group, so it runs the original forward.
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.module, twin.inner = copy.deepcopy(self.module, memo), copy.deepcopy(self.inner, memo)
        twin.before = _NOTHING if self.before is _NOTHING else copy.deepcopy(self.before, memo)
        twin.outer, twin.at_rest, twin.__signature__ = twin.inner, True, self.__signature__
        return twin

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self.module).__name__} runs across ranks and cannot be pickled; call restore() of its handle first"
        )


def _unwrap(module: nn.Module) -> None:
    """Remove inactive replacements, from the outermost inwards until an active one."""
    while isinstance(top := vars(module).get("forward"), _Replaced) and top.at_rest:
        if top.before is _NOTHING:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = top.before


def require_evaluating(who: str, module: nn.Module) -> None:
    """Raise in training mode, where dropout would differ from rank to rank."""
    if module.training:
        raise ValueError(f"{who}: {type(module).__name__} is in training mode; call .eval() first")


def require_sampling(who: str, module: nn.Module, values: Iterable[Any]) -> None:
    """Raise in training mode, and where gradients would be asked for."""
    require_evaluating(who, module)
    if torch.is_grad_enabled():
        found = [value for value in values if isinstance(value, Tensor)]
        if any(tensor.requires_grad for tensor in (*found, *module.parameters())):
            raise ValueError(f"{who}: it is for sampling and gives no gradients; call the model under torch.no_grad()")
