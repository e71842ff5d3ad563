"""Apply a split plan to one model instance: hooks that split and gather tensors, routed attention; undoable."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foci.core.errors import Unsupported
from foci.integrations.diffusers import Handle, Target, attention_sites, route
from foci.integrations.split_plan import Cut, Gather, Kind, SplitPlan, Stream, modules_of, require_fit
from foci.ops.masks import Dense, Mask


class Ranks(Protocol):
    """What the hooks need from real or simulated ranks. Positions are in rank order."""

    def runs(self, tokens: int) -> list[tuple[int, int]]:
        """Start and stop of every rank's run of `tokens` tokens."""
        ...

    @property
    def rank(self) -> int: ...

    def enter(self, arguments: dict[str, Any]) -> None:
        """The model was called with these arguments, the same on all ranks; may replace them."""
        ...

    def gather(self, module: str, x: Tensor, dim: int, tokens: int) -> Tensor:
        """All-gather along tokens."""
        ...

    def attend(self, site: str, kind: Kind) -> Callable[..., Tensor]:
        """Attention for a site with a split sequence; keyword `text`: text tokens here, for kinds front and back."""
        ...


@dataclass
class Tokens:
    """The numbers of tokens in the model's current call, and of text tokens on this rank."""

    whole: dict[Stream, int] = field(default_factory=dict)
    named: dict[Stream, str] = field(default_factory=dict)
    text_here: int = 0
    calls: set[str] = field(default_factory=set)

    def only(self, site: str, q: Tensor, k: Tensor) -> None:
        """Raise if a call cannot be attention over the split sequence: another length of keys, or a second call."""
        if q.shape[1] != k.shape[1]:
            raise Unsupported(
                f"split: {site}",
                [f"it attends {k.shape[1]} keys with {q.shape[1]} queries; the plan knows one sequence"],
            )
        if site in self.calls:
            raise Unsupported(f"split: {site}", ["it calls attention twice; which is over split tokens is not known"])
        self.calls.add(site)

    def count(self, stream: Stream, tokens: int, where: str) -> None:
        """Set the number of tokens of a stream, or check it: raises ValueError if two tensors disagree."""
        known = self.whole.setdefault(stream, tokens)
        first = self.named.setdefault(stream, where)
        if known != tokens:
            raise ValueError(
                f"split: {where} has {tokens} {stream} tokens, but {first} has {known}; expected equal numbers"
            )


@dataclass
class Hooked:
    """The hooks and routes of one model; `restore()` removes them."""

    routed: Handle
    tokens: Tokens
    _hooks: list[Any] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Remove all hooks, and restore every original processor object."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.routed.restore()


def hook(model: nn.Module, plan: SplitPlan, ranks: Ranks, text: str = "auto", backend: str | None = None) -> Hooked:
    """Apply a plan to a model; nothing is changed unless all checks pass. `text`: see `split.install`."""
    sites = [name for name, _, _ in attention_sites(model)]
    if not sites:
        raise ValueError(f"split: {type(model).__name__} has no attention site: no module in it has a processor")
    require_fit(plan, model, sites)
    _require_text(plan, text)
    tokens = Tokens()
    routed = route(model, {name: Target(backend, _attend(name, plan, ranks, tokens)) for name in sites})
    hooked = Hooked(routed, tokens)
    if left := [f"{name}: {why}" for name, why in routed.skipped if plan.kind(name) != "whole"]:
        hooked.restore()
        raise Unsupported(f"split: {type(model).__name__} cannot be split: attention in it is not routed", left)
    hooks = hooked._hooks
    hooks.append(_on_call(model, _start(model, plan, ranks, tokens)))
    for _, module, _ in attention_sites(model):
        hooks.append(_on_call(module, lambda arguments: tokens.calls.clear()))
    cutter = _Cutter(plan, ranks, tokens, text)
    for cut in plan.cuts:
        for name, module in modules_of(model, cut.module):
            hooks.append(_hook_cut(model, name, module, cut, cutter))
    for pattern in plan.blocks:  # after the cut hooks, so that it sees the text on this rank
        for _, module in modules_of(model, pattern):
            hooks.append(_on_call(module, _note_text(plan, tokens)))
    for gather in plan.gathers:
        for name, module in modules_of(model, gather.module):
            hooks.append(_hook_gather(name, module, gather, ranks, tokens))
    return hooked


def _require_text(plan: SplitPlan, text: str) -> None:
    if text not in ("auto", "split", "replicated"):
        raise ValueError(f"split: text must be 'auto', 'split' or 'replicated', got {text!r}")
    if text == "split" and not plan.splits_text:
        raise ValueError(f"split: text='split', but the plan for {plan.model} does not say where its text is cut")


Arguments = dict[str, Any]


def _on_call(module: nn.Module, act: Callable[[Arguments], None]) -> Any:
    """Before each call of a module, let `act` see and change its arguments by name."""
    signature = inspect.signature(module.forward)

    def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if called is not module:  # a copy of the model shares these hooks, but is not split
            return None
        bound = signature.bind(*args, **kwargs)
        act(bound.arguments)
        return bound.args, bound.kwargs

    return module.register_forward_pre_hook(before, with_kwargs=True)


def _start(model: nn.Module, plan: SplitPlan, ranks: Ranks, tokens: Tokens) -> Callable[[Arguments], None]:
    defaults = {name: p.default for name, p in inspect.signature(model.forward).parameters.items()}

    def start(arguments: Arguments) -> None:
        for name, value, reason in plan.refused:
            if value is None and name in defaults and arguments.get(name) is not None:
                raise ValueError(f"split: {name} was given, but the plan for {plan.model} refuses it: {reason}")
        tokens.whole.clear()
        tokens.named.clear()
        tokens.text_here = 0
        ranks.enter(arguments)

    return start


def _note_text(plan: SplitPlan, tokens: Tokens) -> Callable[[Arguments], None]:
    def note(arguments: Arguments) -> None:
        # A block without that argument has text and image in one tensor, with as much text as the blocks before.
        if isinstance(given := arguments.get(plan.text), Tensor):
            tokens.text_here = given.shape[1]

    return note


@dataclass(frozen=True)
class _Cutter:
    """Takes this rank's tokens out of tensors."""

    plan: SplitPlan
    ranks: Ranks
    tokens: Tokens
    text: str

    def __call__(self, value: Any, cut: Cut, where: str) -> Any:
        if isinstance(value, list | tuple):
            parts = [self(part, cut, where) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if not isinstance(value, Tensor) or (cut.rank is not None and value.dim() != cut.rank):
            return value
        if not -value.dim() <= cut.dim < value.dim():
            raise ValueError(f"split: {where} has {value.dim()} dimensions, none of them {cut.dim} (tokens)")
        whole = value.shape[cut.dim]
        if cut.stream in ("front", "back"):
            return self.both(value, cut, where)
        if cut.stream == "text" and not self.splits(whole):
            return value
        self.tokens.count(cut.stream, whole, where)
        first, stop = self.ranks.runs(whole)[self.ranks.rank]
        return value.narrow(cut.dim, first, stop - first)

    def both(self, value: Tensor, cut: Cut, where: str) -> Tensor:
        """This rank's part of a tensor with text and image in one sequence."""
        image = self.tokens.whole.get("image", 0)
        text = value.shape[cut.dim] - image
        if not image or text < 0 or self.tokens.whole.get("text", text) != text:
            raise ValueError(f"split: {where} has {value.shape[cut.dim]} tokens of text and image: {self.tokens.whole}")
        runs = [self.ranks.runs(image)[self.ranks.rank]]
        runs.insert(
            cut.stream == "back", self.ranks.runs(text)[self.ranks.rank] if "text" in self.tokens.whole else (0, text)
        )
        starts = (0, text) if cut.stream == "front" else (0, image)
        parts = [value.narrow(cut.dim, start + a, b - a) for start, (a, b) in zip(starts, runs, strict=True)]
        return torch.cat(parts, cut.dim)

    def splits(self, text_tokens: int) -> bool:
        """Whether text of this length is split."""
        size = len(self.ranks.runs(text_tokens))
        enough = not self.plan.whole_text or text_tokens >= size
        if self.text == "split" and not enough:
            raise ValueError(
                f"split: text='split', but {text_tokens} text tokens are too few for {size} ranks: the code of "
                f"{self.plan.model} needs one on each; expected text='replicated' or 'auto'"
            )
        return self.text != "replicated" and enough


def _hook_cut(model: nn.Module, name: str, module: nn.Module, cut: Cut, cutter: _Cutter) -> Any:
    where = f"{name or type(model).__name__}: {cut.tensor if isinstance(cut.tensor, str) else 'output'}"
    if isinstance(cut.tensor, str):
        argument = cut.tensor

        def before(arguments: Arguments) -> None:
            if arguments.get(argument) is not None:
                arguments[argument] = cutter(arguments[argument], cut, where)

        return _on_call(module, before)
    number = cut.tensor

    def after(called: nn.Module, args: Any, output: Any) -> Any:
        if called is not module:
            return None
        if isinstance(output, Tensor):
            return cutter(output, cut, where)
        return type(output)(cutter(part, cut, where) if i == number else part for i, part in enumerate(output))

    return module.register_forward_hook(after)


def _hook_gather(name: str, module: nn.Module, gather: Gather, ranks: Ranks, tokens: Tokens) -> Any:
    def after(called: nn.Module, args: Any, output: Any) -> Any:
        if called is not module:
            return None
        if "image" not in tokens.whole:
            raise ValueError(f"split: {name} is to be gathered, but no tensor has been split before it")
        first = output if isinstance(output, Tensor) else output[0]
        joined = ranks.gather(name, first, gather.dim, tokens.whole["image"])
        return joined if isinstance(output, Tensor) else type(output)((joined, *output[1:]))

    return module.register_forward_hook(after)


def _attend(site: str, plan: SplitPlan, ranks: Ranks, tokens: Tokens) -> Callable[..., Tensor]:
    """A site's attention: across ranks if its sequence is split, local if not."""
    kind = plan.kind(site)
    assert kind is not None  # require_fit
    compute = ranks.attend(site, kind)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: str | None = None,
    ) -> Tensor:
        given: dict[str, Any] = {"scale": scale, "dropout": dropout, "backend": backend}
        if kind == "whole":
            return compute(q, k, v, mask=mask, bias=bias, **given)
        if kind != "cross":
            tokens.only(site, q, k)
        order = _Order(site, kind, ranks, tokens)
        if isinstance(mask, Dense):
            mask = Dense(order.mine(mask.allowed, q.shape[1]))
        elif mask is not None and kind != "self":
            raise Unsupported(f"split: {site}", [f"a mask {mask} over text and image is not supported"])
        bias = None if bias is None else order.mine(bias, q.shape[1])
        if kind in ("front", "back") and "text" not in tokens.whole:
            given["text"] = tokens.text_here
        return compute(q, k, v, mask=mask, bias=bias, **given)

    return attend


@dataclass(frozen=True)
class _Order:
    """The order of a site's tokens over ranks, for masks that the model made for the whole sequence."""

    site: str
    kind: Kind
    ranks: Ranks
    tokens: Tokens

    def mine(self, matrix: Tensor, rows: int) -> Tensor:
        """This rank's rows of a matrix [..., T or 1, S or 1] of the whole sequence, columns in rank order."""
        if self.kind != "cross" and (order := self._columns()) is not None and matrix.shape[-1] == len(order):
            matrix = matrix[..., torch.tensor(order, device=matrix.device)]
        if matrix.dim() < 2 or matrix.shape[-2] in (1, rows):
            return matrix
        held = self._rows()
        if self.kind in ("front", "back") and "text" not in self.tokens.whole:
            raise Unsupported(f"split: {self.site}", ["a mask with a row per token needs text='split'"])
        if matrix.shape[-2] != sum(len(each) for each in held):
            raise ValueError(f"split: {self.site}: a mask has {matrix.shape[-2]} rows; expected 1 or all tokens")
        return matrix[..., torch.tensor(held[self.ranks.rank], device=matrix.device), :]

    def _columns(self) -> list[int] | None:
        """The column order; None if it is the model's own."""
        return [place for each in self._rows() for place in each] if "text" in self.tokens.whole else None

    def _rows(self) -> list[list[int]]:
        """For each rank, the positions in the model's sequence of its tokens."""
        image = self.tokens.whole["image"]
        text = self.tokens.whole.get("text", 0) if self.kind in ("front", "back") else 0
        first = {"front": (text, 0)}.get(self.kind, (0, image))  # where image and text begin
        found = []
        for (a, b), (c, d) in zip(self.ranks.runs(image), self.ranks.runs(text), strict=True):
            parts = [range(first[0] + a, first[0] + b), range(first[1] + c, first[1] + d)]
            found.append([place for part in (parts[::-1] if self.kind == "front" else parts) for place in part])
        return found
