"""Affine maps of a state: those of pieces, stored and joined in their order, are the map of them all."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.core.tune import interpreting
from foci.tiles.affine import joined, load_state, piece_at, store_map, store_state, with_unit

if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1, which `make test` sets for these", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreting() else "cuda")


@triton.jit
def _join(state_ptr, strides, M_ptr, N_ptr, out_ptr, slot, count, H, K, V, STEP: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    h, v0 = tl.program_id(0), tl.program_id(1) * 16
    rows = tl.where(count > 0, 0, K)
    S = load_state(state_ptr + h * strides[1], strides, rows, v0, V, TILES, 16, 16)
    S = joined(S, M_ptr, N_ptr, slot, count, h, H, K, v0, V, STEP, "ieee", TILES, 16, 16)
    store_state(out_ptr + h * K * V, S, K, v0, V, TILES, 16)


@triton.jit
def _store(x_ptr, M_ptr, N_ptr, strides, K, V, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    v0 = tl.program_id(0) * 16
    S = load_state(x_ptr, strides, K, v0, V, TILES, 16, 16)
    S = with_unit(S, v0 - tl.cdiv(V, 16) * 16, TILES, 16, 16)
    store_map(M_ptr, N_ptr, S, 0, K, v0, V, TILES, 16, 16)


@triton.jit
def _pieces(offsets_ptr, out_ptr, T, N, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    n, _, first, end, slot, own, before, behind = piece_at(offsets_ptr, tl.program_id(0), T, N, 16, PIECE)
    out_ptr += tl.program_id(0) * 7
    tl.store(out_ptr, n)
    tl.store(out_ptr + 1, first)
    tl.store(out_ptr + 2, end)
    tl.store(out_ptr + 3, slot)
    tl.store(out_ptr + 4, own)
    tl.store(out_ptr + 5, before)
    tl.store(out_ptr + 6, behind)


@pytest.mark.parametrize(("count", "step"), [(0, 1), (1, 1), (3, 1), (3, -1)])
def test_maps_joined_one_after_another(count: int, step: int) -> None:
    H, K, V = 2, 20, 18
    M, N = torch.randn(4, H, K, K) / K**0.5, torch.randn(4, H, K, V)
    state, first = torch.randn(1, H, K, V), 0 if step > 0 else 3
    truth = state[0] if count == 0 else N[first]
    for i in range(1, count):
        truth = M[first + i * step] @ truth + N[first + i * step]
    M[first] = torch.nan  # the first piece's is never read
    out, (M, N, state) = torch.empty(H, K, V, device=DEVICE), (x.to(DEVICE) for x in (M, N, state))
    _join[(H, 2)](state, state.stride(), M, N, out, first, count, H, K, V, STEP=step, TILES=2)
    torch.testing.assert_close(out.cpu(), truth)


def test_columns_behind_those_of_the_state_are_the_unit_matrix() -> None:
    K, V = 20, 18
    x = torch.randn(1, 1, K, V, device=DEVICE)
    M, N = (torch.full((K, n), torch.nan, device=DEVICE) for n in (K, V))
    _store[(4,)](x, M, N, x.stride(), K, V, TILES=2)
    assert N.equal(x[0, 0]) and M.cpu().equal(torch.eye(K))


@pytest.mark.parametrize("offsets", [None, (0, 0, 5, 75, 75, 107)])
@pytest.mark.parametrize("PIECE", [0, 32])
def test_each_piece_knows_its_chunks_and_how_many_are_before_and_behind_it(offsets, PIECE: int) -> None:
    T, N = (70, 2) if offsets is None else (107, 5)
    slots = N if PIECE == 0 else N * 3 if offsets is None else T // PIECE + N
    programs = slots + N * (PIECE > 0 and offsets is not None)
    out = torch.empty(programs, 7, dtype=torch.int64, device=DEVICE)
    _pieces[(programs,)](None if offsets is None else torch.tensor(offsets, device=DEVICE), out, T, N, PIECE=PIECE)
    seen = {n: [] for n in range(N)}
    for n, *rest in out.tolist():
        if n >= 0:
            seen[n].append(rest)
    for n, found in seen.items():
        start, stop = (0, T) if offsets is None else offsets[n : n + 2]
        slot = n * -(-T // 16) if offsets is None else start // 16 + n
        count = max(1, -(-(stop - start) // PIECE)) if PIECE else 1
        assert len(found) == count
        for i, (first, end, here, own, before, behind) in enumerate(sorted(found)):
            assert (first, end) == (
                (start, stop) if not PIECE else (start + i * PIECE, min(start + i * PIECE + PIECE, stop))
            )
            assert here == slot + (first - start) // 16 and own - before == min(found)[3]
            assert (before, behind) == (i, count - 1 - i)
