"""Call: sizes, defaults, and log_decay in its one form whatever its rank."""

from __future__ import annotations

import pytest
import torch

from foci.ops.delta import call
from tests.ops.in_slices import B, G, H, InCall, K, T, V


class TestCall(InCall):
    module = call
    args = (torch.zeros(B, T, G, K), torch.zeros(B, T, G, K), torch.zeros(B, T, H, V), torch.zeros(B, T, H))


def test_erase_keys_are_keys() -> None:
    """A GPU's products take one dtype: erase keys in another were a CompilationError there."""
    q, k, erase = (torch.randn(B, T, G, K) for _ in range(3))
    v, beta = torch.randn(B, T, H, V), torch.rand(B, T, H)
    with pytest.raises(ValueError, match=r"delta_rule: q, k, v, erase have dtypes float32, float32, float32, float16;"):
        call.bind(q, k, v, beta, erase=erase.half())
    with torch.autocast("cpu"):
        found = call.bind(q, k, v, beta, erase=erase)
    assert found.erase is not None and found.erase.dtype == found.k.dtype == torch.bfloat16
    assert call.bind(q, k, v, beta, erase=erase).erase is erase
