"""Affine maps of a state: those of pieces, stored and joined in their order, are the map of them all."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.core.tune import interpreting
from foci.tiles.affine import (
    joined,
    joined_turned,
    load_state,
    piece_at,
    store_joined_turned,
    store_map,
    store_state,
    store_turned_map,
    with_unit,
)
from foci.tiles.memory import load_tile, store_tile
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture

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
def _join_turned(state_ptr, M_ptr, N_ptr, out_ptr, at, size, count, V, K: tl.constexpr):  # type: ignore[no-untyped-def]
    v0 = tl.program_id(0) * 16
    S = load_tile(state_ptr, v0, V, K, 0, K, 1, 16, K)
    store_tile(out_ptr, joined_turned(S, M_ptr, N_ptr, at, size, count, v0, V, 1), v0, V, K, 0, K, 1)


@triton.jit
def _store_joined(first_ptr, M_ptr, N_ptr, at, size, last, V, K: tl.constexpr):  # type: ignore[no-untyped-def]
    store_joined_turned(first_ptr, M_ptr, N_ptr, at, size, last, tl.program_id(0) * 16, V, K, 16)


@triton.jit
def _store_turned(x_ptr, M_ptr, N_ptr, at, V, K: tl.constexpr):  # type: ignore[no-untyped-def]
    v0 = tl.program_id(0) * 16
    store_turned_map(M_ptr, N_ptr, load_tile(x_ptr, v0, 256, K, 0, K, 1, 16, K), at, v0, V)


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


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("count", [0, 1, 4])
def test_turned_maps_joined_one_after_another(count: int) -> None:
    """Of bfloat16 in two; every second one, as those of two heads, from the second on."""
    K, V, size = 32, 18, 2
    M, N, state = torch.randn(9, K, K) / K**0.5, torch.randn(9, K, V), torch.randn(K, V)
    truth = state + (N[1] if count else 0)
    for i in range(1, count):
        truth = M[1 + i * size] @ truth + N[1 + i * size]
    high = M.transpose(1, 2).bfloat16()
    parts = torch.stack([high, (M.transpose(1, 2) - high.float()).bfloat16()], 1).to(DEVICE)
    out, of_state = torch.empty(V, K, device=DEVICE), state.T.contiguous().to(DEVICE)
    _join_turned[(2,)](of_state, parts, N.transpose(1, 2).contiguous().to(DEVICE), out, 1, size, count, V, K=K)
    torch.testing.assert_close(out.cpu().T, truth, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("last", [1, 3])
def test_the_states_with_which_turned_pieces_begin(last: int) -> None:
    """Up to the last one asked for; its own map, and what is behind it, nobody has made."""
    K, V, size = 32, 18, 2
    M, N = torch.randn(9, K, K) / K**0.5, torch.randn(9, K, V)
    M[1 + last * size :], N[1 + last * size :] = torch.nan, torch.nan
    high = M.transpose(1, 2).bfloat16()
    parts = torch.stack([high, (M.transpose(1, 2) - high.float()).bfloat16()], 1).to(DEVICE)
    first = torch.full((9, V, K), torch.nan, device=DEVICE)
    _store_joined[(2,)](first, parts, N.transpose(1, 2).contiguous().to(DEVICE), 1, size, last, V, K=K)
    S = N[1]
    for i in range(1, last + 1):
        torch.testing.assert_close(first[1 + i * size].cpu().T, S, rtol=2e-4, atol=2e-4)
        S = M[1 + i * size] @ S + N[1 + i * size]
    first[1 + size : 2 + last * size : size] = torch.nan
    assert first.isnan().all()


@pytest.mark.usefixtures("halves")
def test_a_turned_map_is_stored_by_rows() -> None:
    """V of them are N's, and those behind whole blocks M's, as what bfloat16 says and what that left."""
    K, V, at = 32, 18, 1
    x = torch.randn(256, K)
    M, N = torch.zeros(2, 2, K, K, dtype=torch.bfloat16, device=DEVICE), torch.zeros(2, V, K, device=DEVICE)
    _store_turned[(4,)](x.to(DEVICE), M, N, at, V, K=K)
    assert N[1].cpu().equal(x[:V]) and not N[0].any() and not M[0].any()
    torch.testing.assert_close(M[1].float().sum(0).cpu(), x[32:64], rtol=2e-5, atol=0)


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
