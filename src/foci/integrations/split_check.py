"""Check a split plan in one process: simulate each rank, and compare its tensors with their parts in a whole run.

A simulated rank's attention returns recorded results of the whole run, so that it needs no other rank, and the first
tensor that differs from its part of the whole is the cause of the error and not a consequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foci.integrations.diffusers import Target, attention_sites, route
from foci.integrations.split_hooks import Tokens, hook
from foci.integrations.split_plan import Kind, SplitPlan, plan_for
from foci.ops.softmax.api import attention

_SAME = {torch.float64: 1e-6, torch.float32: 1e-4}  # half precision: 5e-2; another token's values differ by about 1
Seen = Mapping[tuple[str, int], Mapping[str, Tensor]]  # arguments by module and number of the call
Fault = Literal["unsplit", "ungathered", "values", "other"]


class SplitError(ValueError):
    """A split plan is wrong: `module` and `tensor` say where, `fault` how.

    For a tensor that was not split, `dim` is its token dimension and `stream` whose tokens: image, text, or joint.
    """

    def __init__(
        self, sentence: str, module: str, tensor: str, fault: Fault, dim: int | None = None, stream: str = "image"
    ) -> None:
        self.sentence, self.module, self.tensor = sentence, module, tensor
        self.fault, self.dim, self.stream = fault, dim, stream
        super().__init__(f"split: {sentence}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sentence, self.module, self.tensor, self.fault, self.dim, self.stream)


@dataclass
class Recorded:
    """One call of a module: its tensors by name (`rotary_emb[0]`, `output`), in the order of the calls."""

    module: str
    tensors: dict[str, Tensor]


@dataclass
class Record:
    """The record of a whole run: calls of modules, attention calls by site, and modules in the order they finished.

    `skipped`: modules whose attention could not be recorded.
    """

    calls: dict[tuple[str, int], Recorded] = field(default_factory=dict)
    attention: dict[tuple[str, int], tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    skipped: tuple[str, ...] = ()


def check(
    model: nn.Module, inputs: Mapping[str, Any], plan: SplitPlan | None = None, *, size: int = 2, text: str = "auto"
) -> None:
    """Check a plan (by default the one of the model's class) on a call of the model, for every rank of `size`.

    The model runs once whole and once per rank, in this process, and is restored afterwards. Every module's inputs and
    outputs and every site's q, k and v must equal the rank's tokens of those in the whole run. Keeps copies of all of
    them: use small inputs.

    Raises SplitError naming the first tensor that is not, ValueError for a plan that does not fit the model.
    """
    plan = plan_for(model) if plan is None else plan
    record = watch(model, inputs)
    for rank in range(size):
        _simulate(model, inputs, plan, text, record, rank, size)


def watch(model: nn.Module, inputs: Mapping[str, Any]) -> Record:
    """Run the model whole and record the inputs and outputs of every module and attention site."""
    record = Record()
    counts: dict[str, int] = {}

    def keep(name: str) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            out = attention(q, k, v, **options)
            number = counts[name] = counts.get(name, -1) + 1
            record.attention[name, number] = (q.clone(), k.clone(), v.clone(), out.clone())
            return out

        return attend

    def started(name: str, number: int, tensors: dict[str, Tensor]) -> None:
        record.calls[name, number] = Recorded(name, {key: x.clone() for key, x in tensors.items()})

    def ended(name: str, number: int, tensors: dict[str, Tensor]) -> None:
        record.calls[name, number].tensors.update({key: x.clone() for key, x in tensors.items()})
        record.ended.append(name)

    sites = [name for name, _, _ in attention_sites(model)]
    routed = route(model, {name: Target(attend=keep(name)) for name in sites})
    with torch.no_grad(), routed, _hooked(model, started, ended, []):
        model(**inputs)
    record.skipped = tuple(name for name, _ in routed.skipped)
    return record


def _simulate(
    model: nn.Module, inputs: Mapping[str, Any], plan: SplitPlan, text: str, record: Record, rank: int, size: int
) -> None:
    pretended = _SimulatedRank(record, rank, size)
    stack: list[tuple[str, int]] = []
    with torch.no_grad():
        hooked = hook(model, plan, pretended, text)
        pretended.tokens = hooked.tokens

        def compare(name: str, number: int, tensors: dict[str, Tensor]) -> None:
            whole = record.calls.get((name, number))
            for key, mine in tensors.items():
                if whole is not None and key in whole.tensors:
                    pretended.compare(name, key, whole.tensors[key], mine)
            if "output" in tensors:
                pretended.last = name, list(tensors["output"].shape)

        try:
            with _hooked(model, compare, compare, stack) as seen:
                model(**inputs)
        except SplitError as error:
            if error.fault == "values" and (cause := pretended.unsplit(stack, seen)) is not None:
                raise cause from error
            raise
        except Exception as error:
            raise pretended.explain(stack, seen, error) from error
        finally:
            hooked.restore()


class _SimulatedRank:
    """A simulated rank, whose communication and attention are answered from the record of the whole run."""

    def __init__(self, record: Record, rank: int, size: int) -> None:
        self.record, self.rank, self.size = record, rank, size
        self.tokens = Tokens()
        self.last: tuple[str, list[int]] = ("", [])

    def runs(self, tokens: int) -> list[tuple[int, int]]:
        small, more = divmod(tokens, self.size)
        return list(pairwise(rank * small + min(rank, more) for rank in range(self.size + 1)))

    def enter(self, arguments: dict[str, Any]) -> None:
        self.counts: dict[str, int] = {}

    def gather(self, module: str, x: Tensor, dim: int, tokens: int) -> Tensor:
        recorded = self.record.calls[module, 0].tensors
        whole = recorded["output"] if "output" in recorded else recorded["output[0]"]
        if x.shape == whole.shape and self.size > 1:
            sentence = f"{module}: output is gathered, but it is whole already"
            raise SplitError(sentence, module, "output", "other")
        self.compare(module, "output", whole, x)
        return whole

    def attend(self, site: str, kind: Kind) -> Callable[..., Tensor]:
        def over_ranks(q: Tensor, k: Tensor, v: Tensor, *, text: int | None = None, **options: Any) -> Tensor:
            number = self.counts[site] = self.counts.get(site, -1) + 1
            *wholes, out = self.record.attention[site, number]
            for key, whole, mine in zip("qkv", wholes, (q, k, v), strict=True):
                if mine.shape[1] == whole.shape[1] and self.size > 1:
                    raise SplitError(
                        f"{site}: {key} of the attention call was left unsplit: it has all {mine.shape[1]} tokens on "
                        f"rank {self.rank} of {self.size}",
                        site, key, "unsplit", 1,
                    )  # fmt: skip
                self.compare(site, key, whole, mine, kind)
            return next(iter(self.parts(out, q.shape[1], 1, kind)))

        def at_home(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            number = self.counts[site] = self.counts.get(site, -1) + 1
            for key, whole, mine in zip("kv", self.record.attention[site, number][1:3], (k, v), strict=True):
                if mine.shape != whole.shape:
                    raise SplitError(
                        f"{site}: its keys are split ({mine.shape[1]} of {whole.shape[1]} tokens), but the plan says "
                        f"that it is computed without the other ranks ({kind!r})",
                        site, key, "other", 1,
                    )  # fmt: skip
            return attention(q, k, v, **options)

        return at_home if kind in ("cross", "whole") else over_ranks

    def parts(self, whole: Tensor, count: int, dim: int, kind: Kind | None = None) -> Iterator[Tensor]:
        """Every way in which `count` tokens along a dimension can be this rank's part of the whole tensor."""
        image, text = self.tokens.whole.get("image", 0), self.tokens.whole.get("text", 0)
        a, b = self.runs(image)[self.rank]
        c, d = self.runs(text)[self.rank] if text else (0, 0)
        n = whole.shape[dim]
        for tokens, (first, stop) in ((image, (a, b)), (text, (c, d))):
            if tokens and n % tokens == 0 and count == n // tokens * (stop - first):
                rows = whole.unflatten(dim, (n // tokens, tokens)).narrow(dim + 1, first, stop - first)
                yield rows.flatten(dim, dim + 1)
        other = n - image
        if image and other > 0 and count == b - a + (d - c if other == text else other):
            c, d = (c, d) if other == text else (0, other)
            if kind != "back":
                yield torch.cat([whole.narrow(dim, c, d - c), whole.narrow(dim, other + a, b - a)], dim)
            if kind != "front":
                yield torch.cat([whole.narrow(dim, a, b - a), whole.narrow(dim, image + c, d - c)], dim)

    def compare(self, module: str, key: str, whole: Tensor, mine: Tensor, kind: Kind | None = None) -> None:
        """Raise SplitError unless `mine` is the whole tensor, or this rank's tokens of it along one dimension."""
        where = f"{module or 'the model'}: {key}"
        if whole.dim() != mine.dim():
            raise SplitError(
                f"{where} has {mine.dim()} dimensions, and {whole.dim()} in one process", module, key, "other"
            )
        differing = [d for d in range(whole.dim()) if whole.shape[d] != mine.shape[d]]
        if not differing:
            candidates = [whole]
        else:
            dim = differing[0]
            if not module and key.startswith("output"):
                raise self.ungathered(f"the model gives {list(mine.shape)} instead of {list(whole.shape)}")
            candidates = [part for part in self.parts(whole, mine.shape[dim], dim, kind) if part.shape == mine.shape]
            if not candidates:
                raise SplitError(
                    f"{where} has shape {list(mine.shape)} on rank {self.rank} of {self.size} and {list(whole.shape)} "
                    f"in one process, which is not a split of {self.tokens.whole}",
                    module, key, "values", dim,
                )  # fmt: skip
        if not any(_same(mine, candidate) for candidate in candidates):
            raise SplitError(
                f"{where} on rank {self.rank} of {self.size} does not hold the values of its tokens in one process "
                f"(shape {list(mine.shape)} of {list(whole.shape)}): something in the model counts the tokens it sees",
                module, key, "values",
            )  # fmt: skip

    def unsplit(self, stack: list[tuple[str, int]], seen: Seen) -> SplitError | None:
        """The error for a tensor with all tokens in a module whose other inputs are split; innermost module first."""
        for name, number in reversed(stack if self.size > 1 else []):
            whole = self.record.calls[name, number].tensors
            given = {key: x for key, x in seen[name, number].items() if key in whole}
            if all(x.shape == whole[key].shape for key, x in given.items()):
                continue
            whole_still = {key: x for key, x in given.items() if x.shape == whole[key].shape}
            for last in (False, True):  # the last dimension usually is channels, or the columns of a mask
                for stream, tokens in self.streams():
                    for key, x in whole_still.items():
                        if (dim := _counting(x, tokens, last)) is not None:
                            return self._left(name, key, x, dim, stream)
        return None

    def _left(self, module: str, key: str, x: Tensor, dim: int, stream: str) -> SplitError:
        return SplitError(
            f"{module or 'the model'}: {key} was left unsplit: it has all {x.shape[dim]} {stream} tokens, shape "
            f"{list(x.shape)}, on rank {self.rank} of {self.size}, where other tensors have some; the plan must cut it "
            f"along dimension {dim}",
            module, key, "unsplit", dim, stream,
        )  # fmt: skip

    def streams(self) -> Iterator[tuple[str, int]]:
        """The token counts that a dimension may have: joint, image or text."""
        whole = self.tokens.whole
        text = whole.get("text", self.tokens.text_here)
        yield from whole.items()
        if text and "image" in whole:
            yield "joint", text + whole["image"]

    def explain(self, stack: list[tuple[str, int]], seen: Seen, error: Exception) -> SplitError:
        """The SplitError behind an exception of the model's code on a part of the tokens."""
        if (cause := self.unsplit(stack, seen)) is not None:
            return cause
        name = stack[-1][0] if stack else ""
        sentence = " ".join(str(error).split())[:200]
        if not name and self.last[0]:
            return self.ungathered(f"the model failed ({sentence})")
        place = f"{name or 'the model'} failed on rank {self.rank} of {self.size}: {sentence}"
        return SplitError(place, name, "", "other")

    def ungathered(self, consequence: str) -> SplitError:
        """The error that the last module's output was not gathered."""
        module, shape = self.last
        return SplitError(
            f"the output of {module} was left ungathered: with its shape {shape} on rank {self.rank} of {self.size} "
            f"{consequence}",
            module, "output", "ungathered",
        )  # fmt: skip


def _counting(x: Tensor, tokens: int, last: bool) -> int | None:
    """The dimension with size `tokens`: only the last one, or only the others."""
    dims = [x.dim() - 1] if last and 0 < x.dim() <= 2 else [] if last else range(x.dim() - 1)
    return next((dim for dim in dims if x.shape[dim] == tokens), None)


def _same(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point() or a.numel() == 0:
        return torch.equal(a, b)
    error, scale = (a.double() - b.double()).norm(), b.double().norm()
    return bool(error <= _SAME.get(a.dtype, 5e-2) * scale) or bool(torch.equal(a, b))


Listener = Callable[[str, int, dict[str, Tensor]], None]


@contextmanager
def _hooked(
    model: nn.Module, started: Listener, ended: Listener, stack: list[tuple[str, int]]
) -> Iterator[dict[tuple[str, int], dict[str, Tensor]]]:
    """Hooks on every module that call `started` with arguments and `ended` with outputs; yields arguments by call.

    After an exception, `stack` has the modules that it passed through.
    """
    counts: dict[str, int] = {}
    seen: dict[tuple[str, int], dict[str, Tensor]] = {}
    hooks = []
    for name, module in model.named_modules():
        signature = inspect.signature(module.forward)

        def before(called: Any, args: Any, kwargs: Any, name: str = name, signature: Any = signature) -> None:
            number = counts[name] = counts.get(name, -1) + 1
            stack.append((name, number))
            seen[name, number] = dict(_tensors(signature.bind(*args, **kwargs).arguments))
            started(name, number, seen[name, number])

        def after(called: Any, args: Any, output: Any, name: str = name) -> None:
            ended(name, stack[-1][1], dict(_tensors({"output": output})))
            stack.pop()

        hooks += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield seen
    finally:
        for each in hooks:
            each.remove()


def _tensors(tree: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among arguments by name; inside a list, tuple or mapping with their index."""
    for name, value in tree.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}[{key!r}]", x) for key, x in value.items() if isinstance(x, Tensor))
        elif isinstance(value, list | tuple):
            yield from _tensors({f"{name}[{place}]": part for place, part in enumerate(value)})
