"""One sentence for a failure: what is wrong, and what it would have done silently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from foci.check.compare import difference, extent

Close = Callable[[Tensor], bool]
DIES = "inference works, the first training step dies"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the second if the first ends in a colon ("backend='x' raised:")."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:200]


def refusal(error: NotImplementedError) -> str:
    """Why a call was refused: the reasons, where the error carries them."""
    return "; ".join(getattr(error, "reasons", [])) or first_line(error)


@contextmanager
def inherited(outputs: Sequence[Tensor]) -> Iterator[None]:
    """Add to an exception of a backward a note for each Function in the graph that overrides `forward` only."""
    try:
        yield
    except Exception as error:
        for name in _forward_only_overrides(outputs):
            error.add_note(INHERITED + name)
        raise


INHERITED = "overridden: "


def _forward_only_overrides(outputs: Sequence[Tensor]) -> list[str]:
    """Functions of the graph that override `forward` of another Function and keep its `backward`."""
    found, seen = [], set[Any]()
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [other for other, _ in node.next_functions if other is not None]
        kind = getattr(node, "_forward_cls", None)
        if kind is not None and "forward" in vars(kind) and "backward" not in vars(kind):
            parent = next((base for base in kind.__mro__[1:] if "backward" in vars(base)), torch.autograd.Function)
            if parent is not torch.autograd.Function and "forward" in vars(parent):
                found.append(f"{kind.__name__} overrides forward of {parent.__name__} and not its backward")
    return found


def exception(error: Exception, stage: str) -> str:
    """An exception out of the candidate's forward or backward."""
    notes = [n.removeprefix(INHERITED) for n in getattr(error, "__notes__", []) if n.startswith(INHERITED)]
    told = _exception(error, stage)
    return f"{notes[0]}: {told}" if notes else told


def _exception(error: Exception, stage: str) -> str:
    if getattr(error, "sentence", False):
        return first_line(error)
    text = first_line(error)
    missing = re.search(r"has no attribute '(\w+)'", text)
    count = re.search(r"incorrect number of gradients \(expected (\d+), got (\d+)\)", text)
    unpack = re.search(r"not enough values to unpack \(expected (\d+), got (\d+)\)", text)
    if stage == "backward" and isinstance(error, AttributeError) and missing:
        return f"backward reads `{missing[1]}`, which its forward never saved: {DIES}"
    if stage == "backward" and count:
        return f"backward returns {count[2]} gradients where forward takes {count[1]} arguments: {DIES}"
    if stage == "backward" and unpack:
        return f"backward unpacks {unpack[1]} saved values, its forward saved {unpack[2]}: {DIES}"
    return f"{stage} raised {type(error).__name__}: {text}"


def shape(name: str, got: Tensor, truth: Tensor) -> str:
    """An output of the wrong shape."""
    sentence = f"{name} has shape {list(got.shape)} where {list(truth.shape)} is expected"
    if got.dim() == truth.dim() == 4 and got.transpose(1, 2).shape == truth.shape:
        return f"{sentence}: tokens and heads are swapped (another --layout?)"
    if got.numel() == truth.numel():
        return f"{sentence}: the same numbers in another shape, so the next layer would mix tokens and heads"
    return sentence


def output(name: str, got: Tensor, truth: Tensor, close: Close) -> str:
    """A sentence for a wrong output that no known Mistake explains."""
    if not bool(torch.isfinite(got).all()) and bool((torch.isfinite(got) < torch.isfinite(truth)).any()):
        return f"{name} holds NaN or infinity where the right one is finite: every later layer would be lost"
    if not got.any() and truth.any():
        return f"{name} is all zeros"
    factor = _factor(got, truth)
    if factor is not None and close(factor * truth):
        return (
            f"{name} is {factor:.4g} times the right one ({factor - 1:+.2%}): small enough to train, wrong everywhere"
        )
    wrong = difference(got, truth)
    share = float((wrong > 1e-3 * extent(truth)).double().mean())
    size = f"worst by {float(wrong.max()):.2g} where the right size is {extent(truth):.2g}"
    return f"{name} is wrong, {size}; {share:.0%} of it is off"


def without_size(sentence: str) -> str:
    """A sentence of `output` without its numbers, by which those of one output are one."""
    return re.sub(r"worst by \S+ where the right size is \S+; \S+ of it is off", "", sentence)


def gradient(leaf: str, got: Tensor | None, truths: Mapping[str, Tensor | None], close: Callable[..., bool]) -> str:
    """A sentence for a wrong gradient. `close(other)`: whether the gradient equals another tensor within budget."""
    truth = truths[leaf]
    assert truth is not None
    if got is None:
        return f"d{leaf} is None when {leaf}.requires_grad: a trained {leaf} would silently never move"
    if got.shape != truth.shape:
        return f"d{leaf} has shape {list(got.shape)}, {leaf} has {list(truth.shape)}"
    if not bool(torch.isfinite(got).all()):
        return f"d{leaf} holds NaN or infinity: one step of training would destroy the weights"
    if not got.any() and truth.any():
        return f"d{leaf} is all zeros: a trained {leaf} would silently never move"
    for other, its in truths.items():
        if other != leaf and its is not None and its.shape == truth.shape and close(its):
            return (
                f"d{leaf} holds the gradient of {other}, in the wrong slot: training would silently move {leaf} by it"
            )
    factor = _factor(got, truth)
    if factor is not None and close(factor * truth):
        return (
            f"d{leaf} is {factor:.4g} times the right one ({factor - 1:+.2%}): training would silently use another rate"
        )
    return f"d{leaf} is wrong: the forward is right, and {leaf} would silently train on something else"


DETACHED = (
    "no gradient reaches any input (detached, no_grad or numpy inside): the forward is exact, and everything before it "
    "would silently stop learning"
)


def _factor(got: Tensor, truth: Tensor) -> float | None:
    """The least-squares factor from the truth to the result."""
    got, truth = got.double(), truth.double()
    both = torch.isfinite(got) & torch.isfinite(truth)
    got, truth = got[both], truth[both]
    square = float((truth * truth).sum())
    return float((got * truth).sum()) / square if square > 0 else None
