"""halo: the tokens before a rank's own, of rows and of documents, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from foci.core.errors import Disagreement, RankError
from foci.core.world import World
from foci.nn.parts import ShortConvolution, history
from foci.ops.layer_parts import convolve
from foci.parallel.group import Group
from foci.parallel.halo import halo
from tests.parallel.recurrent import lengths_of

Worlds = Callable[[int], World]
T, D = 13, 3
OFFSETS = (0, 0, 1, 6, 6, 12, 13)


def convolved(seed: int, size: int, offsets: tuple[int, ...] | None, tailed: bool) -> None:
    """A short convolution over ranks, its tail and the gradients of tokens and of the tail before, is one process's."""
    group = Group.of(dist.group.WORLD)
    lengths = lengths_of(T, group.size, seed)
    start, n = sum(lengths[: group.rank]), lengths[group.rank]
    rows = 2 if offsets is None else len(offsets) - 1
    x = torch.randn(2 if offsets is None else 1, T, D, dtype=torch.float64, requires_grad=True)
    tail = torch.randn(rows, size - 1, D, dtype=torch.float64, requires_grad=True) if tailed else None
    places = None if offsets is None else torch.tensor(offsets)
    layer = ShortConvolution(D, size, dtype=torch.float64)
    y, last = layer(x, tail=tail, offsets=places)
    dy, dlast = torch.randn_like(y), torch.randn_like(last)
    leaves = [x] if tail is None else [x, tail]
    expected = torch.autograd.grad((y, last), leaves, (dy, dlast), retain_graph=True)

    mine = x.detach()[:, start : start + n].requires_grad_()
    found = halo(mine, size - 1, group, tail=tail, offsets=places)
    tokens = history(mine, size - 1, tail=found.before, offsets=found.offsets)
    got = convolve(tokens.x, layer.weight, layer.bias, layer.activation, before=tokens.before)
    got = got if tokens.own is None else got[:, tokens.own]
    torch.testing.assert_close(got, y[:, start : start + n])
    torch.testing.assert_close(found.tail, last)
    if tail is None:  # nobody uses the tail: the backward of every rank runs all the same
        (alone,) = torch.autograd.grad(got, mine, dy[:, start : start + n], retain_graph=True)
        (right,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        torch.testing.assert_close(alone, right[:, start : start + n])
    # The tail is on every rank, and so is a share of its gradient; what a rank gives of the tail before is its part.
    given = (dy[:, start : start + n], dlast / group.size)
    gradients = list(torch.autograd.grad((got, found.tail), [mine, *leaves[1:]], given, materialize_grads=True))
    torch.testing.assert_close(gradients[0], expected[0][:, start : start + n])
    if tail is not None:
        dist.all_reduce(gradients[1])
        torch.testing.assert_close(gradients[1], expected[1])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["rows", "packed"])
def test_a_convolution_over_ranks_is_one_process(worlds: Worlds, size: int, offsets: tuple[int, ...] | None) -> None:
    """Ranks with fewer tokens than the convolution is wide, and with none."""
    for seed in (0, 1, 2):
        for width in (2, 4, 7):
            worlds(size).run(convolved, seed, width, offsets, seed != 1)


def steepness(y: Tensor, last: Tensor, x: Tensor) -> Tensor:
    """The squared slope of a loss of the third degree, from its gradient at x."""
    (slope,) = torch.autograd.grad(y.pow(3).sum() + last.pow(3).sum(), x, create_graph=True)
    return slope.square().sum()


def bent(seed: int, offsets: tuple[int, ...] | None) -> None:
    """A penalty on a gradient, whose own gradient is the second derivative, is one process's."""
    group = Group.of(dist.group.WORLD)
    lengths = lengths_of(T, group.size, seed)
    start, n = sum(lengths[: group.rank]), lengths[group.rank]
    x = torch.randn(2 if offsets is None else 1, T, D, dtype=torch.float64, requires_grad=True)
    places = None if offsets is None else torch.tensor(offsets)
    layer = ShortConvolution(D, 4, dtype=torch.float64)
    y, last = layer(x, offsets=places)
    (expected,) = torch.autograd.grad(steepness(y, last, x), x)

    mine = x.detach()[:, start : start + n].requires_grad_()
    found = halo(mine, 3, group, offsets=places)
    tokens = history(mine, 3, tail=found.before, offsets=found.offsets)
    got = convolve(tokens.x, layer.weight, layer.bias, layer.activation, before=tokens.before)
    got = got if tokens.own is None else got[:, tokens.own]
    share = group.size ** (1 / 3)  # of the tail, which is on every rank
    (gradient,) = torch.autograd.grad(steepness(got, found.tail / share, mine), mine)
    torch.testing.assert_close(gradient, expected[:, start : start + n])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("offsets", [None, OFFSETS], ids=["rows", "packed"])
def test_the_second_derivative_is_one_process(worlds: Worlds, size: int, offsets: tuple[int, ...] | None) -> None:
    for seed in (0, 1):
        worlds(size).run(bent, seed, offsets)


def shifted(x: Tensor) -> Tensor:
    return torch.cat([halo(x * 2, 2, dist.group.WORLD).before, x], 1).sin()


def compiled() -> None:
    x = torch.randn(1, 3, D, dtype=torch.float64, requires_grad=True)
    out, expected = torch.compile(shifted, backend="aot_eager")(x), shifted(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)))
    assert torch._dynamo.explain(shifted)(x).graph_break_count == 1


def test_a_model_round_it_compiles(worlds: Worlds) -> None:
    worlds(2).run(compiled)


def nothing_before() -> None:
    group = Group.of(dist.group.WORLD)
    found = halo(torch.ones(1, 2, 3), 0, group)
    assert found.before.shape == found.tail.shape == (1, 0, 3)


def test_a_convolution_of_one_token_has_none_before(worlds: Worlds) -> None:
    worlds(2).run(nothing_before)


@pytest.mark.parametrize("width", [-1, 2.0, True])
def test_a_width_is_a_number_of_tokens(worlds: Worlds, width: object) -> None:
    for each in worlds(2).outcomes(halo_of, width):
        with pytest.raises(ValueError, match=f"width must be a whole number of tokens, at least 0, got {width!r}"):
            raise each.error


def halo_of(width: int) -> None:
    halo(torch.zeros(1, 4, 2), width, dist.group.WORLD)


def refused(kind: str) -> None:
    group = Group.of(dist.group.WORLD)
    x: Tensor = torch.zeros(1, 4, 2)
    if kind == "width":
        halo(x, group.rank, group)
    elif kind == "tail":
        halo(x, 3, group, tail=torch.zeros(1, 2 + (group.rank != 1), 2))
    elif kind == "x":
        halo([1], 3, group)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("width", Disagreement, "width"),
        ("tail", RankError, "rank 1"),
        ("x", TypeError, r"^halo: x must be a tensor, got \[1\]"),
    ],
)
def test_what_does_not_fit_fails_on_all_ranks(worlds: Worlds, kind: str, error: type, words: str) -> None:
    for each in worlds(2).outcomes(refused, kind):
        with pytest.raises(error, match=words):
            raise each.error
