"""The Triton kernel that puts a gradient of lse into `out`: what torch's own does, interpreted or on a GPU."""

from __future__ import annotations

import pytest
import torch

from foci.check.memory import poisoned
from foci.core.tune import interpreting
from foci.ops.softmax import kernels_triton_dlse
from foci.ops.softmax.aten_cuda import _folded, fold
from tests.ops.in_triton import DEVICE
from tests.ops.softmax.in_out import InOut


class TestFold(InOut):
    fold = staticmethod(kernels_triton_dlse.fold)
    device = DEVICE


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [3, 17, 128])
def test_it_writes_all_that_torch_does(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dout, out = (torch.randn(2, 33, 3, width, device=DEVICE).to(dtype) for _ in range(2))
    dlse, lse = torch.randn(2, 2, 33, 3, device=DEVICE).unbind()
    with poisoned():
        pulls, shares = kernels_triton_dlse.fold(dlse, lse, dout, out)
    right = _folded(dlse, lse, dout, out)
    assert pulls.equal(right[0])
    assert (shares != 0).sum(-1).le(3).all() and shares.isfinite().all()


def test_heads_may_lie_further_apart_than_32_bits_tell() -> None:
    """Memory that is touched at a few places only."""
    T, H, V, dtype = 2, 18, 8, torch.float16
    far = torch.empty(((H - 1) << 27) + T * V, dtype=dtype, device=DEVICE).as_strided((1, T, H, V), (1, V, 1 << 27, 1))
    near, out = torch.randn(1, T, H, V, device=DEVICE).to(dtype), torch.randn(1, T, H, V, device=DEVICE).to(dtype)
    lse = torch.randn(1, T, H, device=DEVICE)
    found = kernels_triton_dlse.fold(lse, lse, far.copy_(near), out)
    assert all(x.equal(y) for x, y in zip(found, kernels_triton_dlse.fold(lse, lse, near, out), strict=True))


@pytest.mark.skipif(not interpreting(), reason="which kernel computes is asked of tensors of the CPU")
def test_it_is_asked_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(kernels_triton_dlse, "fold", lambda *given: asked.append(given) or given[2:])
    for dtype, times in ((torch.float16, 1), (torch.float64, 1), (torch.bfloat16, 1)):
        x, lse = torch.randn(1, 2, 1, 9).to(dtype), torch.randn(1, 2, 1)
        fold(lse, lse, x, x)
        assert len(asked) == times, dtype
    fold(lse[:, :0], lse[:, :0], x[:, :0], x[:, :0])
    assert len(asked) == 1
