"""torch's flash, cuDNN and efficient kernels on CUDA, behind the contract of aten.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from foci.core.device import constant, installed, platform
from foci.core.ledger import Use, vetoes
from foci.core.plans import replay_or_run
from foci.ops.arguments import short
from foci.ops.gpu import unsuitable
from foci.ops.softmax.call import DESCENDING, Call

# Shapes are checked on the meta device; the numbers need a GPU (docs/softmax.md says which one has seen them).
_aten = torch.ops.aten  # forwards are called as torch's own functions: the same op, 1 us cheaper
_HALF = (torch.bfloat16, torch.float16)
_LITTLE, _SHORT = 1 << 30, 2048  # multiply-adds and tokens that take a GPU only some microseconds
_FAR = 1 << 30  # rows that 32-bit indices can address


class _CudaKernel:
    """Shared by the three: padding of widths to multiples of eight, and the ledger's vetoes.

    `grouped`: it supports grouped-query attention. `quick`: it has a low launch overhead.
    """

    name = ""
    quick = False
    dtypes: tuple[torch.dtype, ...] = _HALF
    takes_mask = False
    grouped = True

    def widest(self, device: torch.device) -> int:
        return 256

    def refused(self, call: Call) -> list[str]:
        """Reasons specific to this kernel."""
        return []

    def reasons(self, call: Call, gradients: bool = False) -> list[str]:
        found = self.refused(call)
        masked = call.bias is not None or call.dense is not None
        if call.q.dtype not in self.dtypes:
            found.append(f"{short(call.q.dtype)} is not supported")
        widest = self.widest(call.q.device)
        # A gradient of lse may ride along as one more column of v.
        if max(call.q.shape[-1], call.v.shape[-1] + int(not folds_dlse(call))) > widest:
            found.append(f"heads wider than {widest} are not supported")
        if masked and not self.takes_mask:
            found.append("a bias or dense mask is not supported")
        elif call.bias is not None and call.q.dtype in _HALF and call.bias.dtype != call.q.dtype:
            found.append(f"a bias of {short(call.bias.dtype)} would be rounded to {short(call.q.dtype)}")
        B, T, S, H, G, _, _ = call.sizes
        if not B * H:
            found.append("there are no heads of any row")
        if not call.ascending:
            found.append(DESCENDING)
        if not self.takes_mask and _causal_beyond_squares(call):
            found.append("top-left causal needs as many queries as keys")
        gradients = gradients or differentiated(call)
        use = Use(T, S, G, tensor_mask=masked, causal=call.causal_start or call.causal_end, gradients=gradients)
        return found + vetoes(self.name, use, platform(call.q.device))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        *rows, width = q.shape
        if width % 8:
            q, k, v = (_padded_width(x) for x in (q, k, v))
        k, v = self._heads(k, q), self._heads(v, q)
        out, lse = self._forward(q, k, v, _readable(mask, q, k), causal, scale)
        # efficient pads lse to 32 rows and cuDNN adds a dimension: one shape, [B, H, T], for all.
        return _narrow(out, width), lse.as_strided_(rows, lse.stride()[:3])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        width, groups = q.shape[-1], k.shape[1]
        if width % 8:
            dout, q, k, v, out = (_padded_width(x) for x in (dout, q, k, v, out))
        k, v = self._heads(k, q), self._heads(v, q)
        lse = lse.contiguous().unsqueeze(-1)
        dq, dk, dv = self._backward(dout, q, k, v, out, lse, _readable(mask, q, k), causal, scale)
        if dk.shape[1] != groups:
            dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
        return _narrow(dq, width), _narrow(dk, width), _narrow(dv, width)

    def unchecked(self, call: Call, causal: bool) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        """Forward and backward for calls with this bare call's cache key, without checks; None if tensors need changes.

        lse [B,T,H] keeps the kernel's memory layout, [B,H,T], so that neither copies it.
        """
        if not self._usable(call):
            return None
        return partial(self._unchecked_forward, causal, call.scale), partial(
            self._unchecked_backward, causal, call.scale
        )

    def torch_op(self, call: Call, causal: bool) -> Callable[..., tuple[Tensor]] | None:
        """A function from q, k and v to (out,) for the same calls, differentiable by torch's own op; None as above.

        lse is computed only for gradients. With heads before tokens in memory, torch would save its own out beside
        ours: that is accepted only for small calls.
        """
        trains = differentiated(call)
        twice = trains and call.q.stride(1) < call.q.stride(2) and not little(call)
        return partial(self._torch_op, causal, call.scale, trains) if self._usable(call) and not twice else None

    def _usable(self, call: Call) -> bool:
        q, k, v = call[:3]
        taken = self.grouped or q.shape[2] == k.shape[2]
        return not q.shape[-1] % 8 and taken and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1

    def _torch_op(self, causal: bool, scale: float, trains: bool, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, _ = self._forward(q, k, v, None, causal, scale, trains)
        return ((out.transpose(1, 2) if trains else out.transpose_(1, 2)).contiguous(),)

    def _unchecked_forward(self, causal: bool, scale: float, values: Sequence[Any]) -> tuple[Tensor, Tensor]:
        q, k, v = values[:3]
        out, lse = self._forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, causal, scale)
        by_row, by_head, by_query, *_ = lse.stride()
        lse.as_strided_(q.shape[:3], (by_row, by_query, by_head))
        return out.transpose_(1, 2).contiguous(), lse

    def _unchecked_backward(
        self, causal: bool, scale: float, values: Sequence[Any], outputs: Sequence[Tensor], dout: Tensor,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        out, lse = outputs
        (B, T, H), (by_row, by_query, by_head) = lse.shape, lse.stride()
        lse = lse.as_strided((B, H, T, 1), (by_row, by_head, by_query, 1))
        do, q, k, v, o = [unit_stride(x).transpose(1, 2) for x in (dout, *values[:3], out)]
        found = self._backward(do, q, k, v, o, lse.contiguous(), None, causal, scale)
        whole = (x.transpose_(1, 2).contiguous() if need else None for x, need in zip(found, needs, strict=False))
        return *whole, None, None

    def _heads(self, x: Tensor, q: Tensor) -> Tensor:
        """Keys or values, repeated for each query head if the kernel does not support grouped heads."""
        return x if self.grouped or x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool = True
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
    quick = True

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        out, top, *_ = torch._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, top

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        seed, offset = _no_dropout(q)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.squeeze(-1), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset,
            scale=scale,
        )  # fmt: skip
        return dq, dk, dv


class Cudnn(_CudaKernel):
    """cuDNN's fused attention.

    torch caches a plan of its backward by the layouts of q, k and v, but builds it for the layouts of out and dout of
    the first call as well: a dout of another layout is then read out of bounds. So these two always get the same layout
    here, tokens before heads; for torch's own op, whose dout comes from autograd, a hook does that. torch also does not
    check the alignment of addresses.
    """

    name = "cudnn"

    def torch_op(self, call: Call, causal: bool) -> Callable[..., tuple[Tensor]] | None:
        by_row, by_query, by_head, _ = call.q.stride()
        plain = by_row >= by_query >= by_head > 0  # torch's out, which it saves, gets the same layout
        return super().torch_op(call, causal) if plain or not differentiated(call) else None

    def _usable(self, call: Call) -> bool:
        return super()._usable(call) and all(_aligned(x) is x for x in call[:3])

    def _torch_op(self, causal: bool, scale: float, trains: bool, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        (out,) = super()._torch_op(causal, scale, trains, q, k, v)
        if out.requires_grad:
            out.register_hook(_contiguous_aligned)
        return (out,)

    def refused(self, call: Call) -> list[str]:
        found = [] if _has_cudnn(call.q.device) else ["this torch has no cuDNN"]
        if call.q.shape[1] == 1:  # with a single key besides, its gradient ends the process
            found.append("its log-sum-exp of a single query differs from call to call")
        return found

    def widest(self, device: torch.device) -> int:
        return _width_of_cudnn(device)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        q, k, v = map(_aligned, (q, k, v))
        out, top, *_ = torch._scaled_dot_product_cudnn_attention(q, k, v, None, lse, 0.0, causal, False, scale=scale)
        return out, top

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        seed, offset = _no_dropout(q)
        dout, out = (_contiguous_aligned(x.transpose(1, 2)).transpose(1, 2) for x in (dout, out))
        q, k, v = map(_aligned, (q, k, v))
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
            scale=scale,
        )  # fmt: skip
        return dq, dk, dv


class Efficient(_CudaKernel):
    """torch's memory-efficient attention, from xFormers. arXiv 2112.05682"""

    name = "efficient"
    dtypes = (torch.float32, *_HALF)
    takes_mask = True
    grouped = False

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        out, top, *_ = torch._scaled_dot_product_efficient_attention(q, k, v, mask, lse, 0.0, causal, scale=scale)
        return out, top

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: Tensor | None, causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        seed, offset = _no_dropout(q)
        lse, spare = lse.squeeze(-1), -lse.shape[2] % 32
        padded = pad(lse, (0, spare), value=torch.inf) if spare else lse
        # In half precision the kernel computes delta itself, and reads out as contiguous [B, T, H, D] in any case.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        wanted = [True, True, True, False]
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, mask, out, padded, seed, offset, 0.0, wanted, causal, scale=scale
        )
        return dq, dk, dv


CUDA_KERNELS = (Cudnn(), FlashOnCuda(), Efficient())
_FLASH_FIRST = (CUDA_KERNELS[1], CUDA_KERNELS[0], CUDA_KERNELS[2])


def cuda_kernels(device: torch.device) -> tuple[_CudaKernel, ...]:
    """The kernels, fastest first: from Hopper on cuDNN, by a factor of two (docs/benchmarks.md)."""
    return CUDA_KERNELS if _cudnn_first(device) else _FLASH_FIRST


@constant
def _cudnn_first(device: torch.device) -> bool:
    return platform(device).capability >= (9, 0)


@constant
def _has_cudnn(device: torch.device) -> bool:
    return bool(platform(device).cudnn and platform(device).cuda)


@constant
def _width_of_cudnn(device: torch.device) -> int:
    """The same limit as torch's (sdp_utils.cpp): wider heads on Hopper since cuDNN 9.5.1."""
    place = platform(device)
    return 256 if place.capability == (9, 0) and place.cudnn >= (9, 5, 1) else 128


def slow(call: Call) -> bool:
    """Whether Triton's kernels are faster than these: for small calls, masks, or few queries.

    Small calls are bound by the host, where ours have less overhead. Only `efficient` takes a mask. For few queries
    cuDNN is as fast, but spends 40 ms on a plan whenever the cache's length changes, and flash does not split keys over
    the GPU; their backwards take six times as long (docs/benchmarks.md). In float32 `efficient` is slower on Hopper for
    heads of up to 64, and its dq is not deterministic.
    """
    masked = call.bias is not None or call.dense is not None
    if call.q.dtype not in _HALF:
        fast = max(call.sizes[5:]) <= 64 and platform(call.q.device).capability == (9, 0)
        return fast and call.q.dtype == torch.float32 and call.q.shape[1] > 16 and not masked and not little(call)
    if little(call) or masked:
        return True
    return call.few if differentiated(call) else call.q.shape[1] <= 16


def little(call: Call) -> bool:
    """Whether the call is so small that host overhead exceeds the GPU's time."""
    B, T, S, H, _, K, V = call.sizes
    return max(T, S) <= _SHORT and B * H * T * S * (K + V) <= _LITTLE


def folds_dlse(call: Call) -> bool:
    """Whether a gradient of lse is folded into `out` instead of passed as a column: three bfloat16 numbers hold it."""
    return call.q.dtype == torch.bfloat16 and call.q.device.type != "cpu" and call.v.shape[-1] > 2


def fold(dlse: Tensor, lse: Tensor, dout: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """(dout, out) [B,T,H,V] changed so that delta = sum(dout * out) is smaller by dlse [B,T,H]; out has no other use.

    Where dlse is not 0, and lse not -inf, out becomes 0 except for three elements, at the largest dout of each third:
    each holds the rounding error of those before it. If a third of dout is below 2^-40 of its row, or 2^-64, its first
    element is set to that bound, too small to affect dv.
    """
    given = dlse, lse, dout, out
    takes = out.dtype in _HALF and lse.numel() < _FAR and installed("triton")
    if not takes or unsuitable(out, out.shape, out.shape[-1:]):
        return _folded(*given)
    from foci.ops.softmax import kernels_triton_dlse as kernels

    folded: tuple[Tensor, Tensor] = replay_or_run(kernels.fold, given, lambda: kernels.fold(*given))
    return folded


def _folded(dlse: Tensor, lse: Tensor, dout: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    moves = ((dlse != 0) & (lse != -torch.inf))[..., None]
    left = (dout.float() * out).sum(-1, keepdim=True) - dlse[..., None]
    least = (_largest(dout) * 2.0**-40).clamp_min(2.0**-64)
    dout, out = dout.clone(), out.masked_fill(moves, 0.0)
    for pulls, shares in zip(dout.tensor_split(3, -1), out.tensor_split(3, -1), strict=True):
        pulls[..., :1] = torch.where(moves & (_largest(pulls) < least), least, pulls[..., :1])
        place = pulls.abs().argmax(-1, keepdim=True)
        pull = pulls.gather(-1, place).float()
        share = (left / torch.where(pull == 0, torch.inf, pull)).to(out.dtype)
        shares.scatter_(-1, place, torch.where(moves, share, shares.gather(-1, place)))
        left = left - share.float() * pull
    return dout, out


def _largest(x: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True)
    return largest


def differentiated(call: Call) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(x is not None and x.requires_grad for x in call[:5])


def _causal_beyond_squares(call: Call) -> bool:
    """Whether a causal piece may have T != S, which flash would align bottom-right."""
    _, T, S, *_ = call.sizes
    unequal = T != S or call.kv_lengths is not None or call.q_offsets is not call.kv_offsets
    # A single query at the end sees every key: that is no causal piece.
    return unequal and (call.causal_start or (call.causal_end and T > 1))


def unit_stride(x: Tensor) -> Tensor:
    """x with a last stride of 1, which the kernels assume."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous_aligned(x: Tensor) -> Tensor:
    """x contiguous, and aligned to 16 bytes."""
    return _aligned(x.contiguous())


def _aligned(x: Tensor) -> Tensor:
    """x aligned to 16 bytes; batched tensors (vmap, `is_grads_batched`) have no storage: torch copies them anyway."""
    return x if not torch._C._has_storage(x) or x.data_ptr() % 16 == 0 else x.clone()


def _padded_width(x: Tensor) -> Tensor:
    spare = -x.shape[-1] % 8
    return pad(x, (0, spare)) if spare else x


def _narrow(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else x[..., :width].detach()  # detach, so that results are not views to autograd


def _readable(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask for the kernel: q's dtype, expanded to [B, H, T, S], with row strides that are multiples of eight."""
    if mask is None:
        return None
    mask = mask.to(q.dtype)
    if mask.shape[-1] == 1:
        mask = mask.expand(*mask.shape[:-1], k.shape[2])
    spare, mask = -mask.shape[-1] % 8, mask.contiguous()  # `pad` would keep a channels-last layout
    mask = pad(mask, (0, spare))[..., : k.shape[2]] if spare else mask
    return mask.expand(*q.shape[:3], k.shape[2])


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """Placeholders for the backward's random state, which it does not read without dropout."""
    nothing = q.new_empty((), dtype=torch.int64)
    return nothing, nothing
