"""Triton's interpreter as the tests of kernels have it gives its own answers, and a GPU's in bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from foci.core.tune import interpreting
from tests import front_end
from tests.interpreter import DTYPE, NUMBER_BY_NUMBER, Dtypes, Patched
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture

if not interpreting():
    pytest.skip("a GPU has no interpreter", allow_module_level=True)


@triton.jit
def _composed(a, b, c, d):  # type: ignore[no-untyped-def]
    """a x + b, then c x + d: which of two comes first matters."""
    return a * c, b * c + d


@triton.jit
def _along_kernel(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, ends_ptr, all_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr
):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    a, b = tl.reduce((x, y), AXIS, _composed, keep_dims=KEEP)
    if KEEP:
        tl.static_assert(len(a.shape) == 2)
        tl.static_assert(a.shape[AXIS] == 1)
    size: tl.constexpr = M * N // (M if AXIS == 0 else N)
    to = ends_ptr + 2 * tl.arange(0, size)
    tl.store(to, tl.reshape(a, [size]))
    tl.store(to + 1, tl.reshape(b, [size]))
    a, b = tl.associative_scan((x, y), AXIS, _composed, reverse=KEEP)
    tl.store(all_ptr + at, a)
    tl.store(all_ptr + M * N + at, b)


@triton.jit
def _halved(a, b):  # type: ignore[no-untyped-def]
    return a // 2 + b if a.dtype == tl.int32 else a * 0.5 + b


@triton.jit
def _of_all_kernel(x_ptr, ends_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(x_ptr + tl.reshape(tl.arange(0, N), [4, N // 4]))
    tl.store(ends_ptr, tl.reduce(x, None, _halved))  # of all axes: by Triton's interpreter only of one tensor


def found(kernel: Any, *sizes: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    x, y = (3 * torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))).to(dtype)
    ends, each = (torch.full((n,), 77, dtype=dtype) for n in (32, 256))
    kernel[(1,)](*((x, y, ends, each) if kernel is _along_kernel else (x, ends)), *sizes)
    return [ends, each]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [(_along_kernel, (8, 16, axis, keep)) for axis in (0, 1) for keep in (False, True)] + [(_of_all_kernel, (128,))],
)
def test_reductions_and_scans_have_the_bits_they_had(
    kernel: Any, sizes: tuple[Any, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sooner = found(kernel, *sizes, dtype=dtype)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", NUMBER_BY_NUMBER[0])
    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", NUMBER_BY_NUMBER[1])
    for now, before in zip(sooner, found(kernel, *sizes, dtype=dtype), strict=True):
        torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)
    assert (sooner[0][:1] != 77).all(), "something was written"


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    if a > b:
        return a
    return b


@triton.jit
def _two(a, b):  # type: ignore[no-untyped-def]
    return tl.join(a, b)


@triton.jit
def _by_kernel(x_ptr, ends_ptr, N: tl.constexpr, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(x_ptr + tl.reshape(tl.arange(0, N), [4, N // 4]))
    tl.store(ends_ptr + tl.arange(0, N // 4), tl.reduce(x, 0, BY))


@pytest.mark.parametrize("by", [_larger, _two])
def test_what_does_not_take_each_number_by_itself_fails(by: Any) -> None:
    with pytest.raises(Exception, match="AssertionError"):
        _by_kernel[(1,)](torch.randn(16), torch.empty(4), 16, by)


def test_dtypes_are_those_of_the_interpreter() -> None:
    dtypes = Dtypes()
    for scalar in (tl.int1, tl.int32, tl.uint16, tl.float16, tl.bfloat16, tl.float32, tl.int64):
        for dtype in (scalar, tl.pointer_type(scalar), tl.block_type(scalar, [4, 8])):
            assert dtypes(dtype) == dtypes(dtype) == DTYPE(dtype)
    assert dtypes(tl.block_type(tl.pointer_type(tl.int1), [4])) == DTYPE(tl.pointer_type(tl.int1))


def test_numbers_wider_than_their_type_are_refused() -> None:
    for data, dtype in ((np.float64, tl.float32), (np.int32, tl.int16), (np.uint16, tl.int1)):
        with pytest.raises(ValueError, match="exceeds"):
            interpreter.TensorHandle(np.zeros(4, data), dtype)
    for data, dtype in ((np.float16, tl.float32), (np.uint8, tl.int1), (np.uint64, tl.pointer_type(tl.int8))):
        assert interpreter.TensorHandle(np.zeros(4, data), dtype).attr == {}


def language() -> dict[tuple[str, str], Any]:
    """What a launch replaces, some of it, where it is."""
    names = ("load", "reduce", "associative_scan", "arange", "static_range", "where")
    own = {(lang.__name__, name): getattr(lang, name) for lang in (tl, tl.core) for name in names}
    return own | {("tensor", name): getattr(tl.tensor, name, None) for name in ("__bool__", "__index__", "T", "to")}


def test_a_launch_leaves_the_language_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = language()
    found(_along_kernel, 8, 16, 0, False)
    assert language() == before
    assert isinstance(interpreter._patch_lang, Patched) and not interpreter._patch_lang.scopes

    def fails(*_: Any) -> None:
        assert language() != before
        raise ValueError("in the middle of a launch")

    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", fails)
    with pytest.raises(Exception, match="in the middle of a launch"):
        found(_along_kernel, 8, 16, 0, False)
    assert language() == before and not interpreter._patch_lang.scopes


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, made_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(made_ptr + at, a * b)
    tl.store(made_ptr + N + at, a + b)
    tl.store(made_ptr + 2 * N + at, tl.where(a < b, a, 1.5))
    tl.store(made_ptr + 3 * N + at, (a.to(tl.float32) * b.to(tl.float32) + 1).to(tl.bfloat16))


@triton.jit
def _fused_kernel(a_ptr, made_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    a = tl.load(a_ptr + tl.arange(0, N))
    tl.store(made_ptr + tl.arange(0, N), tl.fma(a, a, a))


@triton.jit
def _sum_kernel(a_ptr, made_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(made_ptr, tl.reduce(tl.load(a_ptr + tl.arange(0, N)), 0, tl.standard._sum_combine))


@pytest.mark.usefixtures("halves")
def test_bfloat16_is_what_torch_computes_and_what_is_not_mended_fails() -> None:
    a, b = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    a[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    made = torch.empty(4, 64, dtype=torch.bfloat16)
    _arithmetic_kernel[(1,)](a, b, made, 64)
    wanted = [a * b, a + b, torch.where(a < b, a, 1.5), (a.float() * b.float() + 1).bfloat16()]
    torch.testing.assert_close(made, torch.stack(wanted), rtol=0, atol=0, equal_nan=True)
    for kernel in (_sum_kernel, _fused_kernel):
        with pytest.raises(Exception, match="AssertionError"):
            kernel[(1,)](a, made, 64)


@triton.jit
def _mixed_kernel(x_ptr, ints_ptr, bools_ptr, made_ptr, found_ptr, first, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Operands of all kinds, of which front_end.py knows some and asks Triton's front end for the others.

    A second program does it by what is remembered of the first.
    """
    made_ptr += tl.program_id(0) * 2 * M * N
    found_ptr += tl.program_id(0) * (2 * M + 1)
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    at = rows[:, None].to(tl.int64) * N + columns[None, :]
    x, ints = tl.load(x_ptr + at), tl.load(ints_ptr + rows)
    one, bools = tl.load(x_ptr + first), tl.load(bools_ptr + columns)
    wide = x.to(tl.float32)
    a = tl.where(bools[None, :] & (ints[:, None] > -2), wide * 2 - 1, 0.5 / (wide * wide + 1.5))
    a += tl.dot(wide, wide.T) if M == N else wide * tl.sum(wide, 1)[:, None]
    a -= 3 - one.to(tl.float32) * a + (2.5 - a) * ints[:, None]
    tl.store(made_ptr + at, a)
    tl.store(
        made_ptr + M * N + at, (a.to(x.dtype) + 0.1 * x - (1 - x) + one * x).to(tl.float32), mask=ints[:, None] < 9
    )
    n = (
        (ints * 3 + 1) // 2
        - 7 % (ints * ints + 2)
        + (5 - ints)
        + (rows < 3) * 2
        + ((rows < 5) & True)
        + (((rows < 5) & 1) + ((rows < 5) & 1))
    )
    unsigned = ints.to(tl.uint32) >> 3
    n64 = n.to(tl.int64) * 3000000000 + unsigned + (ints >> 1) - (first + rows) * ints
    tl.store(found_ptr + rows, n64)
    tl.store(found_ptr + M + rows, (n64 // 7).to(tl.int32) + (-unsigned.to(tl.int64)))
    tl.store(found_ptr + 2 * M, tl.sum(n, 0) + tl.max(tl.abs(a)).to(tl.int32))


def mixed(dtype: torch.dtype, columns: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = (2 * torch.randn(16, columns, generator=draw)).to(dtype)
    ints = torch.randint(-9, 20, (16,), generator=draw, dtype=torch.int32)
    bools = torch.arange(columns) % 3 != 0
    made = [torch.full((2, 2 * x.numel()), 77.0), torch.full((2, 33), 77)]
    _mixed_kernel[(2,)](x, ints, bools, *made, 5, 16, columns)
    return made


def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    front_end.forget()
    for owner, name, before, now in front_end.changes():
        assert getattr(owner, name) is now
        monkeypatch.setattr(owner, name, before)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("columns", [16, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_front_end_computes_the_bits_it_did(
    dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = mixed(dtype, columns)
    slowly(monkeypatch)
    for x, before in zip(now, mixed(dtype, columns), strict=True):
        assert x.equal(before) and x[0].equal(x[1]) and x.isfinite().all() and (x != 77).sum() > x.numel() // 2


@triton.jit
def _sum_of_two_kernel(x_ptr, y_ptr, by: tl.constexpr):  # type: ignore[no-untyped-def]
    x, at = tl.load(x_ptr + tl.arange(0, 4)), tl.arange(0, 8)
    if by == "shapes":
        tl.store(x_ptr + tl.arange(0, 4), x + at)
    elif by == "pointers":
        tl.store(x_ptr + y_ptr, x)
    elif by == "signs":
        tl.store(x_ptr + tl.arange(0, 4), x.to(tl.uint32) + (-1))
    else:
        tl.store(x_ptr + tl.arange(0, 4), x.to(tl.int32) + 2147483647)


@pytest.mark.parametrize(
    ("by", "what"),
    [
        ("shapes", "incompatible dim"),
        ("pointers", "pointers together"),
        ("signs", "negative"),
        ("overflow", "overflow"),
    ],
)
def test_what_the_front_end_refuses_it_still_refuses(by: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, as what it takes is remembered; an overflow where it is asked for, as by TRITON_DEBUG."""
    builder = interpreter.interpreter_builder
    for debug in (False, True, True):
        x = torch.ones(4)
        monkeypatch.setattr(builder, "options", interpreter.InterpreterOptions(debug=debug))
        if by == "overflow" and not debug:
            _sum_of_two_kernel[(1,)](x, x, by)
            continue
        with pytest.raises(Exception, match=what):
            _sum_of_two_kernel[(1,)](x, x, by)
