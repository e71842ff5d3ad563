"""Find every module whose attention really runs, by running the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foci.accelerate.calls import Call, Signature, signature
from foci.core.library import listening

_SOFTMAX = {"softmax", "_softmax"}


@dataclass(frozen=True)
class Site:
    """One attention module: its name, class and caller, and each distinct call with its count per forward."""

    name: str
    kind: str
    caller: str
    via: str
    calls: tuple[tuple[Call, int], ...] = field(repr=False)

    @property
    def count(self) -> int:
        """Attention calls in one forward of the model."""
        return sum(times for _, times in self.calls)


@dataclass(frozen=True)
class FoundSites:
    """The result of `find_sites`: `sites` that foci can route, and modules `skipped` with the reason."""

    sites: tuple[Site, ...]
    skipped: tuple[tuple[str, str], ...]


@dataclass
class _Event:
    """One attention call seen in a run."""

    stack: tuple[str, ...]
    via: str
    call: Call | None = None


class _Recorder(TorchFunctionMode):
    """Records attention calls with the stack of modules they run in; changes nothing."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.stack = stack
        self.events: list[_Event] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            self.events.append(_Event(tuple(self.stack), "scaled_dot_product_attention"))
        elif name in _SOFTMAX and isinstance(args[0], Tensor) and args[0].dim() in (3, 4):
            self.events.append(_Event(tuple(self.stack), "softmax"))
        return func(*args, **(kwargs or {}))

    def listen(self, call: Call) -> None:
        """Record a call of a foci operator, whichever backend runs it."""
        self.events.append(_Event(tuple(self.stack), "foci", call))


@contextmanager
def _module_stack(model: nn.Module) -> Iterator[list[str]]:
    """The stack of qualified names of running modules, outermost first, kept by hooks."""
    stack: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(_push(stack, name)))
        hooks.append(module.register_forward_hook(_pop(stack), always_call=True))
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


def _push(stack: list[str], name: str) -> Callable[..., None]:
    return lambda module, args: stack.append(name)


def _pop(stack: list[str]) -> Callable[..., None]:
    def pop(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    return pop


def attention_calls(model: nn.Module, run: Callable[[], Any]) -> list[_Event]:
    """The attention calls of one run."""
    with torch.no_grad(), _module_stack(model) as stack, _Recorder(stack) as seen, listening(seen.listen):
        run()
    return seen.events


def find_sites(
    model: nn.Module, run: Callable[[], Any], routed: Callable[[], AbstractContextManager[Any]]
) -> FoundSites:
    """Run the model as it is, and again with its attention routed to foci, which records each call's arguments.

    `routed()` is a context manager that routes the model and yields an object with `.sites` and `.skipped`.
    """
    original = attention_calls(model, run)
    with routed() as handle:
        events = attention_calls(model, run)
        names, skipped = list(handle.sites), list(handle.skipped)
    sites = []
    for name in names:
        here = [event for event in events if event.call is not None and _owner(event, names) == name]
        if not here:
            skipped.append((name, "it did not run with these inputs"))
            continue
        before = {event.via for event in original if _owner(event, names) == name}
        sites.append(_site(model, name, here, " and ".join(sorted(before)) or "its own arithmetic"))
    known = [*names, *(name for name, _ in skipped)]
    for event in original:
        inside = event.stack[-1] if event.stack else ""
        if _owner(event, known) is None:
            known.append(inside)
            skipped.append((inside or "the model itself", _unrouted(event.via)))
    return FoundSites(tuple(sites), tuple(skipped))


def _owner(event: _Event, names: list[str]) -> str | None:
    """The innermost of the named modules that the event ran in."""
    return next((name for name in reversed(event.stack) if name in names), None)


def _unrouted(via: str) -> str:
    if via == "softmax":
        return (
            "a softmax over three or four dimensions runs here: if it is attention, it is the module's own arithmetic"
        )
    return f"{via} runs here, in code that the integration of this model does not route"


def _site(model: nn.Module, name: str, events: list[_Event], via: str) -> Site:
    distinct: dict[Signature, tuple[Call, int]] = {}
    for event in events:
        assert event.call is not None
        key = signature(event.call)
        call, times = distinct.get(key) or (_cloned(event.call), 0)
        distinct[key] = call, times + 1
    module = model.get_submodule(name)
    processor = getattr(module, "processor", None)
    kind = type(module).__name__ + (f" with {type(processor).__name__}" if processor is not None else "")
    parents = [parent for parent in events[0].stack[: events[0].stack.index(name)] if parent]
    caller = type(model.get_submodule(parents[-1]) if parents else model).__name__
    return Site(name, kind, caller, via, tuple(distinct.values()))


def _cloned(call: Call) -> Call:
    """A copy of the call, as the model may overwrite its tensors later in the run."""
    return type(call)._make(value.detach().clone() if isinstance(value, Tensor) else value for value in call)
