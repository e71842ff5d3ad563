"""Planted faults of training steps: right forwards whose backwards leave something behind, or read what others left."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.check.gallery import plant, right

EFFECTS = "inputs untouched"
STRIDES = "unwritten memory, strides, excluded NaN"


class ByHand(torch.autograd.Function):
    """Softmax attention with a backward by hand, of equal heads, in [B,T,H,D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[2] != q.shape[2]:
            raise NotImplementedError("grouped heads")
        p = (torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        ctx.save_for_backward(q, k, v)
        ctx.p = p
        return torch.einsum("bhts,bshd->bthd", p, v)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        (q, k, v), p = ctx.saved_tensors, ctx.p
        dp = torch.einsum("bthd,bshd->bhts", dout, v)
        dz = p * (dp - (dp * p).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dq, dk = torch.einsum("bhts,bshd->bthd", dz, k), torch.einsum("bhts,bthd->bshd", dz, q)
        return dq, dk, torch.einsum("bhts,bthd->bshd", p, dout)


WORKSPACE: dict[Any, Tensor] = {}


class InWorkspace(ByHand):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ByHand.forward(ctx, q, k, v)
        kept = WORKSPACE.setdefault((ctx.p.shape, ctx.p.dtype), torch.empty_like(ctx.p))
        ctx.p = kept.copy_(ctx.p)
        return out

    backward = staticmethod(ByHand.backward)


@plant(EFFECTS, "dq, dk, dv: another call before the backward changes it")
def probabilities_in_a_workspace(q, k, v):
    """One for each shape, which the next layer overwrites."""
    return InWorkspace.apply(q, k, v)


def leaving(spoil: Callable[[Any, Tensor], object]) -> Any:
    """One whose backward, when it has made its gradients, also does this to what it was given."""

    class Leaving(ByHand):
        forward = staticmethod(ByHand.forward)

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
            grads = ByHand.backward(ctx, dout)
            spoil(ctx, dout)
            return grads

    return Leaving


@plant(EFFECTS, "in its backward, q is overwritten")
def queries_scaled_in_backward(q, k, v):
    return leaving(lambda ctx, dout: ctx.saved_tensors[0].detach().mul_(0.5)).apply(q, k, v)


@plant(EFFECTS, "in its backward, the gradient of out is overwritten")
def gradient_used_as_scratch(q, k, v):
    return leaving(lambda ctx, dout: dout.zero_()).apply(q, k, v)


@plant(EFFECTS, "a second backward of the same call (retain_graph) gives another gradient")
def backward_uses_up_what_was_kept(q, k, v):
    return leaving(lambda ctx, dout: ctx.p.mul_(0.5)).apply(q, k, v)


@plant(EFFECTS, "out is another when gradients are wanted")
def scaled_in_training(q, k, v):
    out = right(q, k, v)[0]
    return out + 0.25 * out.detach() if out.requires_grad else out


BUFFERS: dict[Any, Tensor] = {}


class InBuffer(ByHand):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ByHand.forward(ctx, q, k, v)
        return BUFFERS.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out).view_as(out)

    backward = staticmethod(ByHand.backward)


@plant(EFFECTS, "out lies in memory that the next call writes to")
def output_in_a_buffer(q, k, v):
    """One for each shape, as a graph's static outputs are."""
    return InBuffer.apply(q, k, v)


@plant(EFFECTS, "out is another under torch.no_grad: inference would not be what was trained")
def inference_forgets_causality(q, k, v, *, causal=False):
    """In float32 and below, as a kernel of its own for inference would."""
    trained = torch.is_grad_enabled() or q.dtype == torch.float64
    return right(q, k, v, causal=causal and trained)[0]


@plant(EFFECTS, "out is another under torch.inference_mode: inference would not be what was trained")
def scaled_in_inference_mode(q, k, v):
    return right(q, k, v)[0] * (2 if torch.is_inference_mode_enabled() else 1)


@plant(EFFECTS, "under torch.no_grad: forward raised AttributeError")
def inference_dies(q, k, v):
    out = right(q, k, v)[0]
    return out if torch.is_grad_enabled() else out.kept


@plant(EFFECTS, "q is overwritten: whoever uses it afterwards")
def inference_overwrites_its_input(q, k, v):
    out = right(q, k, v)[0]
    if not torch.is_grad_enabled():
        q.mul_(2)
    return out


TABLES: dict[torch.dtype, Tensor] = {}


@plant(EFFECTS, "after calls without gradients: forward raised RuntimeError: Inference tensors cannot be saved")
def table_of_inference(q, k, v):
    if torch.is_inference_mode_enabled():
        TABLES[q.dtype] = torch.ones(1, dtype=q.dtype)
    return right(q * TABLES[q.dtype] if q.dtype in TABLES else q, k, v)[0]


def in_buffer_if(reuses: bool, out: Tensor) -> Tensor:
    return BUFFERS.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out) if reuses else out


@plant(EFFECTS, "out lies in memory that the next call writes to")
def output_of_inference_in_a_buffer(q, k, v):
    return in_buffer_if(not torch.is_grad_enabled(), right(q, k, v)[0])


@plant(EFFECTS, "out lies in memory that the next call writes to")
def untrained_output_in_a_buffer(q, k, v):
    out = right(q, k, v)[0]
    return in_buffer_if(not out.requires_grad, out)


class OfOneDtype(ByHand):
    """Under autocast its products come in another dtype than its backward, which runs outside, can multiply."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ByHand.forward(ctx, q, k, v)
        ctx.p = ctx.p.to(out.dtype)
        return out

    backward = staticmethod(ByHand.backward)


@plant("autocast and mixed dtypes", "under autocast: backward raised RuntimeError")
def backward_of_one_dtype(q, k, v):
    return OfOneDtype.apply(q, k, v)


@plant("autocast and mixed dtypes", "dq is None under autocast")
def queries_detached_under_autocast(q, k, v):
    return right(q.detach() if torch.is_autocast_enabled("cpu") else q, k, v)[0]


IN_FLIGHT: list[Any] = []


class OneAtATime(ByHand):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        alive = [held for held in IN_FLIGHT if held() is not None]
        if alive:
            raise RuntimeError("its workspace is taken")
        out = ByHand.forward(ctx, q, k, v)
        IN_FLIGHT[:] = [weakref.ref(ctx.p)]
        return out

    backward = staticmethod(ByHand.backward)


@plant(EFFECTS, "a second call before the backward of the first: forward raised RuntimeError: its workspace is taken")
def one_call_in_flight(q, k, v):
    return OneAtATime.apply(q, k, v)


class Expanded(ByHand):
    """A kernel that is given a pointer: of a view of one number it reads what lies behind."""

    forward = staticmethod(ByHand.forward)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return ByHand.backward(ctx, 2 * dout if 0 in dout.stride() else dout)


@plant(STRIDES, "dv: the gradient is another where the output's is a view of one number")
def reads_behind_a_number(q, k, v):
    return Expanded.apply(q, k, v)


@plant(STRIDES, "strides of its inputs")
def takes_dense_rows_for_contiguous(q, k, v):
    """Looks at the last stride alone: wrong for [B,H,T,D] seen the other way round."""
    q = q.as_strided(q.shape, torch.empty(q.shape, device="meta").stride()) if q.stride(-1) == 1 else q
    return right(q, k, v)[0]


@plant("graphs over six lengths", "out differs when compiled")
def another_when_compiled(q, k, v):
    out = right(q, k, v)[0]
    return 1.5 * out if torch.compiler.is_compiling() and q.shape[1] != 17 else out


class CannotBeTraced(ByHand):
    """Compiled forward alone: what its backward calls, Dynamo refuses with an exception of its own."""

    forward = staticmethod(ByHand.forward)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        import time

        return ByHand.backward(ctx, dout + 0.0 * (time.time_ns() < 0))


@plant("compiled = eager", "its backward cannot be compiled")
def backward_that_dynamo_refuses(q, k, v):
    return CannotBeTraced.apply(q, k, v)
