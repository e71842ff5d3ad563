"""torch's flash, cuDNN and efficient kernels on CUDA, behind the contract of aten.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from foci.core.device import platform
from foci.core.ledger import Use, vetoes
from foci.ops.softmax.call import Call

# Shapes are checked on the meta device; the numbers need a GPU (docs/softmax.md says which one has seen them).
_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


class _CudaKernel:
    """What the three have in common: widths in eights, keys repeated for grouped heads, the ledger consulted."""

    name = ""
    dtypes: tuple[torch.dtype, ...] = _HALF
    widest = 256
    takes_mask = False

    def reasons(self, call: Call) -> list[str]:
        found = []
        masked = call.bias is not None or call.dense is not None
        if call.q.dtype not in self.dtypes:
            found.append(f"{str(call.q.dtype).removeprefix('torch.')} is not supported")
        # A gradient of lse rides along as one more column of v.
        if max(call.q.shape[-1], call.v.shape[-1] + 1) > self.widest:
            found.append(f"heads wider than {self.widest} are not supported")
        if masked and not self.takes_mask:
            found.append("a bias or dense mask is not supported")
        _, T, S, _, G, _, _ = call.sizes
        if not self.takes_mask and _causal_beyond_squares(call):
            found.append("top-left causal needs as many queries as keys")
        use = Use(
            T, S, G, tensor_mask=masked, causal=call.causal_start or call.causal_end, gradients=_differentiated(call)
        )
        return found + vetoes(self.name, use, platform(call.q.device))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        width = q.shape[-1]
        q, k, v = _in_eights(q), _expand(_in_eights(k), q), _expand(_in_eights(v), q)
        out, lse = self._forward(q, k, v, _readable(mask, q, k), causal, scale)
        # efficient pads lse to 32 rows and cuDNN adds a dimension: one shape, [B, H, T], for all.
        return out[..., :width], lse.reshape(*q.shape[:2], -1)[..., : q.shape[2]]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        width, groups = q.shape[-1], k.shape[1]
        dout, q, k, v, out = (_in_eights(x) for x in (dout, q, k, v, out))
        k, v = _expand(k, q), _expand(v, q)
        dq, dk, dv = self._backward(dout, q, k, v, out, lse.contiguous(), _readable(mask, q, k), causal, scale)
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
        return dq[..., :width], dk[..., :width], dv[..., :width]

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        raise NotImplementedError


class FlashOnCuda(_CudaKernel):
    """FlashAttention-2 as torch builds it. arXiv 2307.08691"""

    name = "flash"

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        seed, offset = _no_dropout(q)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset, scale=scale
        )
        return dq, dk, dv


class Cudnn(_CudaKernel):
    """cuDNN's fused attention."""

    name = "cudnn"
    widest = 128

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        seed, offset = _no_dropout(q)
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse[..., None], seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
            scale=scale,
        )  # fmt: skip
        return dq, dk, dv


class Efficient(_CudaKernel):
    """torch's memory-efficient attention, from xFormers. arXiv 2112.05682"""

    name = "efficient"
    dtypes = (torch.float32, *_HALF)
    takes_mask = True

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        seed, offset = _no_dropout(q)
        padded = pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        # In half precision the kernel makes delta itself, and walks out as [B, T, H, D] whatever its strides say.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        wanted = [True, True, True, False]
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, mask, out, padded, seed, offset, 0.0, wanted, causal, scale=scale
        )
        return dq, dk, dv


# Flash first: cuDNN's record in the ledger is the longest. Which is fastest is measured when a GPU is at hand.
CUDA_KERNELS = (FlashOnCuda(), Cudnn(), Efficient())


def _differentiated(call: Call) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call)


def _causal_beyond_squares(call: Call) -> bool:
    """Whether a causal piece may have other than as many keys as queries: flash would align it bottom-right."""
    _, T, S, *_ = call.sizes
    unequal = T != S or call.kv_lengths is not None or call.q_offsets is not call.kv_offsets
    # A single query at the end sees every key: that is no causal piece.
    return unequal and (call.causal_start or (call.causal_end and T > 1))


def _in_eights(x: Tensor) -> Tensor:
    spare = -x.shape[-1] % 8
    return pad(x, (0, spare)) if spare else x


def _expand(x: Tensor, q: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _readable(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask as the kernel reads it: q's dtype, expanded to [B, H, T, S], rows starting at multiples of eight."""
    if mask is None:
        return None
    mask = mask.to(q.dtype)
    if mask.shape[-1] == 1:
        mask = mask.expand(*mask.shape[:-1], k.shape[2])
    spare = -mask.shape[-1] % 8
    mask = pad(mask, (0, spare))[..., : k.shape[2]] if spare else mask.contiguous()
    return mask.expand(*q.shape[:3], k.shape[2])


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The random state that the backward wants to see, and without dropout never reads."""
    return q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64)
