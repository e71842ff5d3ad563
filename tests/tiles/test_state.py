"""Slots: every chunk of every sequence has its own, the same for who walks a sequence and who takes a chunk."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from foci.core.tune import interpreting
from foci.ops.gpu import chunks
from foci.tiles.state import chunk_at, nearest_in_two, sequence, working

if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1, which `make test` sets for these", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreting() else "cuda")
CHUNK = 16


@triton.jit
def _sequences(offsets_ptr, out_ptr, T, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0)
    b, start, stop, slot = sequence(offsets_ptr, n, T, CHUNK)
    tl.store(out_ptr + 4 * n, b)
    tl.store(out_ptr + 4 * n + 1, start)
    tl.store(out_ptr + 4 * n + 2, stop)
    tl.store(out_ptr + 4 * n + 3, slot)


@triton.jit
def _chunks(offsets_ptr, out_ptr, N, T, CHUNK: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.program_id(0)
    n, b, first, stop, slot = chunk_at(offsets_ptr, c, N, T, CHUNK, WIDE)
    tl.store(out_ptr + 5 * c, n)
    tl.store(out_ptr + 5 * c + 1, b)
    tl.store(out_ptr + 5 * c + 2, first)
    tl.store(out_ptr + 5 * c + 3, stop)
    tl.store(out_ptr + 5 * c + 4, slot)


@triton.jit
def _working(x_ptr, out_ptr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, working(tl.load(x_ptr)) * 1000.0)


@pytest.mark.parametrize(
    "offsets, B, T", [(None, 3, 33), (None, 2, 16), ((0, 0, 1, 17, 17, 65, 65), 1, 65), ((0, 16, 32, 37), 1, 37)]
)
def test_who_walks_and_who_takes_a_chunk_agree(offsets: tuple[int, ...] | None, B: int, T: int) -> None:
    placed = None if offsets is None else torch.tensor(offsets, device=DEVICE)
    N = B if offsets is None else len(offsets) - 1
    count = B * -(-T // CHUNK) if offsets is None else T // CHUNK + N
    walks = torch.empty(N, 4, dtype=torch.int32, device=DEVICE)
    takes = torch.empty(count, 5, dtype=torch.int32, device=DEVICE)
    _sequences[(N,)](placed, walks, T, CHUNK)
    _chunks[(count,)](placed, takes, N, T, CHUNK, 4)
    expected = [
        [n, b, first, stop, slot + i]
        for n, (b, start, stop, slot) in enumerate(walks.tolist())
        for i, first in enumerate(range(start, stop, CHUNK))
    ]
    found = [row for row in takes.tolist() if row[0] >= 0]
    assert found == expected
    slots = [row[-1] for row in found]
    assert len(set(slots)) == len(slots) and max(slots) < count
    bounds = [(0, T)] * B if offsets is None else list(itertools.pairwise(offsets))
    assert [tuple(row[1:3]) for row in walks.tolist()] == bounds


def _taken(offsets: list[int], T: int, WIDE: int, dtype: torch.dtype = torch.int64) -> list[list[int]]:
    N = len(offsets) - 1
    takes = torch.full((T // CHUNK + N + 2, 5), -7, dtype=torch.int32, device=DEVICE)
    _chunks[(takes.shape[0],)](torch.tensor(offsets, dtype=dtype, device=DEVICE), takes, N, T, CHUNK, WIDE)
    return takes.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("WIDE", [2, 4, 32])
@pytest.mark.parametrize(
    "lengths", [[9], [16], [12, 4, 16, 32], [0, 20, 0, 0, 16, 48, 0], [0, 0, 0, 1], [16] * 9, [1] * 70, [0] * 33 + [99]]
)
@pytest.mark.parametrize("start", [0, 5, 40])
def test_every_slot_finds_its_document_however_many_there_are(
    start: int, lengths: list[int], WIDE: int, dtype: torch.dtype
) -> None:
    offsets = [start + sum(lengths[:n]) for n in range(len(lengths) + 1)]
    expected = [
        [n, 0, first, stop, begin // CHUNK + n + i]
        for n, (begin, stop) in enumerate(itertools.pairwise(offsets))
        for i, first in enumerate(range(begin, stop, CHUNK))
    ]
    found = _taken(offsets, offsets[-1] + 3, WIDE, dtype)
    assert [row for row in found if row[0] >= 0] == expected
    assert all(row[0] == -1 for row in found if row[-1] not in {each[-1] for each in expected})


def test_offsets_that_lie_never_lead_outside() -> None:
    for offsets in ([0, -5, 99, 3], [-3, 50], [7, 2, 9], [99, 99, 99], [40, 20, 0, 10]):
        for n, _, first, stop, _ in _taken(offsets, 50, 2):
            assert n == -1 or 0 <= first < stop <= 50, offsets


def test_there_is_room_for_every_slot() -> None:
    assert chunks(130, 2, None) == 6
    assert chunks(130, 1, torch.tensor([0, 1, 1, 130])) == 2 + 3


def test_float16_is_multiplied_in_float32() -> None:
    out = torch.empty(1, device=DEVICE)
    _working[(1,)](torch.full((1,), 1000.0, dtype=torch.float16, device=DEVICE), out)
    assert out.item() == 1e6


@triton.jit
def _nearest_in_two(x_ptr, high_ptr, low_ptr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 16)
    high, low = nearest_in_two(tl.load(x_ptr + i))
    tl.store(high_ptr + i, high.to(tl.float32))
    tl.store(low_ptr + i, low.to(tl.float32))


def test_the_first_of_two_is_the_nearest_and_what_is_no_number_stays_none() -> None:
    """A GPU's arithmetic gives the NaN of bits 0x7fffffff, to which nothing can be added as to an integer."""
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    x[3], x[5] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32), torch.nan
    x[7], x[9] = 0.0, -1.5
    high, low = (torch.empty(16, device=DEVICE) for _ in range(2))
    _nearest_in_two[(1,)](x.to(DEVICE), high, low)
    torch.testing.assert_close(high.cpu(), x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close((high + low).cpu(), x, rtol=2.0**-16, atol=0, equal_nan=True)
