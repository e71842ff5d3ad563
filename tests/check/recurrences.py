"""Planted faults of recurrences: small loops as people write them, each wrong in one way, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Plant:
    """A wrong callable, the operator it claims to be, the law that must break, and words of its sentence."""

    name: str
    function: Callable[..., Any]
    operator: str
    law: str
    words: str


GALLERY: list[Plant] = []


def plant(operator: str, law: str, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        GALLERY.append(Plant(function.__name__, function, operator, law, words))
        return function

    return register


def loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    u: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    late: bool = False,
) -> tuple[Tensor, Tensor]:
    """The one that is right, of both operators: gates [B,T,H] or [B,T,H,K], beta for the delta rule, u for RWKV-6.

    `late`: the decay acts after the write.
    """
    if cu_seqlens is not None:
        parts = []
        for n, (a, b) in enumerate(zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True)):
            cut = [None if x is None else x[:, a:b] for x in (q, k, v, g, beta)]
            state = None if initial_state is None else initial_state[n : n + 1]
            parts.append(loop(*cut, u=u, scale=scale, initial_state=state, late=late))
        return torch.cat([out for out, _ in parts], 1), torch.cat([state for _, state in parts])
    (B, T, H, V), K, kind = v.shape, q.shape[-1], v.dtype
    wide = torch.promote_types(kind, torch.float32)
    q, k = (x.to(wide).repeat_interleave(H // x.shape[2], 2) for x in (q, k))
    v = v.to(wide)
    S = v.new_zeros(B, H, K, V) if initial_state is None else initial_state
    g = v.new_zeros(B, T, H) if g is None else g.to(wide)
    decay = (g if g.dim() == 4 else g[..., None])[..., None].exp()
    u = None if u is None else u.to(wide)
    beta = None if beta is None else beta.to(wide)
    out = []
    for t in range(T):
        before = S
        S = S if late else decay[:, t] * S
        value = v[:, t] if beta is None else beta[:, t, :, None] * (v[:, t] - (S * k[:, t, ..., None]).sum(-2))
        write = k[:, t, ..., None] * value[:, :, None]
        S = decay[:, t] * (S + write) if late else S + write
        read = S if u is None else before + u[..., None] * write
        out.append((K**-0.5 if scale is None else scale) * (read * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1).to(kind) if out else v.to(kind), S.clone()


def right_linear(q, k, v, g=None, u=None, scale=None, initial_state=None, cu_seqlens=None, output_final_state=False):
    out, state = loop(q, k, v, g, None, u, scale, initial_state, cu_seqlens)
    return out, state if output_final_state else None


def right_delta(q, k, v, g=None, beta=None, scale=None, initial_state=None, cu_seqlens=None, output_final_state=False):
    out, state = loop(q, k, v, g, beta, None, scale, initial_state, cu_seqlens)
    return out, state if output_final_state else None


@plant("linear", "forward", "the decay acts after the write")
def decay_after_the_write(q, k, v, g=None):
    return loop(q, k, v, g, late=True)


@plant("linear", "forward", "log_decay is read in base 2")
def decay_in_base_2(q, k, v, g=None):
    return loop(q, k, v, None if g is None else g * math.log(2))


@plant("linear", "forward", "decays by the next one's gate")
def gate_leaks(q, k, v, g=None):
    return loop(q, k, v, None if g is None else torch.cat([g[:, 1:], torch.zeros_like(g[:, :1])], 1))


@plant("linear", "causality", "future tokens leak into out")
def gate_leaks_to_the_past(q, k, v, g=None):
    return loop(q, k, v, None if g is None else torch.cat([g[:, 1:], torch.zeros_like(g[:, :1])], 1))


@plant("linear", "forward", "scale is ignored, K**-0.5 is used instead")
def scale_of_0_taken_for_none(q, k, v, scale=None):
    return loop(q, k, v, scale=scale or q.shape[-1] ** -0.5)


@plant("delta", "forward", "the scale is off by -200.00%")
def scale_without_its_sign(q, k, v, beta, scale=None):
    return loop(q, k, v, None, beta, scale=None if scale is None else abs(scale))


@plant("linear", "forward", "the bonus is ignored")
def bonus_ignored(q, k, v, g=None, u=None):
    return loop(q, k, v, g)


@plant("linear", "forward", "the bonus is added to a state that already holds the token")
def bonus_twice(q, k, v, u=None):
    plain, state = loop(q, k, v)
    if u is None:
        return plain, state
    own = (q * u * k).sum(-1, keepdim=True) if q.shape[2] == u.shape[0] else 0
    return plain + q.shape[-1] ** -0.5 * own * v, state


@plant("linear", "forward", "the order of tokens is ignored")
def causal_ignored(q, k, v):
    H = v.shape[2]
    k, q = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, q))
    state = torch.einsum("bthk,bthv->bhkv", k, v)
    return q.shape[-1] ** -0.5 * torch.einsum("bthk,bhkv->bthv", q, state), state


@plant("linear", "forward", "value head h reads key head h % G")
def heads_interleaved(q, k, v, g=None):
    repeats = v.shape[2] // k.shape[2]
    return loop(q.repeat(1, 1, repeats, 1), k.repeat(1, 1, repeats, 1), v, g)


@plant("linear", "forward", "the output is not scaled")
def unscaled(q, k, v):
    return loop(q, k, v, scale=1.0)


@plant("linear", "forward", "the scale is off by +0.10%")
def scale_off(q, k, v, g=None):
    return loop(q, k, v, g, scale=1.001 * q.shape[-1] ** -0.5)


@plant("delta", "forward", "q is silently normalised")
def q_normalised(q, k, v, beta):
    return loop(F.normalize(q, dim=-1), k, v, None, beta)


@plant("delta", "forward", "k is silently normalised")
def k_normalised(q, k, v, g, beta):
    return loop(q, F.normalize(k, dim=-1), v, g, beta)


@plant("delta", "forward", "offsets are ignored")
def documents_ignored(q, k, v, g, beta, cu_seqlens=None):
    return loop(q, k, v, g, beta)[0]


@plant("delta", "forward", "the initial state is ignored")
def state_ignored(q, k, v, beta, g=None, initial_state=None):
    return loop(q, k, v, g, beta)


@plant("delta", "forward", "the final state comes as [V, K]")
def state_transposed(q, k, v, beta, g=None, output_final_state=False):
    out, state = loop(q, k, v, g, beta)
    return out, state.mT.contiguous() if output_final_state else None


@plant("delta", "forward", "the final state lacks the last token")
def state_without_the_last(q, k, v, beta, g=None):
    shorter = [None if x is None else x[:, :-1] for x in (q, k, v, g, beta)]
    return loop(q, k, v, g, beta)[0], loop(*shorter)[1]


@plant("delta", "forward", "v - S^T k is read from the state before its decay")
def read_undecayed(q, k, v, g, beta):
    out, S = [], v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    for t in range(v.shape[1]):
        error = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, ..., None]).sum(-2))
        S = g[:, t].exp()[..., None, None] * S + k[:, t, ..., None] * error[:, :, None]
        out.append(k.shape[-1] ** -0.5 * (S * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1), S


@plant("delta", "forward", "beta is applied to what is erased, not to the value")
def beta_not_on_the_value(q, k, v, beta):
    return loop(q, k, v / beta[..., None], None, beta)


@plant("delta", "forward", "nothing is erased before the write")
def never_erased(q, k, v, beta):
    return loop(q, k, beta[..., None] * v)


@plant("delta", "forward", "beta is cut at 1")
def beta_at_most_1(q, k, v, g, beta):
    return loop(q, k, v, g, beta.clamp(max=1))


@plant("delta", "cut and merge", "a part that resumes from the state of the one before is not the whole")
def state_begins_anew(q, k, v, g=None, beta=None, initial_state=None):
    return loop(q, k, v, g, beta, initial_state=initial_state if q.shape[1] != 1 else None)


@plant("delta", "packed = separate", "tokens of others leak in")
def borders_a_token_late(q, k, v, g=None, beta=None, cu_seqlens=None):
    if cu_seqlens is not None:
        cu_seqlens = (cu_seqlens + (cu_seqlens > 0)).clamp(max=q.shape[1])
    return loop(q, k, v, g, beta, cu_seqlens=cu_seqlens)


@plant("linear", "causality", "future tokens turn out, dq, dk, dv, dlog_decay of the prefix into NaN")
def masked_after_the_exponential(q, k, v, g):
    c = g.cumsum(1)
    past = torch.ones(q.shape[1], q.shape[1]).tril()[..., None]
    scores = torch.einsum("bthk,bshk->btsh", q, k) * (c[:, :, None] - c[:, None]).exp() * past
    return q.shape[-1] ** -0.5 * torch.einsum("btsh,bshv->bthv", scores, v)


@plant("linear", "extreme gates", "wrong or not finite under extreme gates")
def quotient_of_decays(q, k, v, g):
    """The textbook's parallel form: exp(c_t) / exp(c_s), right until a decay vanishes."""
    c = g.cumsum(1)
    c = c[..., None] if c.dim() == 3 else c
    T = q.shape[1]
    scores = torch.einsum("bthk,bshk->bhts", q * c.exp(), k * (-c).exp()).tril()
    assert v.shape[1] == T
    return q.shape[-1] ** -0.5 * torch.einsum("bhts,bshv->bthv", scores, v)


@plant("linear", "extreme gates", "dlog_decay holds NaN or infinity")
def gradient_of_a_masked_quotient(q, k, v, g):
    """Right in the forward, by a mask after the exponential: its gradient is 0 times infinity."""
    c = g.clamp(min=-1e30).cumsum(1)
    past = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    weight = (c[:, :, None] - c[:, None]).exp()
    if weight.dim() == 4:
        weight = weight[..., None]
    weight = torch.where(past[..., None, None], weight, 0.0)
    scores = torch.einsum("bthk,bshk,btshk->bhts", q, k, weight.expand(*weight.shape[:-1], q.shape[-1]))
    return q.shape[-1] ** -0.5 * torch.einsum("bhts,bshv->bthv", scores, v)


@plant("delta", "any length", "no multiple of its block")
def drops_the_last_block(q, k, v, g=None, beta=None):
    whole = k.shape[1] // 16 * 16 or k.shape[1]
    out, state = loop(*(None if x is None else x[:, :whole] for x in (q, k, v, g, beta)))
    return torch.cat([out, torch.zeros_like(v[:, whole:])], 1), state


class Times(torch.autograd.Function):
    """The identity, whose gradient is so many times what it should be."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad, None


@plant("delta", "any length", "at some lengths: dv is 1.1 times the right one")
def gradient_of_a_second_block(q, k, v, g=None, beta=None):
    return loop(q, k, Times.apply(v, 1.1 if q.shape[1] > 63 else 1.0), g, beta)


class _OutputAlone(torch.autograd.Function):
    """Its backward forgets the output where the state has no gradient."""

    @staticmethod
    def forward(ctx, out, state):
        ctx.set_materialize_grads(False)
        return out.clone(), state.clone()

    @staticmethod
    def backward(ctx, out, state):
        return out if state is not None else None if out is None else 0 * out, state


@plant("delta", "gradients", "is all zeros")
def gradient_only_with_the_state(q, k, v, g=None, beta=None, output_final_state=False):
    return _OutputAlone.apply(*loop(q, k, v, g, beta))
