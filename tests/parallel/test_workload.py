"""A Shape counts what a mask leaves alive, makes calls of every operator, and names what does not fit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from foci.parallel.workload import NAMES, Rest, Shape


@pytest.mark.parametrize("window", [None, 0, 1, 3, 20])
def test_live_is_the_share_of_the_mask(window: int | None) -> None:
    for T, S in itertools.product(range(1, 9), repeat=2):
        shape = Shape(T, 2, 4, S=S, causal=True, window=window)
        mask = shape.inputs("cpu")[1]["mask"].materialize(T, S)
        assert shape.live == pytest.approx(mask.double().mean().item()), (T, S)
    assert Shape(8, 2, 4).live == 1


@pytest.mark.parametrize("operator", NAMES)
def test_flops_are_the_specs(operator: str) -> None:
    shape = Shape(64, 4, 8, G=2, V=6, B=3, operator=operator)
    spec = NAMES[operator].spec
    assert shape.call()[0].device.type == "meta"
    tensors, keywords = shape.inputs("cpu")
    assert shape.flops == spec.work(spec.bind(*tensors, **keywords)).flops > 0


def test_causal_work_is_what_is_left() -> None:
    full, causal = Shape(64, 4, 8), Shape(64, 4, 8, causal=True)
    assert causal.flops == pytest.approx(full.flops * 65 / 128)


def test_only_keeps_what_was_given_and_lets_defaults_follow() -> None:
    assert Shape(64, 8, 4).only(T=5).keys == 5
    small = Shape(64, 8, 4, G=2, V=3).only(T=5, H=4)
    assert (small.keys, small.heads, small.values) == (5, 2, 3)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"T": 0}, "T"), ({"H": 3, "G": 2}, "H"), ({"operator": "softmax"}, "operator"), ({"window": 3}, "window"),
        ({"T": 8.5}, "T must be a whole number, at least 1, got 8.5"), ({"B": True}, "B must be a whole number"),
        ({"dtype": "x"}, "dtype is 'x'; expected float64"), ({"window": 1.5, "causal": True}, "window must be a whole"),
        ({"operator": "scan", "causal": True}, "scan"), ({"operator": "delta_rule", "S": 5}, "delta_rule"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(wrong: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Shape(**({"T": 8, "H": 2, "K": 4} | wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0}, {"steps": 0}, {"weights": -1}, {"seconds": -1.0}, {"layers": 1.5}, {"flops": math.nan},
        {"flops": math.inf},
    ],
)  # fmt: skip
def test_the_rest_is_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Rest(**wrong)


def test_it_reads_well() -> None:
    shape = Shape(64, 8, 4, G=2, causal=True, backward=True, rest=Rest(layers=3, guidance=True), dtype=torch.float32)
    assert str(shape) == "attention B1 T64 H8 G2 K4 float32, causal, forward and backward, 3 layers, two branches"
    assert str(Shape(64, 8, 4, operator="scan")) == "scan B1 T64 D8 bfloat16, forward"
