"""yunchang's ring functions, and the autograd Function behind each, which refuses half a subclass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foci.compat.flash_attn.arguments import unpack
from foci.compat.yunchang.arguments import AttnType, Options, attend, check_kernel
from foci.ops.arguments import switch
from foci.parallel.balance import Order
from foci.parallel.nested_graph import NestedGraph, once_differentiable
from foci.parallel.ring import ring

Attended = Tensor | tuple[Tensor, Tensor, None]
_DIFFERENTIABLE = (0, 1, 2, 8)  # q, k, v and alibi_slopes among the arguments of apply
_COUNT = 14


class RingFunction(torch.autograd.Function):
    """A pair of forward and backward that know each other: neither can be replaced alone.

    A subclass that overrides `forward` alone would run a backward that counts other arguments and reads what another
    forward saved: wrong gradients at best. It is refused where it is defined, with TypeError.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = [name for name in ("forward", "backward") if name in vars(cls)]
        if len(own) == 1:
            base, other = cls.__mro__[1].__name__, "backward" if own == ["forward"] else "forward"
            raise TypeError(
                f"{cls.__name__} overrides {own[0]} of {base} and keeps its {other}, which belongs to another "
                f"{own[0]} and reads what that saved: gradients would be wrong or missing; "
                f"override both, or call {base}.apply from a function of your own"
            )


class RingFlashAttnFunc(RingFunction):
    """apply(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    return_softmax, group, attn_type, attn_processor) over plain runs: out, or (out, lse [B,H,T], None)."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> Any:
        return _forward(ctx, "plain", values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _backward(ctx, grads)


class ZigZagRingFlashAttnFunc(RingFunction):
    """RingFlashAttnFunc in zigzag order."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> Any:
        return _forward(ctx, "zigzag", values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _backward(ctx, grads)


class StripeFlashAttnFunc(RingFunction):
    """RingFlashAttnFunc in striped order."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> Any:
        return _forward(ctx, "stripe", values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _backward(ctx, grads)


def _forward(ctx: Any, order: Order, values: tuple[Any, ...]) -> Any:
    if len(values) != _COUNT:
        raise TypeError(f"yunchang: apply takes {_COUNT} arguments, q to attn_processor, got {len(values)}")
    q, k, v, dropout_p, scale, causal, window_size, softcap, slopes, deterministic, softmax, group, kind, own = values
    check_kernel(kind, own)
    softmax = switch("yunchang", "return_attn_probs", softmax)
    options = Options(dropout_p, scale, causal, window_size, softcap, deterministic)
    given = [q, k, v] if slopes is None else [q, k, v, slopes]
    needs = [ctx.needs_input_grad[place] for place in _DIFFERENTIABLE[: len(given)]]

    def compute(tensors: Any) -> tuple[Tensor, ...]:
        a, b, c = tensors[:3]
        every = (a, b, c, tensors[3] if len(tensors) > 3 else None)
        return attend(lambda op: ring(op, _group(group), order), every, options, lse=softmax)

    ctx.inside = NestedGraph() if any(needs) else None
    if ctx.inside is None:
        outputs = compute(given)
    else:
        outputs = ctx.inside.run(compute, given, needs)
        ctx.save_for_backward(q.new_empty(0), *ctx.inside.take_saved())
    return (*outputs, None) if softmax else outputs[0]


def _backward(ctx: Any, grads: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    found = iter(ctx.inside.gradients(grads[: len(ctx.inside.outputs)], ctx.saved_tensors[1:]))
    places = [place for place in _DIFFERENTIABLE if ctx.needs_input_grad[place]]
    gradients: list[Tensor | None] = [None] * _COUNT
    for place in places:
        gradients[place] = next(found)
    return tuple(gradients)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The ring; None is every rank, as in yunchang."""
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise RuntimeError(
            "yunchang: no process group; call torch.distributed.init_process_group first, or give group="
        )
    return found


_RING = """Softmax attention over a ring of ranks that hold runs of tokens: `foci.parallel.ring`, yunchang's signature.

q [B,T,H,D], k, v [B,T,G,D] of this rank -> out [B,T,H,D], or with return_attn_probs (out, lse [B,H,T], None); the
lse is natural, and differentiable. Any lengths; H a multiple of G; every floating dtype.
causal and window_size (left, right; -1 is open) go by the place in the whole sequence, never by that in a block.
softcap <= 0 is none. alibi_slopes [H] or [B,H]: -slope |t - s|, also by place, after the cap; differentiable; it
takes O(T S) memory for this rank's T. dropout_p drops what one process with rank 0's generator would. All of it
holds in the backward too, as does `deterministic` (which on a GPU asks for kernels without atomics).
group: None is all ranks. attn_type: any exact kernel means foci's choice; those that approximate raise Unsupported.

Raises ShapeError, ValueError, TypeError or Unsupported naming the argument; Disagreement, RankError as `ring` does.
"""


def _apart(function: type[RingFunction]) -> Callable[..., Attended]:
    def func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
        attn_type: AttnType = AttnType.FA,
        attn_processor: object | None = None,
    ) -> Attended:
        return _apply(
            function, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, group, attn_type, attn_processor,
        )  # fmt: skip

    return func


def _kv_packed(function: type[RingFunction]) -> Callable[..., Attended]:
    def kvpacked_func(
        q: Tensor,
        kv: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
        attn_type: AttnType = AttnType.FA,
        attn_processor: object | None = None,
    ) -> Attended:
        k, v = unpack("kv", kv, 2, 2)
        return _apply(
            function, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, group, attn_type, attn_processor,
        )  # fmt: skip

    return kvpacked_func


def _qkv_packed(function: type[RingFunction]) -> Callable[..., Attended]:
    def qkvpacked_func(
        qkv: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: dist.ProcessGroup | None = None,
        attn_type: AttnType = AttnType.FA,
        attn_processor: object | None = None,
    ) -> Attended:
        q, k, v = unpack("qkv", qkv, 2, 3)
        return _apply(
            function, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, group, attn_type, attn_processor,
        )  # fmt: skip

    return qkvpacked_func


def _family(function: type[RingFunction], name: str, meaning: str) -> tuple[Callable[..., Attended], ...]:
    """`<name>_func`, `<name>_kvpacked_func` and `<name>_qkvpacked_func` over one order of tokens."""
    meanings = (meaning, f"`{name}_func` with kv [B,T,2,G,D].", f"`{name}_func` with qkv [B,T,3,H,D].")
    family = _apart(function), _kv_packed(function), _qkv_packed(function)
    for each, text in zip(family, meanings, strict=True):
        each.__doc__ = text
        each.__name__ = each.__qualname__ = f"{name}_{each.__name__}"
    return family


@torch.compiler.disable
def _apply(function: type[RingFunction], *values: Any) -> Attended:
    attended: Attended = function.apply(*values)
    return attended


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _family(
    RingFlashAttnFunc, "ring_flash_attn", _RING
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _family(
    ZigZagRingFlashAttnFunc,
    "zigzag_ring_flash_attn",
    "`ring_flash_attn_func` where ranks hold tokens in zigzag order; causal or not.",
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _family(
    StripeFlashAttnFunc,
    "stripe_flash_attn",
    "`ring_flash_attn_func` where rank r holds tokens r, r + n, r + 2 n ...; causal or not.",
)

RING_IMPL_DICT = {
    "basic": ring_flash_attn_func,
    "zigzag": zigzag_ring_flash_attn_func,
    "strip": stripe_flash_attn_func,
}
RING_IMPL_QKVPACKED_DICT = {
    "basic": ring_flash_attn_qkvpacked_func,
    "zigzag": zigzag_ring_flash_attn_qkvpacked_func,
    "strip": stripe_flash_attn_qkvpacked_func,
}
