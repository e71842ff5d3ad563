"""What the GPU backend keeps for its backward: the states it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.core.tune import TARGETS, recording
from foci.ops.decay import gpu
from foci.ops.decay.call import Call, bind

pytest.importorskip("triton")
from foci.ops.decay import kernels_triton_walks as walks  # isort: skip


def call(dtype: torch.dtype = torch.float32, K: int = 8, V: int = 5, **options: Any) -> Call:
    q = torch.zeros(2, 70, 3, K, dtype=dtype)
    return bind(q, q, torch.zeros(2, 70, 3, V, dtype=dtype), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_state_at_every_chunks_start_is_kept_in_what_is_multiplied(dtype: torch.dtype) -> None:
    kept = gpu.kept(call(dtype))
    assert kept.shape == (2 * 2 + 2, 3, 8, 5)
    assert kept.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def test_what_is_kept_of_documents_and_without_an_order() -> None:
    q, v = torch.zeros(1, 70, 3, 8), torch.zeros(1, 70, 3, 5)
    assert gpu.kept(bind(q, q, v, offsets=torch.tensor([0, 1, 1, 70]))).shape[0] == 70 // 64 + 3 + 2
    assert gpu.kept(bind(q, q, v, causal=False)).shape[0] == 0


@pytest.mark.parametrize(
    "T, heads, few, stretches",
    [
        (4095, 1, 4, 0), (4096, 1, 4, 4), (8192, 8, 4, 8), (8192, 16, 4, 8), (8192, 32, 4, 8), (8192, 33, 4, 0),
        (65536, 8, 4, 16), (8192, 8, 2, 8), (8192, 9, 2, 0),
    ],
)  # fmt: skip
def test_few_heads_of_long_sequences_are_cut(T: int, heads: int, few: int, stretches: int) -> None:
    """On an H200 into as many stretches as fill it twice, of 16 chunks or more. A walk of up to 16 heads has 8 programs
    of 4 warps each, one of more has 4.
    """
    q = torch.empty(1, T, heads, 128, dtype=torch.bfloat16, device="meta")
    with recording(TARGETS["sm_90"]):
        found = gpu._walk("linear_states", bind(q, q, q), few).cut
    assert found.slots == stretches and found.tokens % (16 * 64) == 0


@pytest.mark.parametrize(
    "shape, forward, backward",
    [
        ((2, 16384, 16, 128), 4096, 4096), ((4, 2048, 16, 128), 0, 1024), ((1, 8192, 96, 128), 0, 0),
        ((1, 16384, 4, 128), 1024, 512), ((8, 1024, 8, 64), 256, 256), ((1, 256, 4, 64), 0, 0),
    ],
)  # fmt: skip
def test_walks_are_cut_as_was_fastest_on_an_h200(shape: tuple[int, ...], forward: int, backward: int) -> None:
    """Or within 5 % of it: benchmarks.md."""
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with recording(TARGETS["sm_90"]):
        found = [gpu._cheapest(bind(q, q, q), costs).tokens for costs in (walks.FORWARD, walks.BACKWARD)]
    assert found == [forward, backward]
