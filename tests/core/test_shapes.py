"""Binding letters to sizes: what agrees, and the sentence for what does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from foci.core.errors import ShapeError
from foci.core.shapes import Signature, dense

Weight = Float[Tensor, "K"]  # one letter in place would be taken for a quoted annotation


class Call(NamedTuple):
    x: Float[Tensor, "B T K"]
    y: Float[Tensor, "B S K"]
    weight: Weight | None
    bias: Float[Tensor, "#B #T #S"] | None
    allowed: Bool[Tensor, "#T #S"] | None
    offsets: Tensor | None
    factor: float


SIGNATURE = Signature(Call, "toy")


def tensors(**changes: object) -> dict:
    given = {"x": torch.zeros(2, 3, 5), "y": torch.zeros(2, 4, 5), "weight": None, "bias": None, "allowed": None}
    return given | changes


def test_letters_are_read_from_annotations() -> None:
    assert SIGNATURE.exact == [("x", ("B", "T", "K")), ("y", ("B", "S", "K")), ("weight", ("K",))]
    assert SIGNATURE.broadcast == [("bias", ("B", "T", "S")), ("allowed", ("T", "S"))]


def test_functions_are_read_too_and_their_return_is_not() -> None:
    def call(x: Float[Tensor, "A B"], *, n: int = 0) -> Float[Tensor, "B A"]:
        return x

    assert Signature(call, "f").bind({"x": torch.zeros(2, 3)}) == {"A": 2, "B": 3}


@pytest.mark.parametrize("bias", [(), (1,), (4,), (3, 4), (3, 1), (1, 1, 4), (2, 3, 4), (2, 1, 1)])
def test_sizes_that_agree(bias: tuple[int, ...]) -> None:
    sizes = SIGNATURE.bind(tensors(bias=torch.zeros(bias), weight=torch.zeros(5)))
    assert sizes == {"B": 2, "T": 3, "S": 4, "K": 5}


def test_nothing_is_a_size_too() -> None:
    assert SIGNATURE.bind(tensors(x=torch.zeros(2, 0, 5)))["T"] == 0


DISAGREE = {
    "toy: x has 2 dimensions, shape [3, 5]; expected 3: [B, T, K]": {"x": torch.zeros(3, 5)},
    "toy: x has 0 dimensions, shape []; expected 3: [B, T, K]": {"x": torch.zeros(())},
    "toy: y has shape [2, 4, 6] for [B, S, K], so K would be 6; x says K=5": {"y": torch.zeros(2, 4, 6)},
    "toy: y has shape [1, 4, 5] for [B, S, K], so B would be 1; x says B=2": {"y": torch.zeros(1, 4, 5)},
    "toy: weight has shape [4] for [K], so K would be 4; x says K=5": {"weight": torch.zeros(4)},
    "toy: bias has 4 dimensions, shape [1, 2, 3, 4]; expected at most 3, broadcastable to [B, T, S]": {
        "bias": torch.zeros(1, 2, 3, 4)
    },
    "toy: bias has shape [3, 3], so S would be 3; expected 1 or S=4 (broadcastable to [B, T, S])": {
        "bias": torch.zeros(3, 3)
    },
    "toy: bias has shape [0], so S would be 0; expected 1 or S=4": {"bias": torch.zeros(0)},
    "toy: allowed has shape [2, 4], so T would be 2; expected 1 or T=3": {"allowed": torch.zeros(2, 4).bool()},
}


@pytest.mark.parametrize("message", DISAGREE)
def test_a_disagreement_names_tensor_letter_and_both_sizes(message: str) -> None:
    with pytest.raises(ShapeError, match=re.escape(message)):
        SIGNATURE.bind(tensors(**DISAGREE[message]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [1.0]}, "toy: x must be a tensor, got [1.0]"),
        ({"y": None}, "toy: y must be a tensor, got None"),
        ({"weight": 2.0}, "toy: weight must be a tensor, got 2.0"),
        ({"bias": 0}, "toy: bias must be a tensor, got 0"),
    ],
)
def test_what_is_no_tensor_is_named(change: dict, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        SIGNATURE.bind(tensors(**change))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_a_place_for_every_number_is_named() -> None:
    x = torch.zeros(2, 3, 5)
    nested = [torch.nested.nested_tensor([x[0], x[1, :2]], layout=layout) for layout in (torch.strided, torch.jagged)]
    for odd, said in ((x.to_sparse(), "one of layout torch.sparse_coo"), *((each, "a nested one") for each in nested)):
        with pytest.raises(ValueError, match=f"^toy: x must be a dense tensor, got {said}"):
            SIGNATURE.bind(tensors(x=odd))
    with pytest.raises(ValueError, match=r"^toy: bias must be a dense tensor, got one of layout torch.sparse_coo"):
        SIGNATURE.bind(tensors(bias=torch.zeros(2, 3, 4).to_sparse()))


@pytest.mark.parametrize("argument", ["x", "weight", "bias", "allowed"])
def test_a_tensor_of_several_ranks_is_named(argument: str, of_ranks: Callable[[Tensor], Tensor]) -> None:
    """In torch's words it was an op without a sharding strategy, or one that got plain tensors too."""
    sizes = {"x": (2, 3, 5), "weight": (5,), "bias": (3, 4), "allowed": (3, 4)}
    shared = of_ranks(torch.ones(sizes[argument]))
    said = f"toy: {argument} is a DTensor of (Replicate(),); expected this rank's own tensor: {argument}.to_local()"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        SIGNATURE.bind(tensors(**{argument: shared}))
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        dense("toy", argument, shared)
    assert SIGNATURE.bind(tensors(**{argument: shared.to_local()}))["K"] == 5


class Marked(Tensor):
    """A subclass."""


def test_other_subclasses_are_tensors(of_ranks: Callable[[Tensor], Tensor]) -> None:
    marked = torch.zeros(5).as_subclass(Marked)
    assert SIGNATURE.bind(tensors(weight=marked))["K"] == 5 and dense("toy", "weight", marked) is marked


def test_what_is_no_tensor_is_told_in_short() -> None:
    with pytest.raises(TypeError, match=r"^toy: x must be a tensor, got \[0, 1, 2") as refused:
        SIGNATURE.bind(tensors(x=list(range(10**5))))
    assert len(str(refused.value)) < 300
