"""Planted faults: small attentions as people write them, each wrong in one way, and what the checker must say of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.check.run import Limits
from foci.ops.masks import Lengths, Mask


@dataclass(frozen=True)
class Plant:
    """A wrong callable, the law that must break, and words that its sentence must hold."""

    name: str
    function: Callable[..., Any]
    law: str
    words: str
    options: dict[str, Any] = field(default_factory=dict)


GALLERY: list[Plant] = []


def plant(law: str, words: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        GALLERY.append(Plant(function.__name__, function, law, words, options))
        return function

    return register


def right(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The one that is right: [B, T, H, D], plain torch, out and lse."""
    T, S, H = q.shape[1], k.shape[1], q.shape[2]
    kind = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(H // k.shape[2], 2) for x in (k, v))
    z = torch.einsum("bthd,bshd->bhts", q.to(kind), k.to(kind)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if bias is not None:
        z = z + bias
    if causal:
        z = z.masked_fill(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1 + S - T), -torch.inf)
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf)
    if sink is not None:
        z = torch.cat([z, sink.to(kind)[:, None, None].expand(*z.shape[:3], 1)], -1)
    empty = (z == -torch.inf).all(-1, keepdim=True)
    lse = z.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
    out = torch.einsum("bhts,bshd->bthd", torch.exp(z - lse)[..., :S], v.to(kind)).to(v.dtype)
    return out, lse.masked_fill(empty, -torch.inf)[..., 0].transpose(1, 2)


@plant("forward", "scale is off by +0.10%")
def scale_off(q, k, v, *, mask=None, causal=False):
    return right(q, k, v, mask=mask, causal=causal, scale=1.001 * q.shape[-1] ** -0.5)


@plant("forward", "out is wrong, worst by")
def bias_clamped(q, k, v, *, bias=None):
    """Against overflow; but a bias of -inf is how many programs mask."""
    return right(q, k, v, bias=None if bias is None else bias.clamp(min=-8.0))[0]


@plant("logarithm", "scale is off by +0.10%")
def scale_off_in_the_lse(q, k, v):
    return right(q, k, v)[0], right(q, k, v, scale=1.001 * q.shape[-1] ** -0.5)[1]


@plant("forward", "scale is off by -16.67%")
def scale_ignored_when_causal(q, k, v, *, causal=False, scale=None):
    return right(q, k, v, causal=causal, scale=None if causal else scale)[0]


@plant("forward", "scale is ignored, K**-0.5 is used instead")
def scale_of_0_taken_for_none(q, k, v, *, scale=None):
    return right(q, k, v, scale=scale or q.shape[-1] ** -0.5)[0]


@plant("forward", "softmax scale is off by -200.00%")
def scale_without_its_sign(q, k, v, *, scale=None):
    return right(q, k, v, scale=None if scale is None else abs(scale))[0]


@plant("logarithm", "lse is all zeros")
def lse_zeros(q, k, v, *, mask=None):
    out, lse = right(q, k, v, mask=mask)
    return out, torch.zeros_like(lse)


@plant("logarithm", "lse is in log2")
def lse_in_log2(q, k, v, *, mask=None):
    out, lse = right(q, k, v, mask=mask)
    return out, lse * math.log2(math.e)


@plant("logarithm", "row that sees nothing is 0 where -inf is right")
def empty_row_lse_zero(q, k, v, *, mask=None):
    out, lse = right(q, k, v, mask=mask)
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


@plant("forward", "aligned top-left")
def causal_top_left(q, k, v, *, causal=False):
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril() if causal else None
    return right(q, k, v, mask=mask)[0]


KEPT: dict[int, Tensor] = {}


@plant("forward", "causal is ignored, it attends to the future")
def mask_kept_by_queries_alone(q, k, v, *, causal=False):
    """Made once for each number of queries; a shorter cache takes what a longer one's mask begins with."""
    T, S = q.shape[1], k.shape[1]
    mask = KEPT.setdefault(T, torch.ones(T, S, dtype=torch.bool).tril(S - T))[:, :S] if causal else None
    return right(q, k, v, mask=mask)[0]


@plant("gradients", "NaN or infinity", dtypes=(torch.float16,))
def product_in_half_before_the_scale(q, k, v, *, mask=None, scale=None):
    """q k is rounded to q's dtype, as F.softmax(q @ k.mT * scale) does, and overflows there where no logit does."""
    if q.dtype is not torch.float16:
        return right(q, k, v, mask=mask, scale=scale)[0]
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    z = torch.einsum("bthd,bshd->bhts", q.float(), keys.float()).half().float()
    z = z * (q.shape[-1] ** -0.5 if scale is None else scale)
    z = z if mask is None else z.masked_fill(~mask, -torch.inf)
    p = z.softmax(-1).nan_to_num() if mask is not None else z.softmax(-1)
    return torch.einsum("bhts,bshd->bthd", p, values.float()).to(v.dtype)


@plant("forward", "causal is off by one and shows")
def causal_one_too_far(q, k, v, *, is_causal=False):
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(1) if is_causal else None
    return right(q, k, v, mask=mask)[0]


@plant("forward", "the mask is ignored when causal is also given")
def mask_ignored_when_causal(q, k, v, *, attn_mask=None, is_causal=False):
    return right(q, k, v, causal=is_causal, mask=None if is_causal else attn_mask)


@plant("forward", "causal is ignored when a mask is also given")
def causal_ignored_when_masked(q, k, v, *, attn_mask=None, is_causal=False):
    return right(q, k, v, causal=is_causal and attn_mask is None, mask=attn_mask)


@plant("forward", "attends to the future")
def no_mask_means_bidirectional(q, k, v, *, mask=None, is_causal=False):
    """Causal only through the mask, as of the callers who always build one: without one it looks ahead."""
    return right(q, k, v, mask=mask)


@plant("forward", "padding is ignored")
def padding_ignored(q, k, v, *, mask=None):
    keys_only = mask is not None and torch.equal(mask, mask[:, :, :1].expand_as(mask)) and mask.shape[1] == 1
    return right(q, k, v, mask=None if keys_only else mask)


@plant("forward", "mask is ignored")
def mask_ignored(q, k, v, *, mask=None):
    return right(q, k, v)


@plant("forward", "query head h reads key head h % G")
def heads_interleaved(q, k, v):
    repeats = q.shape[2] // k.shape[2]
    return right(q, k.repeat(1, 1, repeats, 1), v.repeat(1, 1, repeats, 1))


@plant("forward", "softcap is ignored")
def softcap_ignored(q, k, v, *, softcap=None):
    return right(q, k, v)


@plant("forward", "out is wrong")
def bias_under_the_cap(q, k, v, *, bias=None, softcap=None):
    """Alone each is right."""
    if bias is None or softcap is None:
        return right(q, k, v, bias=bias, softcap=softcap)[0]
    z = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5 + bias
    return torch.einsum("bhts,bshd->bthd", (softcap * torch.tanh(z / softcap)).softmax(-1), v)


@plant("forward", "bias is ignored")
def bias_ignored(q, k, v, *, bias=None):
    return right(q, k, v)


@plant("forward", "sink is ignored")
def sink_ignored(q, k, v, *, sink=None):
    return right(q, k, v)


@plant("forward", "sink is ignored")
def sink_ignored_when_causal(q, k, v, *, causal=False, sinks=None):
    return right(q, k, v, causal=causal, sink=None if causal else sinks)[0]


@plant("forward", "out is wrong")
def sink_under_the_cap(q, k, v, *, softcap=None, sink=None):
    capped = sink if sink is None or softcap is None else softcap * torch.tanh(sink / softcap)
    return right(q, k, v, softcap=softcap, sink=capped)[0]


@plant("forward", "the window is ignored")
def window_ignored(q, k, v, *, causal=False, window_size=(-1, -1)):
    return right(q, k, v, causal=causal)[0]


@plant("forward", "the window is aligned top-left")
def window_top_left(q, k, v, *, causal=False, window_size=(-1, -1)):
    """Right where T = S, as in training; over cached keys the window stands elsewhere than the causal mask."""
    i, j, left = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1]), window_size[0]
    near = j >= i - left if left >= 0 else j >= 0 * i
    return right(q, k, v, causal=causal, mask=near if window_size[1] < 0 else near & (j <= i + window_size[1]))[0]


@plant("forward", "a key too narrow")
def window_one_short(q, k, v, *, causal=False, window_size=(-1, -1)):
    T = torch.arange(q.shape[1])
    left = window_size[0] - 1 if window_size[0] > 0 else 10**6
    right_ = window_size[1] if window_size[1] >= 0 else 10**6
    distance = T[:, None] - T
    mask = (distance <= left) & (-distance <= right_) if q.shape[1] == k.shape[1] else None
    return right(q, k, v, mask=mask, causal=causal)


@plant("forward", "averages all values where 0 is right")
def empty_row_averaged(q, k, v, *, mask=None):
    z = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * q.shape[-1] ** -0.5
    z = z if mask is None else z.masked_fill(~mask, torch.finfo(z.dtype).min)
    return torch.einsum("bhts,bshd->bthd", z.softmax(-1), v.repeat_interleave(q.shape[2] // v.shape[2], 2))


@plant("forward", "it returns a tuple of 1 where one tensor is expected")
def one_tuple(q, k, v):
    return (right(q, k, v)[0],)


@plant("forward", "it returns a tuple of 3")
def wrong_arity(q, k, v):
    out, lse = right(q, k, v)
    return out, lse, None


@plant("forward", "the same numbers in another shape")
def heads_not_split(q, k, v):
    return right(q, k, v)[0].flatten(2)


@plant("forward", "tokens and heads are swapped")
def heads_first(q, k, v):
    return right(q, k, v)[0].transpose(1, 2).contiguous()


@plant("any length", "no multiple of its block")
def drops_the_last_block(q, k, v):
    whole = k.shape[1] // 16 * 16 or k.shape[1]
    return right(q, k[:, :whole], v[:, :whole])[0]


@plant("causality", "future tokens leak into out")
def mean_leaks(q, k, v, *, is_causal=False):
    """Centres the values over all tokens before attention: a normalisation over time."""
    out, _ = right(q, k, v - v.mean(1, keepdim=True), causal=is_causal)
    return out + v.mean(1, keepdim=True).repeat_interleave(q.shape[2] // v.shape[2], 2) * 0.999


@plant("batch slot", "tokens of others leak in")
def batch_statistics(q, k, v):
    return right(q / q.detach().abs().amax() * 4, k, v)[0]


@plant("same bits twice", "differs between two equal calls")
def noisy(q, k, v):
    return right(q, k, v)[0] * (1 + 1e-7 * int.from_bytes(__import__("os").urandom(1)))


@plant("inputs untouched", "q is overwritten")
def input_mutated(q, k, v):
    """Scales its queries in place, to save a copy."""
    with torch.no_grad():
        q.mul_(q.shape[-1] ** -0.5)
    return right(q, k, v, scale=1.0)[0]


@plant("inputs untouched", "mask is overwritten")
def mask_mutated(q, k, v, *, mask=None):
    """Opens the rows that see nothing in the caller's own mask."""
    found = right(q, k, v, mask=mask)
    if mask is not None:
        mask |= ~mask.any(-1, keepdim=True)
    return found


@plant("inputs untouched", "mask is overwritten")
def joined_mask_mutated(q, k, v, *, mask: Mask | None = None):
    """The same of a mask of foci's that has several parts."""
    for part in getattr(mask, "parts", ()):
        if isinstance(part, Lengths):
            part.kv_lengths.add_(1)
    return right(q, k, v)


@plant("inputs untouched", "changes the default dtype from torch.float32 to torch.float64 and leaves it so")
def default_dtype_changed(q, k, v):
    """Asks for wide constants, and for all later ones too."""
    torch.set_default_dtype(torch.float64)
    return right(q, k, v)[0]


@plant("inputs untouched", "changes whether gradients are recorded from True to False")
def gradients_switched_off(q, k, v):
    torch.set_grad_enabled(False)
    return right(q, k, v)[0]


@plant("inputs untouched", "it seeds the generator of random numbers")
def seeded(q, k, v):
    """So that its dropout is the same in every run, and all that the program draws afterwards."""
    torch.manual_seed(0)
    return right(q, k, v)[0]


@plant("unwritten memory, strides, excluded NaN", "memory that nobody wrote")
def unwritten_buffer(q, k, v):
    out = torch.empty_like(v[:, :1].expand(-1, q.shape[1], -1, -1)).repeat_interleave(q.shape[2] // v.shape[2], 2)
    good = right(q, k, v)[0]
    return torch.where(torch.isnan(out), out, good)


@plant("unwritten memory, strides, excluded NaN", "strides of its inputs")
def assumes_contiguous(q, k, v):
    q = q.as_strided(q.shape, torch.empty(q.shape, device="meta").stride())
    return right(q, k, v)[0]


class _ReadsPointers(torch.autograd.Function):
    """Its backward takes the gradient of its output for contiguous, as a kernel does that is given a pointer."""

    @staticmethod
    def forward(ctx, q, k, v):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            ctx.graph = leaves, right(*leaves)[0].contiguous()
        return ctx.graph[1].detach()

    @staticmethod
    def backward(ctx, dout):
        leaves, out = ctx.graph
        return torch.autograd.grad(out, leaves, dout.as_strided(out.shape, out.stride()), retain_graph=True)


@plant("unwritten memory, strides, excluded NaN", "the strides of an input or of the output's gradient")
def takes_dout_for_contiguous(q, k, v):
    return _ReadsPointers.apply(q, k, v)


@plant("gradients", "dk is None when k alone wants one")
def looks_at_q_for_gradients(q, k, v):
    """Fast path without a graph, taken too when only k and v train."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and q.requires_grad):
        return right(q, k, v)[0]


@plant("forward", "out holds NaN or infinity")
def no_maximum_subtracted(q, k, v):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    e = torch.exp(torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5)
    return torch.einsum("bhts,bshd->bthd", e / e.sum(-1, keepdim=True), v)


@plant("forward", "scale is off by")
def scale_of_one_width(q, k, v):
    """Takes only equal widths, and knows the scale of one."""
    if q.shape[-1] != v.shape[-1]:
        raise NotImplementedError("V != K")
    return right(q, k, v, scale=0.25)[0]


@plant("autocast and mixed dtypes", "under autocast")
def crashes_under_autocast(q, k, v):
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError("expected scalar type Float but found BFloat16")
    return right(q, k, v)[0]


@plant("shapes and dtypes", "out is float32 where bfloat16 is expected")
def upcast(q, k, v):
    return right(q.float(), k.float(), v.float())[0]


@plant("bad input", "answered with a number")
def broadcasts_anything(q, k, v):
    width = min(q.shape[-1], k.shape[-1])
    return right(q[..., :width], k[..., :width], v, scale=q.shape[-1] ** -0.5)[0]


class _Dropped(torch.autograd.Function):
    """dLSE never reaches the inputs."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return right(q, k, v)

    @staticmethod
    def backward(ctx, dout, dlse):
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return torch.autograd.grad(right(*inputs)[0], inputs, dout)


@plant("gradients through the logarithm", "the gradient through lse is dropped")
def dlse_dropped(q, k, v):
    return _Dropped.apply(q, k, v)


def _function(spoil: Callable[[list[Tensor]], Any]) -> Any:
    """An autograd.Function whose backward is right but for `spoil` of its gradients."""

    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return right(q, k, v)[0]

        @staticmethod
        def backward(ctx, dout):
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                return spoil(list(torch.autograd.grad(right(*inputs)[0], inputs, dout)))

    return Spoiled


@plant("gradients", "dq is None when q.requires_grad")
def gradient_none(q, k, v):
    return _function(lambda g: (None, g[1], g[2])).apply(q, k, v)


@plant("gradients", "dk holds the gradient of v")
def gradient_in_the_wrong_slot(q, k, v):
    return _function(lambda g: (g[0], g[2], g[1]) if g[1].shape == g[2].shape else tuple(g)).apply(q, k, v)


@plant("gradients", "dq is 2 times the right one")
def gradient_doubled(q, k, v):
    return _function(lambda g: (2 * g[0], g[1], g[2])).apply(q, k, v)


@plant("gradients", "backward returns 2 gradients where forward takes 3")
def too_few_gradients(q, k, v):
    return _function(lambda g: (g[0], g[1])).apply(q, k, v)


class _Base(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        ctx.softcap = None
        return right(q, k, v)[0]

    @staticmethod
    def backward(ctx, dout):
        softcap = ctx.softcap
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return torch.autograd.grad(right(*inputs, softcap=softcap)[0], inputs, dout)


class _Inherits(_Base):
    """Overrides forward, inherits a backward that reads what this forward never saves."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return right(q, k, v)[0]


@plant("gradients", "backward reads `softcap`, which its forward never saved")
def forward_saves_less(q, k, v):
    return _Inherits.apply(q, k, v)


@plant("gradients", "no gradient reaches any input")
def numpy_path(q, k, v):
    arrays = [x.detach().double().numpy() for x in (q, k, v)]
    return right(*(torch.from_numpy(a) for a in arrays))[0].to(q.dtype)


@plant("gradients", "no gradient reaches any input")
def detached(q, k, v):
    with torch.no_grad():
        return right(q, k, v)[0]


@plant("gradcheck", "numerical and analytical gradients differ")
def gradient_half(q, k, v):
    return _function(lambda g: (g[0], g[1], 0.5 * g[2])).apply(q, k, v)


@torch.library.custom_op("gallery::lying", mutates_args=())
def _lying(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return right(q, k, v)[0]


@_lying.register_fake
def _(q, k, v):
    return q.new_empty((*q.shape[:3], v.shape[-1]), dtype=torch.bfloat16)


@plant("fake tensors", "the fake says out has dtype bfloat16, really it is float32")
def fake_dtype(q, k, v):
    return _lying(q, k, v)


@plant("custom ops", "opcheck of gallery.lying")
def fake_dtype_seen_by_opcheck(q, k, v):
    return _lying(q, k, v)


class _Counts:
    """A processor that counts its steps in Python, as caching and scheduling tricks do."""

    step = 0

    def __call__(self, q, k, v):
        self.step += 1
        return right(q, k, v)[0] if self.step != 10**9 else q


@plant("compiled = eager", "equal calls compile")
def step_counter(q, k, v):
    return _COUNTS(q, k, v)


_COUNTS = _Counts()


@plant("graphs over six lengths", "graphs over 3 lengths")
def reads_lengths(q, k, v):
    """A branch on the number of tokens for every multiple of eight: a table of tuned launches."""
    block = {n: n for n in range(0, 512, 8)}[q.shape[1] // 8 * 8]
    return right(q, k, v)[0] + 0 * block


@plant("forward", "killed the interpreter (SIGSEGV)")
def crashes(q, k, v):
    if q.shape[1] == 131:
        import ctypes

        ctypes.string_at(0)
    return right(q, k, v)[0]


@plant("forward", "gave no answer", limits=Limits(silence=2.0))
def hangs(q, k, v):
    if q.shape[1] == 131:
        __import__("time").sleep(60)
    return right(q, k, v)[0]


@plant("forward", "is 1.01 times the right one")
def output_scaled(q, k, v):
    return right(q, k, v)[0] * 1.01


@plant("forward", "NaN or infinity")
def empty_row_nan(q, k, v, *, mask=None):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=None).transpose(1, 2) + (
        0 if mask is None else torch.where(mask.any(-1), 0.0, torch.nan).transpose(1, 2)[..., None]
    )
