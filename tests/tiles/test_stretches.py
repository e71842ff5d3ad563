"""Stretches: each token of each document in one of them, maps joined in their order, rows masked by their end."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.core.tune import TARGETS, interpreting
from foci.ops.stretches import Rule, cut
from foci.tiles.memory import load_tile, store_tile
from foci.tiles.stretches import await_count, count_one, decay_rates, join, join_states, row, rows, stretch

if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1, which `make test` sets for these", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreting() else "cuda")


@triton.jit
def _stretches(offsets_ptr, out_ptr, T, N, STRETCH: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0)
    n, b, start, stop, first, end, slot = stretch(offsets_ptr, index, T, N, STRETCH)
    out_ptr += index * 7
    tl.store(out_ptr, n)
    tl.store(out_ptr + 1, b)
    tl.store(out_ptr + 2, start)
    tl.store(out_ptr + 3, stop)
    tl.store(out_ptr + 4, first)
    tl.store(out_ptr + 5, end)
    tl.store(out_ptr + 6, slot)


@triton.jit
def _join(state_ptr, decays_ptr, ends_ptr, slot, count, size, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.arange(0, 4)
    state = tl.load(state_ptr + d)
    tl.store(state_ptr + d, join(state, decays_ptr + d, ends_ptr + d, slot, count, size, d < 3, STEP))


@triton.jit
def _join_states(state_ptr, decays_ptr, ends_ptr, slot, count, h, H, K, V, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    S = load_tile(state_ptr, 16, K, V, 16, V, 1, 16, 16)
    S = join_states(S, decays_ptr, ends_ptr, slot, count, h, H, 16, K, 16, V, STEP)
    store_tile(state_ptr, S, 16, K, V, 16, V, 1)


@triton.jit
def _rows(x_ptr, out_ptr, t0, end, stride):  # type: ignore[no-untyped-def]
    d = tl.arange(0, 4)
    found = rows(x_ptr, t0, end, stride, d, d < 3, 4)
    for i in tl.static_range(4):
        tl.store(out_ptr + i * 4 + d, found[i] + row(x_ptr, t0 + i, end, stride, d, d < 3))


@triton.jit
def _wait(arrived_ptr, found_ptr, count):  # type: ignore[no-untyped-def]
    if tl.program_id(0) < count:
        tl.store(found_ptr + tl.program_id(0), 1)
        count_one(arrived_ptr)
    else:
        await_count(arrived_ptr, count)
        every = tl.load(found_ptr + tl.arange(0, 16), mask=tl.arange(0, 16) < count, other=0)
        tl.store(found_ptr + count, tl.sum(every, 0))


@triton.jit
def _rates(A_ptr, out_ptr):  # type: ignore[no-untyped-def]
    k = tl.arange(0, 4)
    rates = decay_rates(A_ptr + k, k < 3)
    tl.store(out_ptr + k, tl.exp2(0.0 * rates))
    tl.store(out_ptr + 4 + k, tl.exp2(0.5 * rates))


@pytest.mark.parametrize("STRETCH", [0, 16, 64])
@pytest.mark.parametrize("offsets", [None, (0, 40), (0, 0, 1, 17, 17, 65, 65), (0, 16, 32, 37)])
def test_every_token_lies_in_one_stretch_and_every_sequence_is_ended_once(offsets, STRETCH: int) -> None:
    T = 40 if offsets is None else offsets[-1]
    N = 3 if offsets is None else len(offsets) - 1
    slots = 0 if STRETCH == 0 else N * -(-T // STRETCH) if offsets is None else T // STRETCH + N
    programs = N if STRETCH == 0 else slots + N * (offsets is not None)
    out = torch.full((programs, 7), -7, dtype=torch.int32, device=DEVICE)
    there = None if offsets is None else torch.tensor(offsets, device=DEVICE)
    _stretches[(programs,)](there, out, T, N, STRETCH=STRETCH)
    tokens, ended, taken = set(), [], set()
    for n, b, start, stop, first, end, slot in out.tolist():
        if n < 0:
            assert first == end
            continue
        assert (b, start, stop) == ((n, 0, T) if offsets is None else (0, *offsets[n : n + 2]))
        assert start <= first and end <= stop and (STRETCH == 0 or end - first <= STRETCH)
        tokens |= {(b, t) for t in range(first, end)}
        ended += [n] if end == stop else []
        if first < end and STRETCH:
            assert slot not in taken and 0 <= slot < slots
            taken.add(slot)
    assert len(tokens) == (3 * T if offsets is None else T)
    assert sorted(ended) == list(range(N))


def test_as_many_programs_as_the_cut_says() -> None:
    found = cut(Rule(128, few=4, most=16), 3, 1, 600, True, TARGETS["sm_90"], 1)
    out = torch.full((found.programs, 7), -7, dtype=torch.int32, device=DEVICE)
    _stretches[(found.programs,)](torch.tensor([0, 0, 300, 600], device=DEVICE), out, 600, 3, STRETCH=found.tokens)
    assert sorted(n for n, *_, end, _ in out.tolist() if n >= 0 and end in (0, 300, 600)) == [0, 1, 2]


@pytest.mark.parametrize("count", [0, 1, 8, 11])
@pytest.mark.parametrize("step", [1, -1])
def test_maps_are_joined_in_their_order(count: int, step: int) -> None:
    state, decays, ends = torch.randn(4), torch.rand(20, 3), torch.randn(20, 3)
    expected = state.clone()
    for i in range(count):
        expected[:3] = (
            decays[9 + i * step if step > 0 else 15 - i] * expected[:3] + ends[9 + i * step if step > 0 else 15 - i]
        )
    found = state.to(DEVICE)
    _join[(1,)](found, decays.to(DEVICE), ends.to(DEVICE), 9 if step > 0 else 15, count, 3, STEP=step)
    torch.testing.assert_close(found.cpu()[:3], expected[:3])


@pytest.mark.parametrize("count, step", [(0, 1), (3, 1), (3, -1)])
def test_maps_of_states_decay_each_row(count: int, step: int) -> None:
    """One head's, from row and column 16 on; nothing else is touched."""
    state, decays, ends = torch.randn(20, 19), torch.rand(6, 2, 20), torch.randn(6, 2, 20, 19)
    expected = state.clone()
    for slot in range(2, 2 + count * step, step):
        expected[16:, 16:] = (decays[slot, 1, :, None] * expected + ends[slot, 1])[16:, 16:]
    found = state.to(DEVICE)
    _join_states[(1,)](found, decays.to(DEVICE), ends.to(DEVICE), 2, count, 1, 2, 20, 19, STEP=step)
    torch.testing.assert_close(found.cpu(), expected)


def test_rows_end_where_the_tokens_do() -> None:
    x, out = torch.arange(24.0, device=DEVICE), torch.full((4, 4), -1.0, device=DEVICE)
    _rows[(1,)](x, out, 2, 5, 4)
    expected = torch.zeros(4, 4)
    expected[:3, :3] = 2 * torch.arange(24.0).view(6, 4)[2:5, :3]
    torch.testing.assert_close(out.cpu(), expected)


def test_a_rate_of_minus_infinity_forgets_nothing_in_no_time() -> None:
    A, out = torch.tensor([-torch.inf, -2.0, 0.0], device=DEVICE), torch.zeros(8, device=DEVICE)
    _rates[(1,)](A, out)
    torch.testing.assert_close(out.cpu(), torch.tensor([1.0, 1, 1, 1, 0, torch.e**-1, 1, 1]))


def test_who_waits_has_all_that_others_have_stored() -> None:
    arrived = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    _wait[(6,)](arrived, found, 5)
    assert found.tolist() == [1, 1, 1, 1, 1, 5] and int(arrived) == 5
