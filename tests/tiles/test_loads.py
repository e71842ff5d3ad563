"""Loading warps as threads on a CPU (tests/ops/in_gluon.py), beside one that notes what has come, and doubles it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma  # noqa: F401

from foci.core import tune
from foci.tiles.loads import load_keys, load_products, load_queries, load_values_and_store
from foci.tiles.tma import async_load, async_store  # noqa: F401  by these names the threads' language is put in
from tests.ops.in_gluon import Gluon

pytestmark = pytest.mark.skipif(not tune.interpreting(), reason="runs as threads on a CPU")
CHUNK, COUNT = 64, 5


@gluon.jit
def _read(tiles, told, flow, STAGES):  # type: ignore[no-untyped-def]
    full, empty, (begin, own, end), _ = flow
    for i in range(begin, end):
        turn = i - begin
        at = turn % STAGES
        mbarrier.wait(full.index(at), turn // STAGES & 1)
        for tile, there in zip(tiles, told, strict=True):
            parts = tile.shape[0] // STAGES
            for part in range(parts):
                there[int(i), part] = tile.index(parts * at + part).load(None)
        v = tiles[1].index(at)
        if i >= own:
            v.store((2 * v.load(None).float()).to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(empty.index(at), count=1)


@gluon.jit
def _walk_kernel(  # type: ignore[no-untyped-def]
    keys, values, products, pairs, queries, rows_ptr, outputs, told, own, STAGES: gl.constexpr, KEEP: gl.constexpr
):
    narrow = [STAGES, CHUNK, 64]
    q, k, v = (gl.allocate_shared_memory(gl.bfloat16, narrow, None) for _ in range(3))
    X, A = (gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, CHUNK, CHUNK], None) for _ in range(2))
    rows = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, CHUNK], None)
    marks = gl.allocate_shared_memory(gl.float32, [STAGES, 1, CHUNK], None)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], None)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], None)
    for at in range(STAGES):
        mbarrier.init(full.index(at), count=4)
        mbarrier.init(empty.index(at), count=1)
    stop = CHUNK * COUNT
    flow = full, empty, (1, own, COUNT), 0
    exact_ptr = rows_ptr + (3 * CHUNK - 1)
    gl.warp_specialize(
        [
            (_read, ((k, v, q, X, A, rows, marks), told, flow, STAGES)),
            (load_keys, ((keys, 64, stop, 0, k), flow, CHUNK, STAGES, False)),
            (load_values_and_store, ((values, 64, outputs, stop, 1, 64, 0, v), flow, CHUNK, STAGES, False, True)),
            (
                load_products,
                (
                    (products, pairs, exact_ptr, stop, 0, 2 * CHUNK, (2 if pairs is None else 4) * CHUNK, 1, X, A),
                    flow,
                    CHUNK,
                    STAGES,
                    False,
                    KEEP,
                ),
            ),
            (
                load_queries,
                ((queries, 64, rows_ptr, exact_ptr, stop, 0, 1, q, rows, marks), flow, CHUNK, STAGES, False, KEEP),
            ),
        ],
        [1, 1, 1, 1],
        None,
    )


@pytest.mark.parametrize(("keep", "alone"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("own", [1, 3])
def test_each_chunk_comes_to_its_place_and_outputs_leave_by_that_of_values(
    own: int, stages: int, keep: bool, alone: bool
) -> None:
    """Chunks 1 to 4, read from `own` on; of these, without `keep`, 2 and 4 have exact tokens."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    keys, values, queries = (drawn(COUNT, CHUNK, 64).bfloat16() for _ in range(3))
    products, lines = drawn(COUNT, CHUNK, 2 if alone else 4, CHUNK).bfloat16(), 2 if keep else 3
    rows = drawn(COUNT, lines, CHUNK)
    if not keep:
        rows[:, 2, -1] = torch.tensor([0.0, 0, 1, 0, 1])
    outputs = torch.zeros_like(values)
    sizes = (
        (1, CHUNK, 64),
        (1, CHUNK, 64),
        (1, CHUNK, 64),
        (2, CHUNK, CHUNK),
        (2, CHUNK, CHUNK),
        (2, 1, CHUNK),
        (1, 1, CHUNK),
    )
    told = [torch.full((COUNT, *size), torch.nan) for size in sizes]
    module = sys.modules[__name__]
    Gluon(gl).run(
        module, _walk_kernel, (1,), (
            keys, values, products, None if alone else products, queries, rows, outputs, tuple(told), own
        ), STAGES=stages, KEEP=keep,
    )  # fmt: skip
    k, v, q, X, A, factors, marks = told
    assert k[1:, 0].equal(keys[1:].float()) and v[1:, 0].equal(values[1:].float())
    assert q[own:, 0].equal(queries[own:].float())
    assert factors[1:, :, 0].equal(rows[1:, :2])
    exact = [True] * COUNT if keep else [False, False, True, False, True]
    for i in range(1, COUNT):
        x, x_lost, *pairs = products[i].float().unbind(1)
        assert X[i, 0].equal(x) and (X[i, 1].equal(x_lost) or not exact[i])
        assert i < own or alone or (A[i, 0].equal(pairs[0]) and (A[i, 1].equal(pairs[1]) or not exact[i]))
        assert keep or not exact[i] or marks[i, 0, 0].equal(rows[i, 2])
    assert not alone or A.isnan().all()
    assert outputs[own:].float().equal(2 * values[own:].float()) and not outputs[:own].any()
    if own == 3:  # and nothing is loaded that nobody reads
        assert q[1:own].isnan().all() and A[1:own].isnan().all()
