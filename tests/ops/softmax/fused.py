"""Stand-ins for torch's fused kernels, so that CPU tensors of float64 pass for a GPU's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from foci.core import plans, tune
from foci.ops.softmax import aten, aten_cuda
from foci.ops.softmax.aten_cuda import CUDA_KERNELS


def logits(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    z = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT + (0.0 if mask is None else mask)
    return z.masked_fill(~torch.ones(z.shape[-2:], dtype=torch.bool).tril(), -torch.inf) if causal else z


def forth(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What a fused kernel of torch gives: out in the memory order of q, lse [B,H,T]."""
    z = logits(q, k, mask, causal, scale)
    out = z.softmax(-1).nan_to_num() @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.empty_like(q).copy_(out), z.logsumexp(-1)


def back(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert lse.is_contiguous()
    share, (B, G, S, _) = q.shape[1] // k.shape[1], k.shape
    p = (logits(q, k, mask, causal, scale) - lse[..., None]).exp()
    dz = p * (dout @ v.repeat_interleave(share, 1).mT - (dout * out).sum(-1, keepdim=True)) * scale
    dk, dv = (x.reshape(B, G, share, S, -1).sum(2) for x in (dz.mT @ q, p.mT @ dout))
    return dz @ k.repeat_interleave(share, 1), dk, dv


class Op(torch.autograd.Function):
    """A fused kernel of torch to autograd: it saves what it was given and gave, and has no second derivative."""

    @staticmethod
    def forward(q, k, v, mask, causal, scale, with_lse):
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        return forth(q, k, v, mask, causal, scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *saved, ctx.causal, ctx.scale, ctx.with_lse = inputs
        ctx.save_for_backward(*saved, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        assert ctx.with_lse, "no lse was asked for, and a gradient is wanted"
        q, k, v, mask, out, lse = ctx.saved_tensors
        found = back(dout, q, k, v, out, lse.contiguous(), mask, ctx.causal, ctx.scale)
        return *found, None, None, None, None


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From here on; gives which kernels are asked for reasons, and `an lse` where cuDNN is to make one."""
    asked = []

    class Forth:
        @staticmethod
        def cudnn(q, k, v, bias, with_lse, dropout, causal, mask, scale):
            asked.extend(["an lse"] * with_lse)
            out, lse = Op.apply(q, k, v, None, causal, scale, with_lse)
            return out, lse[..., None], None

        @staticmethod
        def flash(q, k, v, dropout, causal, mask, scale):
            return *Op.apply(q, k, v, None, causal, scale, True), None

        @staticmethod
        def efficient(q, k, v, mask, with_lse, dropout, causal, scale):
            assert q.shape[1] == k.shape[1], "it knows nothing of grouped heads"
            out, lse = Op.apply(q, k, v, mask, causal, scale, with_lse)
            return out, pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf), None

        @staticmethod
        def cudnn_back(dout, q, k, v, out, lse, seed, offset, *rest, scale):
            assert lse.shape[-1] == 1 and seed.dtype == offset.dtype == torch.int64
            return back(dout, q, k, v, out, lse[..., 0], None, rest[-1], scale)

        @staticmethod
        def flash_back(dout, q, k, v, out, lse, from_q, from_k, T, S, dropout, causal, seed, offset, scale):
            return back(dout, q, k, v, out, lse, None, causal, scale)

        @staticmethod
        def efficient_back(dout, q, k, v, mask, out, lse, seed, offset, dropout, wanted, causal, scale):
            return *back(dout, q, k, v, out, lse[..., : q.shape[2]].contiguous(), mask, causal, scale), None

    def reasons(self: Any, call: Any, gradients: bool = False, plain: Any = aten_cuda._CudaKernel.reasons) -> list[str]:
        asked.append(self.name)
        found: list[str] = plain(self, call, gradients)
        return found

    backs = {f"_scaled_dot_product_{n.name}_attention_backward": getattr(Forth, f"{n.name}_back") for n in CUDA_KERNELS}
    monkeypatch.setattr(aten_cuda, "_aten", SimpleNamespace(**backs))
    for kernel in CUDA_KERNELS:
        monkeypatch.setattr(torch, f"_scaled_dot_product_{kernel.name}_attention", getattr(Forth, kernel.name))
        monkeypatch.setattr(type(kernel), "dtypes", (torch.float64,))
    monkeypatch.setattr(aten_cuda._CudaKernel, "reasons", reasons)
    monkeypatch.setattr(aten, "_kernels", lambda call: CUDA_KERNELS)
    monkeypatch.setattr(tune, "interpreting", lambda: False)
    monkeypatch.setattr(plans, "_current_device", lambda: -1)
    monkeypatch.setattr(plans, "on_gpu", lambda x: isinstance(x, Tensor))
    for kept in ("_GUARDED", "_OPERATOR_PLANS"):
        monkeypatch.setattr(plans, kept, {})
    return asked


def rows(T: int = 9, H: int = 4, G: int = 2, K: int = 16) -> dict[str, Any]:
    return {n: torch.randn(2, T, h, K, dtype=torch.float64) for n, h in (("q", H), ("k", G), ("v", G))}
