"""Text and image in one softmax, over ranks: outputs and gradients of one process, text replicated or split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import foci
from foci.core.errors import Disagreement, RankError, ShapeError, Unsupported
from foci.core.world import World
from foci.parallel.balance import shard, unshard
from foci.parallel.joint import joint
from foci.parallel.ring import ring
from foci.parallel.ulysses import ulysses, usp
from tests.parallel.proof import mask_of

Worlds = Callable[[int], World]
NAMES = ("q", "k", "v", "text_q", "text_k", "text_v", "sink")


def draw(T: int, text: int, H: int = 4, G: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(2)
    shapes = [(H, 4), (G, 4), (G, 5)]
    tensors = [torch.randn(2, n, *shape, dtype=torch.float64) for n in (T, text) for shape in shapes]
    return dict(zip(NAMES, [*tensors, torch.randn(H, dtype=torch.float64)], strict=True))


def whole(inputs: dict[str, Tensor], where: str, mask: Any, function: str = "attention_with_lse") -> Any:
    """What one process computes: out, text_out with their lse, and every gradient."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    joined = [
        torch.cat([leaves[f"text_{n}"], leaves[n]] if where == "front" else [leaves[n], leaves[f"text_{n}"]], 1)
        for n in "qkv"
    ]
    outputs = foci.attention_with_lse(*joined, mask=mask, sink=leaves["sink"], scale=0.6)
    counts = [inputs["text_q"].shape[1], inputs["q"].shape[1]]
    parts = [
        x.split(counts if where == "front" else counts[::-1], 1)[:: 1 if where == "front" else -1] for x in outputs
    ]
    text, image = tuple(part[0] for part in parts), tuple(part[1] for part in parts)
    loss_of(image, text, 1).backward()
    return image, text, {name: x.grad for name, x in leaves.items()}


def loss_of(image: Any, text: Any, copies: int) -> Tensor:
    return sum(x.sin().sum() for x in image) + sum(x.cos().sum() for x in text) / copies  # type: ignore[return-value]


def masks(words: dict[str, Any]) -> Any:
    mask = mask_of({name: args for name, args in words.items() if name != "Dense"})
    if "Dense" in words:
        dense = foci.Dense(torch.tensor(words["Dense"])[:, None, None])
        mask = dense if mask is None else mask & dense
    return mask


def wrapped(kind: str) -> tuple[Any, Any, str]:
    """A wrapper, what to shard over, and in which order."""
    world = dist.group.WORLD
    if kind == "ulysses":
        return ulysses(foci.attention_with_lse, world), world, "plain"
    if kind.startswith("ring"):
        order = kind.partition(" ")[2]
        return ring(foci.attention_with_lse, world, order=order), world, order
    mesh = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("ulysses", "ring"))
    return usp(foci.attention_with_lse, mesh), mesh, "zigzag"


def on_rank(kind: str, inputs: dict[str, Tensor], where: str, text: str, words: dict[str, Any]) -> Any:
    op, group, order = wrapped(kind)
    split = ("q", "k", "v") + (("text_q", "text_k", "text_v") if text == "split" else ())
    leaves = {n: (shard(x, group, order) if n in split else x).clone().requires_grad_() for n, x in inputs.items()}
    sink = leaves.pop("sink")
    attend = joint(op, where=where, text=text)  # type: ignore[arg-type]
    image, texts = attend(*leaves.values(), mask=masks(words), sink=sink, scale=0.6)
    loss_of(image, texts, dist.get_world_size() if text == "replicated" else 1).backward()
    leaves["sink"] = sink
    rejoin = lambda x, cut: unshard(x, group, order) if cut else x  # noqa: E731
    return (
        [rejoin(x.detach(), True) for x in image],
        [rejoin(x.detach(), text == "split") for x in texts],
        {name: rejoin(x.grad, name in split) for name, x in leaves.items()},
    )


def prove(world: World, kind: str, where: str, text: str, words: dict[str, Any], T: int = 9, tokens: int = 5) -> None:
    inputs = draw(T, tokens)
    expected = whole(inputs, where, masks(words))
    for found in world.run(on_rank, kind, inputs, where, text, words):
        for mine, theirs in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-9, atol=1e-9)
        for name in NAMES:
            torch.testing.assert_close(found[2][name], expected[2][name], rtol=1e-9, atol=1e-9, msg=name)


HIDDEN: list[dict[str, Any]] = [
    {},
    {"Lengths": ([11, 14],)},
    {"Dense": [[True, False, True, True, False] + [True] * 9, [False, True] * 7]},
]


@pytest.mark.parametrize("words", HIDDEN, ids=["full", "lengths", "dense"])
@pytest.mark.parametrize("text", ["replicated", "split"])
@pytest.mark.parametrize("where", ["front", "back"])
def test_ulysses_equals_one_process(worlds: Worlds, where: str, text: str, words: dict[str, Any]) -> None:
    prove(worlds(3), "ulysses", where, text, words)


@pytest.mark.parametrize(("kind", "size"), [("ring zigzag", 3), ("ring stripe", 2), ("ring plain", 3), ("usp", 4)])
@pytest.mark.parametrize("text", ["replicated", "split"])
@pytest.mark.parametrize("words", HIDDEN, ids=["full", "lengths", "dense"])
def test_rings_equal_one_process(worlds: Worlds, kind: str, size: int, text: str, words: dict[str, Any]) -> None:
    prove(worlds(size), kind, "back" if words else "front", text, words)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("ring zigzag", 8), ("ulysses", 6), ("usp", 6), ("usp", 8)])
@pytest.mark.parametrize("text", ["replicated", "split"])
@pytest.mark.parametrize("words", HIDDEN, ids=["full", "lengths", "dense"])
def test_large_worlds_equal_one_process(worlds: Worlds, kind: str, size: int, text: str, words: dict[str, Any]) -> None:
    for where in ("front", "back"):
        prove(worlds(size), kind, where, text, words)


@pytest.mark.parametrize("tokens", [1, 0])
def test_text_may_be_shorter_than_the_ranks_are_many(worlds: Worlds, tokens: int) -> None:
    for text in ("replicated", "split"):
        prove(worlds(3), "ulysses", "front", text, {}, tokens=tokens)


def test_one_process_needs_no_ranks() -> None:
    inputs = draw(9, 5)
    mask = masks(HIDDEN[2])
    expected = whole(inputs, "back", mask)
    sink = inputs.pop("sink")
    image, text = joint(foci.attention, where="back")(*inputs.values(), mask=mask, sink=sink, scale=0.6)
    torch.testing.assert_close(image, expected[0][0].detach())
    torch.testing.assert_close(text, expected[1][0].detach())


def test_what_does_not_fit_is_named() -> None:
    q, k, v, text_q, text_k, text_v, _ = draw(9, 5).values()
    attend = joint(foci.attention)
    with pytest.raises(ShapeError, match=r"text_k has shape \[2, 5, 1, 4\]; expected k's"):
        attend(q, k, v, text_q, text_k[:, :, :1], text_v)
    with pytest.raises(ValueError, match=r"text_v is torch\.float32"):
        attend(q, k, v, text_q, text_k, text_v.float())
    with pytest.raises(ShapeError, match="text_k has 5 tokens, its values have 4"):
        attend(q, k, v, text_q, text_k, text_v[:, 1:])
    with pytest.raises(ShapeError, match="expected S=14 columns"):
        attend(q, k, v, text_q, text_k, text_v, mask=foci.Dense(torch.ones(9, dtype=torch.bool)))
    with pytest.raises(ValueError, match="expected 0 to 14"):
        attend(q, k, v, text_q, text_k, text_v, mask=foci.Lengths(torch.tensor([3, 15])))
    for mask in (foci.Causal(), foci.Lengths(torch.tensor([3, 4]), torch.tensor([3, 4])), foci.Window(1, 1)):
        with pytest.raises(Unsupported, match="hide a key from one query"):
            attend(q, k, v, text_q, text_k, text_v, mask=mask)


def unlike(kind: str, text: str) -> None:
    """Rank 0 hides one key more, or has one token of text less, than the others."""
    first, x = dist.get_rank() == 0, torch.randn(1, 4, 2, 4)
    words = torch.randn(1, 5 - (kind == "text" and first), 2, 4)
    mask = None if kind == "text" else foci.Lengths(torch.tensor([7 - first]))
    joint(ring(foci.attention, dist.group.WORLD), text=text)(x, x, x, words, words, words, mask=mask)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("text", "replicated", "tokens of text: 4 on rank 0; 5 on ranks 1, 2"),
        ("mask", "replicated", "mask 0, Lengths: "),
        ("mask", "split", "mask 0, Lengths: "),
    ],
)
def test_ranks_must_mean_the_same_text_and_mask(worlds: Worlds, kind: str, text: str, words: str) -> None:
    for outcome in worlds(3).outcomes(unlike, kind, text):
        assert isinstance(outcome.error, Disagreement) and words in str(outcome.error)


def unlike_on_a_mesh() -> None:
    """Rank 0 has one token of text less."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    x, words = torch.randn(1, 4, 4, 4), torch.randn(1, 5 - (dist.get_rank() == 0), 4, 4)
    joint(usp(foci.attention, mesh), text="replicated")(x, x, x, words, words, words)


def test_on_a_mesh_groups_that_hold_one_text_hear_of_those_that_do_not(worlds: Worlds) -> None:
    """The group beside went on to the next agreement, and waited there for the timeout."""
    for outcome in worlds(4).outcomes(unlike_on_a_mesh):
        assert isinstance(outcome.error, RankError | Disagreement), outcome
        assert "tokens of text: 4 on rank 0" in str(outcome.error)


def alone(kind: str, everyone: bool) -> None:
    """Rank 1's values of the text, or everyone's, are of another dtype."""
    world, x = dist.group.WORLD, torch.randn(1, 4, 4, 4)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring")) if kind == "usp" else None
    wraps = {"ring": lambda: ring(foci.attention, world), "ulysses": lambda: ulysses(foci.attention, world)}
    attend = joint(usp(foci.attention, mesh) if mesh else wraps[kind]())
    attend(x, x, x, x, x, x.double() if everyone or dist.get_rank() == 1 else x)


@pytest.mark.parametrize("kind", ["ring", "ulysses", "usp"])
def test_what_does_not_fit_on_one_rank_is_told_to_all(worlds: Worlds, kind: str) -> None:
    """They waited for it until the group's timeout, and heard then that it did not answer."""
    for outcome in worlds(4).outcomes(alone, kind, False):
        assert isinstance(outcome.error, RankError) and outcome.error.rank == 1, outcome
        assert "ValueError: joint: text_v is torch.float64 on cpu" in str(outcome.error)
    for outcome in worlds(4).outcomes(alone, kind, True):
        assert isinstance(outcome.error, ValueError) and str(outcome.error).startswith("joint: text_v is torch.float64")


def test_what_cannot_be_joined_is_refused() -> None:
    with pytest.raises(TypeError, match="op must be attention"):
        joint(foci.linear_attention)
    with pytest.raises(ValueError, match="where must be one of 'front', 'back', got 'rear'"):
        joint(foci.attention, where="rear")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="text must be one of"):
        joint(foci.attention, text="both")  # type: ignore[arg-type]
