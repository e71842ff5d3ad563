"""A chunk's gradients of pairs and through states, against torch."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl

from foci.tiles import through
from foci.tiles.memory import store_tile
from tests.ops.in_triton import DEVICE
from tests.ops.recurrences import error
from tests.tiles.test_gates import normal, room
from tests.tiles.test_near import IEEE

C, K = 64, 32


@triton.jit
def _outers(do_ptr, dv_ptr, d_ptr, A_ptr, stop, V, WHOLE: tl.constexpr):
    A, E = through.outers(do_ptr, (0, V, 0, 1), dv_ptr, d_ptr, V, 0, stop, V, tl.float16, IEEE, 64, 16, WHOLE)
    store_tile(A_ptr, A, 0, 64, 64, 0, 64, 1)
    store_tile(A_ptr + 64 * 64, E, 0, 64, 64, 0, 64, 1)


@pytest.mark.parametrize(("stop", "V"), [(64, 48), (41, 48), (41, 37)])
def test_pairs(stop: int, V: int) -> None:
    do, dv, d, found = normal(1, C, V), normal(2, C, V), normal(3, C, V), room(2, C, C)
    _outers[(1,)](*(x.to(DEVICE) for x in (do, dv, d)), found, stop, V, stop == 64)
    for x, one in zip((do, dv), found.cpu(), strict=True):
        assert error(one[:stop, :stop], (x.double() @ d.double().T)[:stop, :stop]) < 1e-6


@triton.jit
def _states(do_ptr, dv_ptr, d_ptr, S_ptr, dS_ptr, to_ptr, total_ptr, stop, K, V, k0, WHOLE: tl.constexpr):
    by_out, by_value, by_error, by_total = through.through_states(
        do_ptr, (0, V, 0, 1), dv_ptr, d_ptr, V, S_ptr, dS_ptr, 0, stop, k0, K, V, IEEE, 64, 16, 16, WHOLE
    )
    store_tile(to_ptr, by_out, 0, 64, 16, 0, 16, 1)
    store_tile(to_ptr + 64 * 16, by_value, 0, 64, 16, 0, 16, 1)
    store_tile(to_ptr + 2 * 64 * 16, by_error, 0, 64, 16, 0, 16, 1)
    tl.store(total_ptr + tl.arange(0, 16), by_total)


@pytest.mark.parametrize(("stop", "V"), [(64, 48), (41, 48), (41, 37)])
def test_states(stop: int, V: int) -> None:
    do, dv, d, S, dS = normal(1, C, V), normal(2, C, V), normal(3, C, V), normal(4, K, V), normal(5, K, V)
    found, totals = room(3, C, 16), room(16)
    _states[(1,)](*(x.to(DEVICE) for x in (do, dv, d, S, dS)), found, totals, stop, K, V, 16, stop == 64)
    for x, state, one in zip((do, dv, d), (S, S, dS), found.cpu(), strict=True):
        assert error(one[:stop], (x.double() @ state[16:].double().T)[:stop]) < 1e-6
    assert error(totals.cpu(), (S.double() * dS.double()).sum(1)[16:]) < 1e-6
