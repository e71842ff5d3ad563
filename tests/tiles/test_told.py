"""What pieces of a sequence have lost is spread by the last program to come, and by no other."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import interpreting
from foci.tiles.memory import present
from foci.tiles.pieces import share
from foci.tiles.told import counts, spread_lost

if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1, which `make test` sets for these", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreting() else "cuda")
CHUNK, H, K, V = 4, 2, 3, 80


@triton.jit
def _come(  # type: ignore[no-untyped-def]
    order_ptr, lost_ptr, arrived_ptr, out_ptr, final_ptr, errors_ptr, states_ptr, offsets_ptr, apart, T, H, K, V,
    pieces, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK_V)
    block, rest = tl.program_id(0) % blocks, tl.load(order_ptr + tl.program_id(0) // blocks)
    v, h, piece = block * BLOCK_V + tl.arange(0, BLOCK_V), rest % H, rest // H
    ahead, behind = share(piece, pieces, tl.cdiv(T, CHUNK))
    for t in range(ahead * CHUNK, tl.minimum(behind * CHUNK, T)):  # what a walk has made: nobody may be told before
        tl.store(out_ptr + (t * H + h) * V + v, 1.0, mask=v < V)
        if errors_ptr is not None:
            tl.store(errors_ptr + (t * H + h) * V + v, 1.0, mask=v < V)
            tl.store(errors_ptr + apart + (t * H + h) * V + v, 1.0, mask=v < V)
    if states_ptr is not None:
        for i in range(ahead * K, behind * K):
            tl.store(states_ptr + ((i // K * H + h) * K + i % K) * V + v, 1.0, mask=v < V)
    if (piece == pieces - 1) & present(final_ptr):
        for i in range(K):
            tl.store(final_ptr + (h * K + i) * V + v, 1.0, mask=v < V)
    spread_lost(
        lost_ptr, arrived_ptr, out_ptr, final_ptr, errors_ptr, states_ptr, offsets_ptr, v, block, rest, apart, T, H, K,
        V, pieces, CHUNK,
    )  # fmt: skip


@triton.jit
def _shares(out_ptr, pieces, chunks):  # type: ignore[no-untyped-def]
    ahead, behind = share(tl.program_id(0), pieces, chunks)
    tl.store(out_ptr + tl.program_id(0) * 2, ahead)
    tl.store(out_ptr + tl.program_id(0) * 2 + 1, behind)


def shares(pieces: int, chunks: int) -> list[list[int]]:
    out = torch.empty(pieces, 2, dtype=torch.int32, device=DEVICE)
    _shares[(pieces,)](out, pieces, chunks)
    return [[int(x) for x in row] for row in out]


def spread(lost: Tensor, order: list[int], T: int, keep: bool, block: int, asked: bool = True) -> list[Tensor]:
    """Out, the final state, errors and states after all programs have come so: each 1 at first, or NaN."""
    pieces, slots = lost.shape[1], -(-T // CHUNK)
    arrived = torch.zeros(1, H, -(-V // 64) + 1, dtype=torch.int32)
    sizes = (1, T, H, V), (1 if asked else 0, H, K, V), (2, 1, T, H, V), (slots, H, K, V)
    found = [torch.ones(size, device=DEVICE) for size in sizes]
    errors, states = found[2:] if keep else (None, None)
    _come[(len(order) * -(-V // block),)](
        torch.tensor(order, dtype=torch.int32, device=DEVICE), lost.to(DEVICE), arrived.to(DEVICE), found[0], found[1],
        errors, states, None, T * H * V, T, H, K, V, pieces, CHUNK=CHUNK, BLOCK_V=block,
    )  # fmt: skip
    return [x.cpu() for x in found]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_columns_are_lost_to_all_that_comes_later_whoever_is_the_last(keep: bool, block: int) -> None:
    T, pieces = 30, 3
    lost = torch.zeros(1, pieces, H, V, dtype=torch.int32)
    lost[0, 0, 1, 70], lost[0, 1, 1, 5], lost[0, 2, 0, 9] = 1, 1, 1
    parts = shares(pieces, -(-T // CHUNK))
    wanted = [torch.ones(1, T, H, V), torch.ones(1, H, K, V), torch.ones(2, 1, T, H, V), torch.ones(8, H, K, V)]
    for piece, column in ((1, 70), (2, 5)):
        begin = parts[piece][0]
        wanted[0][0, begin * CHUNK :, 1, column] = torch.nan
        wanted[1][0, 1, :, column] = torch.nan
        if keep:
            wanted[2][:, 0, begin * CHUNK :, 1, column] = torch.nan
            wanted[3][begin:, 1, :, column] = torch.nan
    for order in permutations(range(pieces)):  # of both heads alike
        each = [piece * H + h for piece in order for h in range(H)]
        for found, right in zip(spread(lost, each, T, keep, block), wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


def test_nobody_but_the_last_spreads_anything() -> None:
    lost = torch.ones(1, 3, H, V, dtype=torch.int32)
    for order in permutations(range(3), 2):  # a piece has not come yet
        each = [piece * H + h for piece in order for h in range(H)]
        assert all(bool((x == 1).all()) for x in spread(lost, each, 30, True, 64))


def test_nothing_is_touched_where_nothing_is_lost_or_only_at_the_end() -> None:
    lost = torch.zeros(1, 4, H, V, dtype=torch.int32)
    lost[0, 3] = 1
    assert all(bool((x == 1).all()) for x in spread(lost, list(range(4 * H)), 40, True, 64))


def test_a_piece_without_a_chunk_has_lost_nothing_whatever_it_says() -> None:
    pieces, T = 6, 9
    lost = torch.zeros(1, pieces, H, V, dtype=torch.int32)
    empty = next(piece for piece, (ahead, behind) in enumerate(shares(pieces, 3)) if ahead == behind)
    lost[0, empty] = 1
    assert all(bool((x == 1).all()) for x in spread(lost, list(range(pieces * H)), T, True, 64))


def test_a_state_that_nobody_asks_for_is_not_stored() -> None:
    lost = torch.ones(1, 2, H, V, dtype=torch.int32)
    out, final, *_ = spread(lost, list(range(2 * H)), 16, False, 64, asked=False)
    assert final.numel() == 0 and out[0, -1].isnan().all() and (out[0, 0] == 1).all()


@triton.jit
def _counts(out_ptr, V):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, counts(V))


@pytest.mark.parametrize(("width", "wanted"), [(40, 2), (64, 2), (128, 3), (192, 4)])
def test_a_head_has_a_number_for_each_64_columns_and_one(width: int, wanted: int) -> None:
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _counts[(1,)](out, width)
    assert int(out) == wanted
