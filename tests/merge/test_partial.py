"""Partial: attention cut along the keys and merged is attention, with its gradients, whatever is empty."""

from __future__ import annotations

import re
from itertools import pairwise, permutations

import pytest
import torch
from torch import Tensor

import foci
from foci import Dense, Partial, fold
from foci.merge.algebra import scan


def draw(S: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, 5, 3, 4, dtype=torch.float64).to(dtype),
        *(torch.randn(2, S, 3, 4, dtype=torch.float64).to(dtype) for _ in range(2)),
    )


def parts(q: Tensor, k: Tensor, v: Tensor, cuts: list[int], allowed: Tensor | None = None) -> list[Partial]:
    bounds = list(pairwise([0, *cuts, k.shape[1]]))
    return [
        Partial(
            *foci.attention_with_lse(
                q, k[:, a:b], v[:, a:b], mask=None if allowed is None else Dense(allowed[..., a:b]), backend="chunked"
            )
        )
        for a, b in bounds
    ]


@pytest.mark.parametrize("cuts", [[], [5], [0], [12], [3, 3, 9], [1, 2, 11]])
def test_cut_anywhere_and_merged_is_the_whole(cuts: list[int]) -> None:
    q, k, v = draw()
    out, lse = foci.attention_with_lse(q, k, v)
    merged = fold(parts(q, k, v, cuts))
    torch.testing.assert_close(merged.out, out, rtol=0, atol=1e-14)
    torch.testing.assert_close(merged.lse, lse, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_working_dtype_is_kept_and_the_log_in_float32(dtype: torch.dtype) -> None:
    q, k, v = draw(dtype=dtype)
    out, lse = foci.attention_with_lse(q.double(), k.double(), v.double(), backend="reference")
    merged = fold(parts(q, k, v, [3, 9]))
    assert (merged.out.dtype, merged.lse.dtype) == (dtype, torch.float32)
    assert float((merged.lse - lse).abs().max()) <= 2e-4
    # Every part's out has been rounded once, and each of the two sums once more.
    assert float((merged.out - out).abs().max()) <= 4 * torch.finfo(dtype).eps * float(v.double().abs().max())


def test_order_does_not_matter() -> None:
    pieces = parts(*draw(), [3, 9])
    whole = fold(pieces)
    for order in permutations(pieces):
        torch.testing.assert_close(fold(order).out, whole.out, rtol=0, atol=1e-14)
        torch.testing.assert_close(fold(order).lse, whole.lse, rtol=0, atol=1e-14)


def test_the_neutral_part_changes_no_bit() -> None:
    (part,) = parts(*draw(), [])
    for merged in (part.combine(part.neutral()), part.neutral().combine(part)):
        assert torch.equal(merged.out, part.out)
        assert torch.equal(merged.lse, part.lse)
    both = part.neutral().combine(part.neutral())
    assert (both.out == 0).all() and (both.lse == -torch.inf).all()


def test_gradients_flow_through_a_merge_with_empty_rows_and_parts() -> None:
    """A row with no key in one part, one with none in either; both have finite gradients, equal to the whole's."""
    q, k, v = draw()
    allowed = torch.ones(5, 12, dtype=torch.bool)
    allowed[1, :6] = False
    allowed[2, 6:] = False
    allowed[3] = False
    dout, dlse = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    found = []
    for cuts in ([], [6], [6, 6, 12]):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        merged = fold(parts(*leaves, cuts, allowed))
        found.append([merged.out, merged.lse, *torch.autograd.grad(list(merged), leaves, [dout, dlse])])
    assert (found[0][1][:, 3] == -torch.inf).all()
    for other in found[1:]:
        for ours, whole in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-13)
    assert all(torch.isfinite(gradient).all() for gradient in found[1][2:])


def test_what_stands_in_a_row_that_saw_nothing_adds_nothing() -> None:
    seen, empty = Partial(torch.ones(2, 3), torch.zeros(2)), Partial(torch.full((2, 3), torch.nan), torch.zeros(2))
    empty.lse[0] = -torch.inf
    for found in (seen.combine(empty), empty.combine(seen)):
        assert torch.equal(found.out[0], seen.out[0]) and found.lse[0] == 0
        assert found.out[1].isnan().all()  # what was seen is told


def test_gradcheck_of_a_merge() -> None:
    def merge(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(fold([Partial(*tensors[:2]), Partial(*tensors[2:])]))  # type: ignore[return-value]

    tensors = [torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in ((3,), (), (3,), ())]
    assert torch.autograd.gradcheck(merge, tensors)
    assert torch.autograd.gradgradcheck(merge, tensors)


def test_logs_far_apart_and_large_neither_overflow_nor_vanish() -> None:
    out = torch.tensor([[1.0], [2.0]])
    far = Partial(out, torch.tensor([800.0, -800.0])).combine(Partial(3 * out, torch.tensor([-800.0, -800.0])))
    torch.testing.assert_close(far.out, torch.tensor([[1.0], [4.0]]), rtol=0, atol=0)
    torch.testing.assert_close(far.lse, torch.tensor([800.0, -800.0 + 0.6931472]))


def test_scan_gives_the_attention_of_every_prefix_of_the_keys() -> None:
    q, k, v = draw()
    for part, end in zip(scan(parts(q, k, v, [3, 9])), (3, 9, 12), strict=True):
        out, lse = foci.attention_with_lse(q, k[:, :end], v[:, :end])
        torch.testing.assert_close(part.out, out, rtol=0, atol=1e-14)
        torch.testing.assert_close(part.lse, lse, rtol=0, atol=1e-14)
    first = scan(parts(q, k, v, [3, 9]), inclusive=False)[0]
    assert (first.lse == -torch.inf).all()


@pytest.mark.parametrize("shapes", [((1, 5, 3, 4), (1, 5, 3)), ((2, 5, 3, 4), (2, 1, 3)), ((2, 5, 3, 1), (2, 5, 3))])
def test_parts_of_other_shapes_are_refused_not_broadcast(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    part = Partial(torch.zeros(2, 5, 3, 4), torch.zeros(2, 5, 3))
    other = Partial(*(torch.zeros(shape) for shape in shapes))
    told = f"Partial: a part has out {[*shapes[0]]} and lse {[*shapes[1]]}; expected [2, 5, 3, 4] and [2, 5, 3]"
    with pytest.raises(ValueError, match=re.escape(told)):
        fold([part, other])
    with pytest.raises(ValueError, match="Partial: a part has out"):
        scan([part, part, other])


@pytest.mark.parametrize("shape", [(3,), (5, 1), (1, 3), (2, 5, 3), (5, 3, 4)])
def test_an_lse_that_is_not_of_the_rows_of_out_is_refused(shape: tuple[int, ...]) -> None:
    part = Partial(torch.randn(5, 3, 4), torch.zeros(shape))
    with pytest.raises(ValueError, match=r"Partial: lse has shape .* with out \[5, 3, 4\]; expected \[5, 3\]"):
        fold([part, part])


def test_parts_of_another_kind_are_named() -> None:
    part = Partial(torch.randn(5, 4), torch.zeros(5))
    with pytest.raises(TypeError, match=r"Partial: a part is of type Affine; expected a foci\.Partial"):
        fold([part, foci.Affine(torch.zeros(5), torch.zeros(5, 4))])
    with pytest.raises(TypeError, match="fold: parts is of type Partial; expected several parts"):
        fold(part)
