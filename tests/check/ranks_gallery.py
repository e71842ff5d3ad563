"""Planted faults of parallel attention: a ring as people write it, wrong in one way each, and what is said of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Plant:
    """A wrong parallel function, the law that must break at a world, and words that its sentence must hold."""

    name: str
    function: Callable[..., Any]
    law: str
    words: tuple[str, ...]
    world: int = 3
    order: str = "plain"
    hidden: int | None = None  # a world at which it passes
    cases: tuple[str, ...] = ()  # those that show it; all by default
    hangs: bool = False


GALLERY: list[Plant] = []


def plant(law: str, *words: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        GALLERY.append(Plant(function.__name__, function, law, words, **options))
        return function

    return register


def rotate(tensors: list[Tensor], step: int, group: Any) -> list[Tensor]:
    """Every tensor from the rank `step` before this one; unequal sizes are not allowed."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if step % size == 0:
        return tensors
    received = [torch.empty_like(tensor) for tensor in tensors]
    ops = [dist.P2POp(dist.isend, t.contiguous(), (rank + step) % size, group) for t in tensors]
    ops += [dist.P2POp(dist.irecv, t, (rank - step) % size, group) for t in received]
    for handle in dist.batch_isend_irecv(ops):
        handle.wait()
    return received


def agree(tensor: Tensor, group: Any) -> None:
    """An error on every rank where the shards are not alike, as careful people raise it."""
    sizes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(sizes, tuple(tensor.shape), group)
    if len(set(sizes)) > 1:
        raise ValueError(f"shards must be alike, got {sizes}")


@dataclass(frozen=True)
class Ring:
    """A ring attention [B, T, H, D] with a causal mask and a window by positions, in its right form; faults override.

    Forward: the block of keys moves one rank on at each step; outputs are merged by lse in float32. Backward: the block
    and its gradients travel the same way, once round.
    """

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    back: int = 1  # which way gradients travel in the backward
    local: bool = False  # positions within the block
    local_window: bool = False
    zero_lse: bool = False
    cast: bool = False
    dropout: float = 0.0
    seed_by_rank: bool = False

    def allowed(self, rank: int, block: int, T: int, S: int, size: int) -> Tensor:
        t, s = torch.arange(T)[:, None], torch.arange(S)
        t0, s0 = (0, 0) if self.local else (rank * T + (S - T) * size, block * S)  # the last query sees the last key
        seen = (s + s0 <= t + t0) if self.causal else torch.ones(T, S, dtype=torch.bool)
        if self.local_window:
            t0, s0 = 0, 0
        left, right = self.window
        if left >= 0:
            seen = seen & (s + s0 >= t + t0 - left)
        if right >= 0:
            seen = seen & (s + s0 <= t + t0 + right)
        return seen

    def kept(self, rank: int, block: int, B: int, H: int, T: int, S: int, size: int) -> Tensor:
        """1 / (1 - p) where dropout keeps, from one generator for the whole sequence; or from one of each rank."""
        if not self.dropout:
            return torch.ones(())
        generator = torch.Generator().manual_seed(1000 + (rank if self.seed_by_rank else 0))
        if self.seed_by_rank:
            whole = torch.rand(B, H, T, S * size, generator=generator)
        else:
            whole = torch.rand(B, H, T * size, S * size, generator=generator)[:, :, rank * T : (rank + 1) * T]
        return (whole[..., block * S : (block + 1) * S] >= self.dropout).float() / (1 - self.dropout)

    def logits(self, q: Tensor, k: Tensor, rank: int, block: int, size: int) -> Tensor:
        z = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        return z.masked_fill(~self.allowed(rank, block, q.shape[1], k.shape[1], size), -torch.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        (B, T, H, _), S = q.shape, k.shape[1]
        kind = torch.promote_types(q.dtype, torch.float32)
        q, k, v = (x.to(kind) for x in (q, k, v))
        out, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -torch.inf)
        for step in range(size):
            block = (rank - step) % size
            z = self.logits(q, k, rank, block, size)
            if bool((z > -torch.inf).any()):
                part = z.logsumexp(-1)
                p = (z - part.masked_fill(part == -torch.inf, torch.inf)[..., None]).exp()
                p = p * self.kept(rank, block, B, H, T, S, size)
                here, part = torch.einsum("bhts,bshd->bthd", p, v), part.transpose(1, 2)
                if self.zero_lse:
                    part = torch.zeros_like(part)
                total = torch.logaddexp(lse, part)
                safe = total.masked_fill(total == -torch.inf, torch.inf)
                out = out * (lse - safe).exp()[..., None] + here * (part - safe).exp()[..., None]
                lse = total
            k, v = rotate([k, v], 1, group)
        return out, lse

    def backward(self, q, k, v, out, lse, dout, dlse, group: Any) -> tuple[Tensor, Tensor, Tensor]:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        (B, T, H, _), S = q.shape, k.shape[1]
        kind = torch.promote_types(q.dtype, torch.float32)
        q, k, v, dout = (x.to(kind) for x in (q, k, v, dout))
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (dout * out).sum(-1).transpose(1, 2) - dlse.transpose(1, 2)
        safe = lse.transpose(1, 2).masked_fill(lse.transpose(1, 2) == -torch.inf, torch.inf)
        for step in range(size):
            block = (rank - step) % size
            p = (self.logits(q, k, rank, block, size) - safe[..., None]).exp()
            kept = self.kept(rank, block, B, H, T, S, size)
            dp = torch.einsum("bthd,bshd->bhts", dout, v) * kept
            dz = p * (dp - delta[..., None]) * q.shape[-1] ** -0.5
            dq += torch.einsum("bhts,bshd->bthd", dz, k)
            dk += torch.einsum("bhts,bthd->bshd", dz, q)
            dv += torch.einsum("bhts,bthd->bshd", p * kept, dout)
            k, v = rotate([k, v], 1, group)
            dk, dv = rotate([dk, dv], self.back, group)
        return dq.to(torch.bfloat16) if self.cast else dq, dk, dv


class RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring, group):
        out, lse = ring.forward(q, k, v, group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.group = ring, group
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, *_ = ctx.saved_tensors
        grads = ctx.ring.backward(*ctx.saved_tensors, dout, dlse, ctx.group)
        return *(g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None, None


def run(q, k, v, group, **options) -> tuple[Tensor, Tensor]:
    agree(q, group)
    return RingFunction.apply(q, k, v, Ring(**options), group)


def right_bhtd(q, k, v, *, is_causal=False, group):
    return run(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), group, causal=is_causal)[0].transpose(1, 2)


def writes_to_k(q, k, v, *, group):
    with torch.no_grad():
        k.mul_(2)
    return run(q, k / 2, v, group)[0]


def takes_mesh_and_order(q, k, v, *, mesh, order):
    return q * (mesh.size() + (order == "stripe"))


def right(q, k, v, *, causal=False, window=(-1, -1), group):
    return run(q, k, v, group, causal=causal, window=window)


@plant(
    "gradients",
    "dk is wrong on every rank at positions 0..23",
    "rotated the wrong way in the backward",
    hidden=2,
    cases=("plain", "causal"),
)
def rotated_the_wrong_way(q, k, v, *, causal=False, group):
    return run(q, k, v, group, causal=causal, back=-1)


@plant("forward", "out is wrong on", "causal went by positions within the block", cases=("causal",))
def local_mask(q, k, v, *, causal=False, group):
    return run(q, k, v, group, causal=causal, local=True)


@plant("forward", "out is wrong on", "the window went by positions within the block", cases=("window", "causal window"))
def local_window(q, k, v, *, causal=False, window=(-1, -1), group):
    return run(q, k, v, group, causal=causal, window=window, local_window=True)


@plant("forward", "out is wrong on every rank at positions 0..23", "lse were zeros", cases=("plain", "causal"))
def lse_zeros(q, k, v, *, group):
    return run(q, k, v, group, zero_lse=True)[0]


@plant("gradients", "dq is wrong on every rank", "only numbers of bfloat16", cases=("plain", "causal"))
def dq_cast_to_bf16(q, k, v, *, group):
    return run(q, k, v, group, cast=True)


@plant("forward", "wrong rank order", cases=("plain", "causal"))
def wrong_rank_order(q, k, v, *, causal=False, process_group):
    """Gathers, and puts the blocks together as if they began at this rank."""
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    agree(q, process_group)
    k, v = (torch.cat(gathered(x, process_group), 1) for x in (k, v))
    k, v = (x.roll(-(x.shape[1] // size), 1) for x in (k, v))
    first = rank * q.shape[1] + k.shape[1] - q.shape[1] * size
    return attend(q, k, v, causal, first)


def exchanged(x: Tensor, group: Any, to_heads: bool, mine: int | None = None) -> Tensor:
    """[B, T/P, H, D] -> [B, T, H/P, D], or back, by a differentiable all-to-all."""
    size = dist.get_world_size(group)
    cut, joined = (2, 1) if to_heads else (1, 2)
    parts = torch.stack(x.chunk(size, cut))
    return torch.cat(list(AllToAll.apply(parts, group)), joined)


class AllToAll(torch.autograd.Function):
    """[ranks, ...]: part r goes to rank r; its gradient comes back the same way."""

    @staticmethod
    def forward(ctx, parts, group):
        ctx.group = group
        parts = parts.contiguous()
        got = torch.empty_like(parts)
        dist.all_to_all_single(got, parts, group=group)
        return got

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group), None


class Gather(torch.autograd.Function):
    """Every rank's x [ranks, ...] on every rank; the gradient of a rank's own is the sum over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


def gathered(x: Tensor, group: Any) -> list[Tensor]:
    return list(Gather.apply(x, group))


class Replicated(torch.autograd.Function):
    """What every rank has whole; its gradient is added up over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, first: int = 0) -> Tensor:
    """In one process; under causal the first query stands at this key."""
    z = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if causal:
        z = z.masked_fill(torch.ones(z.shape[-2:], dtype=torch.bool).triu(1 + first), -torch.inf)
    return torch.einsum("bhts,bshd->bthd", z.softmax(-1), v)


def right_ulysses(q, k, v, *, causal=False, group=None):
    if q.shape[2] % dist.get_world_size(group) or q.shape != k.shape:
        raise ValueError("heads must divide by the ranks, k must be like q")
    agree(q, group)
    q, k, v = (exchanged(x, group, True) for x in (q, k, v))
    return exchanged(attend(q, k, v, causal), group, False)


@plant("gradients", "dk is wrong on every rank", "not rotated in the backward", cases=("plain", "causal"))
def not_rotated(q, k, v, *, causal=False, group):
    return run(q, k, v, group, causal=causal, back=0)


@plant("forward", "as if the shards were in plain order, which they are not", order="zigzag", cases=("plain", "causal"))
def plain_positions_of_zigzag(q, k, v, *, causal=False, group):
    return run(q, k, v, group, causal=causal)


@plant("dropout over ranks", "rank-dependent dropout", "1 rank and at 3", cases=("plain", "causal"))
def dropout_from_a_seed_of_the_rank(q, k, v, *, dropout_p=0.0, group):
    return run(q, k, v, group, dropout=dropout_p, seed_by_rank=True)


@plant("dropout over ranks", "drop alike", cases=("plain", "causal"))
def dropout_that_repeats(q, k, v, *, dropout_p=0.0, group):
    """Every rank drops from the same stream, where its own rows are."""
    agree(q, group)
    k, v = (torch.cat(gathered(x, group), 1) for x in (k, v))
    p = (torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", torch.nn.functional.dropout(p, dropout_p), v)


def right_dropout(q, k, v, *, dropout_p=0.0, group):
    return run(q, k, v, group, dropout=dropout_p)


def right_joint(q, k, v, text_q, text_k, text_v, *, group):
    text_q, text_k, text_v = (Replicated.apply(x, group) for x in (text_q, text_k, text_v))
    return joint(q, k, v, text_q, text_k, text_v, group)


def joint(q, k, v, text_q, text_k, text_v, group) -> tuple[Tensor, Tensor]:
    agree(q, group)
    k, v = (torch.cat([text, *gathered(x, group)], 1) for x, text in ((k, text_k), (v, text_v)))
    return attend(q, k, v), attend(text_q, k, v)


@plant(
    "gradients",
    "dk is wrong in the text that all ranks share at positions 0..5",
    "an all-reduce is missing",
    cases=("plain", "cross"),
)
def text_gradient_not_reduced(q, k, v, text_q, text_k, text_v, *, group):
    return joint(q, k, v, Replicated.apply(text_q, group), text_k, text_v, group)


@plant("forward", "as if the text counted once for every rank", cases=("plain", "cross"))
def text_counted_by_every_rank(q, k, v, text_q, text_k, text_v, *, group):
    agree(q, group)
    texts = [[x] * dist.get_world_size(group) for x in (text_k, text_v)]
    k, v = (torch.cat([*text, *gathered(x, group)], 1) for x, text in ((k, texts[0]), (v, texts[1])))
    return attend(q, k, v), attend(text_q, k, v)


@plant("gradients", "dsink is wrong on every rank", "an all-reduce is missing", cases=("sink",))
def sink_gradient_not_reduced(q, k, v, *, sink=None, group):
    agree(q, group)
    if q.shape[2] != k.shape[2]:
        raise ValueError("k must have the heads of q")
    k, v = (torch.cat(gathered(x, group), 1) for x in (k, v))
    z = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if sink is not None:
        z = torch.cat([z, sink[:, None, None].expand(*z.shape[:3], 1)], -1)
    return torch.einsum("bhts,bshd->bthd", z.softmax(-1)[..., : k.shape[1]], v)


class OnlyForward(RingFunction):
    """Someone's subclass, with an argument more and no backward of its own."""

    @staticmethod
    def forward(ctx, q, k, v, ring, group, softcap):
        return RingFunction.forward(ctx, q, k, v, ring, group)


@plant(
    "gradients",
    "OnlyForward overrides forward of RingFunction and not its backward",
    "5 gradients",
    world=2,
    cases=("plain", "causal"),
)
def subclass_overrides_forward_alone(q, k, v, *, causal=False, group):
    agree(q, group)
    return OnlyForward.apply(q, k, v, Ring(causal=causal), group, None)


@plant("forward", "rank 1 died", "SIGABRT", cases=("plain", "causal"))
def dies(q, k, v, *, group):
    if dist.get_rank(group) == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    return run(q, k, v, group)


@plant("forward", "rank 1 raised ValueError: only here", "ranks 0, 2 waited", cases=("plain", "causal"), hangs=True)
def raises_on_one_rank(q, k, v, *, group):
    if dist.get_rank(group) == 1:
        raise ValueError("only here")
    return run(q, k, v, group)


@plant("forward", "it hangs", cases=("plain", "causal"), hangs=True)
def hangs(q, k, v, *, group):
    """One rank sends in another order than the others receive."""
    if dist.get_rank(group) == 1:
        dist.barrier(group)
    return run(q, k, v, group)


@plant("forward", "in head", "own keys alone", cases=("plain", "heads the ranks do not share"))
def head_silently_local(q, k, v, *, causal=False):
    """One head more than the ranks share: it attends to what is here."""
    size = dist.get_world_size()
    extra = q.shape[2] % size
    if q.shape != k.shape:
        raise ValueError("k must be like q")
    agree(q, None)
    shared = q.shape[2] - extra
    out = right_ulysses(*(x[:, :, :shared] for x in (q, k, v)), causal=causal)
    return torch.cat([out, attend(*(x[:, :, shared:] for x in (q, k, v)), causal)], 2)


def ones_if_recorded(q, k, v):
    return torch.ones_like(q) * torch.is_grad_enabled()
