"""One sentence for every kind of failure."""

from __future__ import annotations

import torch

from foci.check import diagnose

X = torch.tensor([1.0, 2.0, 3.0])


def never(other: torch.Tensor) -> bool:
    return False


def test_exceptions_of_a_backward() -> None:
    attribute = AttributeError("'FBackward' object has no attribute 'softcap'")
    assert "reads `softcap`, which its forward never saved" in diagnose.exception(attribute, "backward")
    assert diagnose.exception(attribute, "forward").startswith("forward raised AttributeError")
    count = RuntimeError("function F returned an incorrect number of gradients (expected 4, got 3)")
    assert "returns 3 gradients where forward takes 4" in diagnose.exception(count, "backward")
    unpack = ValueError("not enough values to unpack (expected 4, got 3)")
    assert "unpacks 4 saved values, its forward saved 3" in diagnose.exception(unpack, "backward")


def test_shapes() -> None:
    turned = diagnose.shape("out", torch.empty(2, 4, 3, 5), torch.empty(2, 3, 4, 5))
    assert "tokens and heads are swapped" in turned
    assert "same numbers in another shape" in diagnose.shape("out", torch.empty(2, 3, 20), torch.empty(2, 3, 4, 5))
    assert diagnose.shape("out", torch.empty(7), X) == "out has shape [7] where [3] is expected"


def test_outputs() -> None:
    assert "NaN" in diagnose.output("out", X * torch.nan, X, never)
    assert "all zeros" in diagnose.output("out", X * 0, X, never)
    times = diagnose.output("out", 2 * X, X, lambda other: torch.allclose(other, 2 * X))
    assert "2 times the right one (+100.00%)" in times
    assert "out is wrong, worst by 9" in diagnose.output("out", X + torch.tensor([9.0, 0, 0]), X, never)


def test_gradients() -> None:
    truths = {"q": X, "k": 5 - X}
    assert "dq is None when q.requires_grad" in diagnose.gradient("q", None, truths, never)
    assert "dq has shape [2], q has [3]" in diagnose.gradient("q", X[:2], truths, never)
    assert "NaN" in diagnose.gradient("q", X / 0 * 0, truths, never)
    assert "all zeros" in diagnose.gradient("q", X * 0, truths, never)
    slot = diagnose.gradient("q", 5 - X, truths, lambda other: torch.equal(other, 5 - X))
    assert "holds the gradient of k, in the wrong slot" in slot
    half = diagnose.gradient("q", X / 2, truths, lambda other: torch.allclose(other, X / 2))
    assert "0.5 times" in half
    assert "dq is wrong" in diagnose.gradient("q", X + torch.tensor([1.0, 0, 0]), truths, never)


def test_an_error_that_only_announces_another_is_told_with_it() -> None:
    error = RuntimeError("backend='aot_eager' raised:\nValueError: no such op\n\nSet TORCHDYNAMO_VERBOSE=1")
    assert diagnose.first_line(error) == "backend='aot_eager' raised: ValueError: no such op"
    assert diagnose.first_line(RuntimeError("sizes differ\nmore")) == "sizes differ"


def test_sizes_are_no_part_of_what_is_wrong() -> None:
    far, farther = (diagnose.output("out", X + torch.tensor([size, 0, 0]), X, never) for size in (9.0, 12.5))
    assert far != farther and diagnose.without_size(far) == diagnose.without_size(farther)
    assert diagnose.without_size(far) != diagnose.without_size(far.replace("out", "lse"))
    assert diagnose.without_size("out is all zeros") == "out is all zeros"
