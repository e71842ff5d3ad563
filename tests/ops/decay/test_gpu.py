"""The GPU backend's reasons, and the states it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.core.tune import interpreting
from foci.ops.decay import gpu
from foci.ops.decay.call import Call, bind


def call(dtype: torch.dtype = torch.float32, K: int = 8, V: int = 5, **options: Any) -> Call:
    q = torch.zeros(2, 70, 3, K, dtype=dtype)
    return bind(q, q, torch.zeros(2, 70, 3, V, dtype=dtype), **options)


@pytest.mark.skipif(interpreting(), reason="Triton's interpreter runs on the CPU")
def test_it_wants_a_gpu_and_says_so() -> None:
    assert gpu.reasons(call()) == ["it needs a GPU, the tensors are on cpu"]


def test_what_no_kernel_computes_is_refused() -> None:
    assert "float64 is not supported" in gpu.reasons(call(torch.float64))
    assert "heads wider than 512 are not supported" in gpu.reasons(call(K=513))
    assert "heads wider than 512 are not supported" in gpu.reasons(call(V=513))
    assert "there is nothing to compute: a size is 0" in gpu.reasons(call(V=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_state_at_every_chunks_start_is_kept_in_what_is_multiplied(dtype: torch.dtype) -> None:
    kept = gpu.kept(call(dtype))
    assert kept.shape == (2 * 2 + 2, 3, 8, 5)
    assert kept.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def test_what_is_kept_of_documents_and_without_an_order() -> None:
    q, v = torch.zeros(1, 70, 3, 8), torch.zeros(1, 70, 3, 5)
    assert gpu.kept(bind(q, q, v, offsets=torch.tensor([0, 1, 1, 70]))).shape[0] == 70 // 64 + 3 + 2
    assert gpu.kept(bind(q, q, v, causal=False)).shape[0] == 0
