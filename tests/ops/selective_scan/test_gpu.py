"""What the Triton backend of the selective scan refuses, and which states it keeps."""

from __future__ import annotations

from typing import Any

import torch

from foci.ops.selective_scan.call import bind
from foci.ops.selective_scan.gpu import KEEP, kept, reasons


def call(T: int = 2, K: int = 4, B: int = 1, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    x, A, key = torch.zeros(B, T, 3, dtype=dtype), torch.zeros(3, K), torch.zeros(B, T, K, dtype=dtype)
    return bind(x, x, A, key, key, **more)


def test_refusals_have_reasons() -> None:
    assert reasons(call()) == ["it needs a GPU, the tensors are on cpu"]
    assert "float64 is not supported" in reasons(call(dtype=torch.float64))
    assert "heads wider than 512 are not supported" in reasons(call(K=513))
    assert any("a size is 0" in reason for reason in reasons(call(T=0)))


def test_a_state_is_kept_every_so_many_tokens_of_each_sequence() -> None:
    assert kept(call(T=2 * KEEP + 1, B=5)).shape == (5 * 3 + 2, 3, 4)
    packed = call(T=2 * KEEP + 1, offsets=torch.tensor([0, 1, 2, 2 * KEEP + 1]))
    assert kept(packed).shape[0] >= 1 + 1 + 2 and kept(packed).dtype == torch.float32
