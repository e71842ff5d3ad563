"""The forward kernels of softmax against the equation in float64: by the interpreter, or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import foci
from foci.check.compare import compare, difference
from foci.check.memory import poisoned, strided
from foci.core import tune
from foci.core.spec import Case
from foci.ops.masks import Band, lower
from foci.ops.softmax import gpu, kernels_triton_forward, reference
from foci.ops.softmax.call import Call
from foci.ops.softmax.dropout import placed
from foci.ops.softmax.spec import SPEC
from tests.ops.in_triton import DTYPES, there
from tests.ops.oracle import joined, mask_parts
from tests.ops.softmax.problems import inputs_of


def drawn(
    *, B: int = 1, T: int = 5, S: int = 40, H: int = 2, G: int | None = None, K: int = 16, V: int | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0, **extra: Any,
) -> Call:  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    shapes = ((B, T, H, K), (B, S, G or H, K), (B, S, G or H, V or K))
    q, k, v = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    assert SPEC.bind is not None
    call: Call = SPEC.bind(q, k, v, **extra)
    return call


def on_device(call: Call) -> Call:
    return Call(*there(call._asdict()).values())


def exact(call: Call) -> Call:
    return Call(*(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in call))


def assert_right(call: Call, truth: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    assert gpu.reasons(on_device(call)) == []
    found = gpu.forward(on_device(call))
    truth = reference.forward(exact(call)) if truth is None else truth
    plain = reference.equation(call, call.q.dtype)
    for name, got, true, simple in zip(("out", "lse"), found, truth, plain, strict=True):
        assert got.shape == true.shape and got.is_contiguous()
        error = compare(got.cpu(), true, difference(simple, true), call.q.dtype, log=name == "lse")
        assert error.ok, f"{name}: {error.size:.2e}, {error.share:.2f} of its budget"
    assert found[0].dtype == call.v.dtype and found[1].dtype == torch.float32
    return found


def launched(call: Call, target: str = "sm_90") -> list[tune.Launch]:
    meta = Call(*(torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in call))
    with tune.record_launches(tune.TARGETS[target]) as launches:
        gpu.forward(meta)
    return launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", SPEC.cases, ids=lambda problem: problem.name)
def test_every_case_equals_the_equation(problem: Case, dtype: torch.dtype) -> None:
    assert SPEC.bind is not None
    call = SPEC.bind(**inputs_of(problem.name, dtype))
    assert_right(call)
    assert len(launched(call)) == 1


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_masks(data: st.DataObject) -> None:
    B, T, S = (data.draw(st.integers(1, n)) for n in (2, 70, 150))
    H, G = data.draw(st.sampled_from([(1, 1), (2, 1)]))
    mask = joined(data.draw(mask_parts(B, H, T, S)))
    if lower(mask).q_offsets is not None and lower(mask).q_offsets.shape[0] == 1:  # type: ignore[union-attr]
        return
    assert_right(drawn(B=B, T=T, S=S, H=H, G=G, mask=mask))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_heads(dtype: torch.dtype) -> None:
    """Rows of q that do not fit stay in memory, columns of v go to programs of their own."""
    assert_right(drawn(H=1, K=300, V=5, dtype=dtype, mask=foci.Causal()))
    assert_right(drawn(H=1, K=7, V=290, dtype=dtype, sink=torch.ones(1)))
    assert_right(drawn(H=1, K=512, V=512, T=3, S=9, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [1, 2])
def test_few_rows_split_their_keys_over_programs_and_merge(B: int, dtype: torch.dtype) -> None:
    lengths = torch.tensor([1100, 0][:B])
    bias = torch.randn(1100, generator=torch.Generator().manual_seed(1))
    for extra in (
        {"mask": foci.Lengths(lengths) & foci.Causal(), "sink": torch.tensor([0.5, -torch.inf])},
        {"mask": foci.Lengths(lengths.flip(0)) & foci.Causal() & foci.Window(700, None), "bias": bias},
        {"dropout": 0.4, "softcap": 3.0},
    ):
        call = drawn(B=B, T=1, S=1100, H=2, G=1, dtype=dtype, **extra)
        kernels = [launch.kernel.fn.__name__ for launch in launched(call)]
        assert kernels == ["_attend_kernel", "_merge_kernel"]
        first, live = launched(call)[0], 701 if "bias" in extra else 1100
        splits, blocks = first.grid[2], -(-live // first.meta["BLOCK_S"])
        assert 1 < splits <= live // 256
        assert (splits - 1) * -(-blocks // splits) < blocks, "the last program has nothing to do"
        assert_right(call)


def test_a_part_that_sees_nothing_and_a_large_logit() -> None:
    """Parts are merged by their largest logits, not by logarithms that were rounded."""
    call = drawn(T=1, S=1024, H=1, K=16)
    call = call._replace(q=call.q * 400, scale=1.0)
    call.k[:, 300:] *= 0.01
    assert_right(call)


@pytest.mark.parametrize("scale", [1e-300, 1e-46, 1e-39])
def test_a_scale_that_is_nothing_in_float32(scale: float) -> None:
    assert_right(drawn(T=5, S=70, H=2)._replace(scale=scale))


def test_heads_of_one_key_head_are_rows_of_one_tile() -> None:
    call = drawn(B=2, T=3, S=70, H=6, G=2, mask=foci.Causal(), bias=torch.randn(6, 3, 1), dropout=0.3)
    assert launched(call)[0].grid[0] == 2 * 2
    assert_right(call)
    assert launched(drawn(T=64, H=6, G=2, S=64))[0].grid[0] == 6


def test_launches_fill_the_chip_only_where_it_is_empty() -> None:
    small = drawn(T=1, H=8)
    few = small._replace(k=small.k[:, :1].expand(1, 65536, 8, 16), v=small.v[:, :1].expand(1, 65536, 8, 16))
    many = Call(*(x.expand(64, *x.shape[1:]) if isinstance(x, Tensor) else x for x in few))
    assert launched(few)[0].grid == (8, 1, 32), "two programs a processor"
    assert launched(many)[0].grid == (512, 1, 1) and len(launched(many)) == 1


def test_blocks_that_nobody_sees_are_not_read() -> None:
    call = drawn(T=70, S=900, H=1, mask=foci.Causal() & foci.Window(10, None))
    unseen = 900 - 70 - 10
    truth = reference.forward(exact(call))
    call.k[:, : unseen - 128], call.v[:, : unseen - 128] = torch.nan, torch.nan
    for got, true in zip(gpu.forward(on_device(call)), truth, strict=True):
        torch.testing.assert_close(got.cpu().double(), true, rtol=1e-5, atol=1e-5)


def test_memory_that_is_excluded_or_unwritten_does_not_matter() -> None:
    offsets, lengths = torch.tensor([0, 6, 6, 19, 30]), torch.tensor([4, 0, 13, 5])
    for mask, hidden in (
        (foci.Lengths(torch.tensor([17])) & foci.Causal(), slice(17, 40)),
        (foci.Packed(offsets) & foci.Lengths(lengths, lengths), (4, 5, *range(24, 40))),
        (foci.Packed(offsets, torch.tensor([0, 9, 12, 30, 36])), (9, 10, 11, *range(36, 40))),
    ):
        call = drawn(T=40, S=40, mask=mask)
        truth = reference.forward(exact(call))
        call.k[:, hidden], call.v[:, hidden] = torch.nan, torch.nan
        with poisoned():
            assert_right(Call(*strided(call._asdict()).values()), truth)
    with poisoned():
        assert_right(drawn(T=2, S=600, H=1, V=9))


def test_dropout_of_a_part_of_a_problem() -> None:
    call = drawn(T=9, S=30, H=2, dropout=0.5)
    assert call.seed is not None
    assert_right(call._replace(seed=placed(call.seed, b=(1, 1), h=(3, 2), t=(5, 3), s=(10, 2))))


def test_bounds_may_stand_anywhere_and_be_of_any_size() -> None:
    for call in (
        drawn(T=33, S=70, mask=foci.Window(2**62, 3)),
        drawn(T=33, S=70, mask=foci.ops.masks.Band(torch.tensor([-(2**40)]), 5)),
        drawn(T=1, S=1, H=1),
        drawn(T=1, S=1, H=1, mask=foci.Causal() & foci.Window(0, 0)),
    ):
        assert_right(call)


def test_offsets_that_lead_elsewhere_are_moved_inside() -> None:
    """Nothing is asked of the GPU before a launch, so what is wrong there must at least read nothing of others."""
    call = drawn(T=20, S=20, mask=foci.Packed(torch.tensor([0, 5, 500])) & foci.Lengths(torch.tensor([-3, 9999])))
    out, lse = kernels_triton_forward.forward(on_device(call))  # as of tensors on a GPU, which are not looked at
    assert bool(out.isfinite().all()) and bool((lse[:, :5] == -torch.inf).all())


def test_what_is_small_may_lie_anywhere_in_memory() -> None:
    """Offsets, lengths, bands and sinks that are columns of a table, or one number seen many times."""

    def column(x: Tensor) -> Tensor:
        return torch.stack([x, torch.full_like(x, 3)], 1)[:, 0]

    q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
    two = tuple(x.reshape(2, 10, 2, 8) for x in (q, k, v))
    offsets, lengths = torch.tensor([0, 3, 11, 20]), torch.tensor([4, 9])
    low, high = torch.tensor([-3, -1]), torch.tensor([0, 2])
    sink = torch.randn(2)
    for tensors, plain, apart in (
        ((q, k, v), {"mask": foci.Packed(offsets)}, {"mask": foci.Packed(column(offsets))}),
        (two, {"mask": foci.Lengths(lengths)}, {"mask": foci.Lengths(column(lengths))}),
        (two, {"mask": Band(low, high)}, {"mask": Band(column(low), column(high))}),
        (two, {"sink": sink}, {"sink": column(sink)}),
        (two, {"sink": sink[:1].repeat(2)}, {"sink": sink[:1].expand(2)}),
    ):
        given = dict(zip("qkv", tensors, strict=True))
        found = [gpu.forward(SPEC.bind(**there(given | options)))[0] for options in (plain, apart)]
        assert torch.equal(*found), list(apart)
