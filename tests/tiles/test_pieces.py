"""Pieces of a sequence: they share its chunks, and each begins where nothing before it is left."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from foci.core.tune import interpreting
from foci.tiles.pieces import FORGOTTEN, WARM, forgotten, remembered, share, silent, slow_pieces

if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1, which `make test` sets for these", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreting() else "cuda")


@triton.jit
def shares_kernel(out_ptr, pieces, chunks):  # type: ignore[no-untyped-def]
    first, end = share(tl.program_id(0), pieces, chunks)
    tl.store(out_ptr + 2 * tl.program_id(0), first)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, end)


@triton.jit
def remembered_kernel(reach_ptr, begin_ptr, lost_ptr, step, count, MOST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    begin, lost = remembered(reach_ptr, step, count, MOST, BLOCK)
    tl.store(begin_ptr, begin)
    tl.store(lost_ptr, lost)


@triton.jit
def slow_kernel(reach_ptr, own_ptr, later_ptr, step, pieces, chunks, still, FAR: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    piece = tl.program_id(0)
    own, later = slow_pieces(reach_ptr, step, piece, pieces, chunks, still, FAR, BLOCK)
    tl.store(own_ptr + piece, own)
    tl.store(later_ptr + piece, later)


@triton.jit
def forgotten_kernel(x_ptr, out_ptr, t1, t2):  # type: ignore[no-untyped-def]
    there = tl.make_tensor_descriptor(x_ptr, [128, 16], [16, 1], [32, 16]), 0, 0
    tl.store(out_ptr + tl.arange(0, 16), forgotten(there, t1, t2, 0, 32, 16))


@triton.jit
def silent_kernel(x_ptr, out_ptr, start, stop, cols, stride_row, stride_col, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, silent(x_ptr, start, stop, stride_row, cols, stride_col, CHUNK, 16))


@pytest.mark.parametrize("chunks", [0, 1, 2, 6, 7, 50, 128, 1000])
@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
def test_pieces_share_all_chunks_the_first_has_more(chunks: int, pieces: int) -> None:
    found = torch.empty(pieces, 2, dtype=torch.int32, device=DEVICE)
    shares_kernel[(pieces,)](found, pieces, chunks)
    ends = found.flatten().tolist()
    assert ends[0] == 0 and ends[-1] == chunks and ends[1:-1:2] == ends[2::2]
    sizes = [end - first for first, end in found.tolist()]
    more = min(chunks // 7, WARM.value) if pieces > 1 else 0
    assert all(0 <= sizes[0] - size - more <= 1 or 0 <= size + more - sizes[0] <= 1 for size in sizes[1:])


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("step", [1, 3, -2])
@pytest.mark.parametrize("kind", ["random", "never", "unread", "infinite", "nan", "none"])
def test_a_piece_begins_where_nothing_before_it_is_left(kind: str, step: int, block: int) -> None:
    draw, count = torch.Generator().manual_seed(3), 0 if kind == "none" else 21
    reach = -60 * torch.rand(count, generator=draw)
    if kind == "never":
        reach = reach / 1000
    elif kind != "random" and count:
        reach[4] = {"unread": 1e38, "infinite": math.inf, "nan": math.nan}[kind]
    memory = torch.full((abs(step) * max(count, 1),), 7.0)
    memory[:: abs(step)][:count] = reach if step > 0 else reach.flip(0)
    memory = memory.to(DEVICE)
    begin, lost = torch.empty(1, dtype=torch.int32, device=DEVICE), torch.empty(1, device=DEVICE)
    start = memory if step > 0 or not count else memory[(count - 1) * -step :]
    remembered_kernel[(1,)](start, begin, lost, step, count, 2e38, block)
    left = [i for i in range(count) if reach[i:].sum() <= FORGOTTEN.value]
    wanted = max(left, default=0)
    assert begin.item() == wanted
    assert lost.isnan().item() == (kind == "infinite") or kind == "nan"
    assert kind != "random" or 0 < wanted < count


@pytest.mark.parametrize("block", [2, 16])
@pytest.mark.parametrize("step", [1, 3, -2])
@pytest.mark.parametrize(
    ("kind", "far", "still"),
    [("random", 4, 0), ("never", 8, 0), ("never", 8, 11), ("never", 8, 12), ("infinite", 8, 0), ("at once", 1, 0)],
)
def test_a_piece_is_slow_by_the_chunks_before_it_alone(kind: str, far: int, still: int, step: int, block: int) -> None:
    draw, count, pieces = torch.Generator().manual_seed(5), 40, 7
    reach = -60 * torch.rand(count, generator=draw)
    reach = {"random": reach, "never": reach / 1000, "infinite": reach, "at once": reach - 200}[kind]
    if kind == "infinite":
        reach[20] = math.inf
    memory = torch.full((abs(step) * count,), 7.0)
    memory[:: abs(step)] = reach if step > 0 else reach.flip(0)
    start = memory.to(DEVICE) if step > 0 else memory.to(DEVICE)[(count - 1) * -step :]
    own, later = torch.empty(2, pieces, dtype=torch.int32, device=DEVICE)
    slow_kernel[(pieces,)](start, own, later, step, pieces, count, still, far, block)
    ends = torch.empty(pieces, 2, dtype=torch.int32, device=DEVICE)
    shares_kernel[(pieces,)](ends, pieces, count)
    wanted = [
        far < first - still and bool(reach[first - far : first].sum() > FORGOTTEN.value) for first, _ in ends.tolist()
    ]
    assert own.tolist() == wanted
    assert later.tolist() == [any(wanted[piece + 1 :]) for piece in range(pieces)]
    assert (0 < sum(wanted) < pieces - 1) == (kind in ("random", "infinite") or still > 0) and any(wanted) == (
        kind != "at once"
    )


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf])
def test_what_is_forgotten_leaves_nothing_but_what_is_no_number(wrong: float | None) -> None:
    x, out = torch.randn(128, 16, device=DEVICE).bfloat16(), torch.empty(16, device=DEVICE)
    if wrong is not None:
        x[40, 3] = wrong
        x[100, 5] = wrong
    forgotten_kernel[(1,)](x, out, 32, 96)
    assert out.isnan().tolist() == [c == 3 and wrong is not None for c in range(16)] and (out.nan_to_num() == 0).all()


@pytest.mark.parametrize(("last", "wanted"), [(None, 4), (0, 3), (31, 3), (32, 2), (95, 1), (96, 0), (99, 0)])
@pytest.mark.parametrize("value", [1e-30, math.nan, -math.inf])
def test_chunks_are_silent_from_the_end_to_the_last_that_is_not_0(last: int | None, wanted: int, value: float) -> None:
    """Of rows 7 to 107, a chunk of which has 32; others are not asked, and -0 is 0."""
    x = torch.full((120, 2, 24), -0.0)
    x[:7], x[107:], x[:, 1] = 1.0, 1.0, 1.0
    if last is not None:
        x[7 + last, 0, 20] = value
    x, out = x.to(DEVICE), torch.empty(1, dtype=torch.int32, device=DEVICE)
    for rows, turned in ((x, False), (x.transpose(0, 2).contiguous().transpose(0, 2), True)):
        silent_kernel[(1,)](rows, out, 7, 107, 24, rows.stride(0), rows.stride(2), 32)
        assert out.item() == wanted, turned
    silent_kernel[(1,)](x, out, 7, 7, 24, 48, 1, 32)
    assert out.item() == 0
