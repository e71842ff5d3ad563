"""Find every place where a model's attention really runs, by running the model."""

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
    """One module whose attention runs: who it is, who calls it, each distinct call and how often a forward makes it."""

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
class Found:
    """What a run of the model showed: `sites` foci can route, `skipped` what it leaves and why."""

    sites: tuple[Site, ...]
    skipped: tuple[tuple[str, str], ...]


@dataclass
class _Event:
    """One attention call seen in a run."""

    stack: tuple[str, ...]
    via: str
    call: Call | None = None


class _Watch(TorchFunctionMode):
    """Notes attention calls with the modules they run in; changes nothing."""

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
        """A call of foci's, whatever it comes to: an op of ours, of torch, or plain torch."""
        self.events.append(_Event(tuple(self.stack), "foci", call))


@contextmanager
def _module_stack(model: nn.Module) -> Iterator[list[str]]:
    """The qualified names of the modules that are running now, outermost first."""
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


def watch(model: nn.Module, run: Callable[[], Any]) -> list[_Event]:
    """The attention calls of one run."""
    with torch.no_grad(), _module_stack(model) as stack, _Watch(stack) as seen, listening(seen.listen):
        run()
    return seen.events


def find(model: nn.Module, run: Callable[[], Any], routed: Callable[[], AbstractContextManager[Any]]) -> Found:
    """Run the model as it is, and once more with its attention routed, which shows each call's arguments.

    `routed()` routes the model for as long as it is entered and gives what it routed as `.sites` and `.skipped`.
    """
    original = watch(model, run)
    with routed() as handle:
        events = watch(model, run)
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
    return Found(tuple(sites), tuple(skipped))


def _owner(event: _Event, names: list[str]) -> str | None:
    """The innermost of the named modules that the event ran in."""
    return next((name for name in reversed(event.stack) if name in names), None)


def _unrouted(via: str) -> str:
    if via == "softmax":
        return (
            "a softmax over three or four dimensions runs here: if it is attention, it is the module's own arithmetic"
        )
    return f"{via} runs here, in code that no integration routes"


def _site(model: nn.Module, name: str, events: list[_Event], via: str) -> Site:
    distinct: dict[Signature, tuple[Call, int]] = {}
    for event in events:
        assert event.call is not None
        key = signature(event.call)
        call, times = distinct.get(key) or (_kept(event.call), 0)
        distinct[key] = call, times + 1
    module = model.get_submodule(name)
    processor = getattr(module, "processor", None)
    kind = type(module).__name__ + (f" with {type(processor).__name__}" if processor is not None else "")
    parents = [parent for parent in events[0].stack[: events[0].stack.index(name)] if parent]
    caller = type(model.get_submodule(parents[-1]) if parents else model).__name__
    return Site(name, kind, caller, via, tuple(distinct.values()))


def _kept(call: Call) -> Call:
    """A copy that outlives the run: the model may reuse the memory."""
    return type(call)._make(value.detach().clone() if isinstance(value, Tensor) else value for value in call)
