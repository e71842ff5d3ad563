"""Dense attention in float64, literally, for the peers' conventions: the oracle of the compat tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, bias: Tensor | None = None,
    scale: float | None = None, softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B,T,H,V], lse [B,H,T] of q [B,T,H,D], k [B,S,G,D], v [B,S,G,V]; bias and allowed broadcast to [B,H,T,S]."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    z = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    if bias is not None:
        z = z + bias.double()
    if allowed is not None:
        z = z.masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(z, -1)
    p = torch.exp(z - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return torch.einsum("bhts,bshv->bthv", p, v), lse


def band(T: int, S: int, left: int = -1, right: int = -1, top_left: bool = False) -> Tensor:
    """[T, S]: True where key j may be seen by query i, which stands at i + S - T (or at i); -1 is open."""
    allowed = torch.zeros(T, S, dtype=torch.bool)
    for i in range(T):
        for j in range(S):
            place = i if top_left else i + S - T
            allowed[i, j] = (left < 0 or j >= place - left) and (right < 0 or j <= place + right)
    return allowed


def same_gradients(mine: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...], tolerance: float = 1e-9) -> None:
    """The gradients of one random loss on both, by every input."""
    pull = torch.randn_like(theirs)
    found = torch.autograd.grad((mine.double() * pull).sum(), inputs, retain_graph=True)
    wanted = torch.autograd.grad((theirs * pull).sum(), inputs, retain_graph=True)
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


def parameters(function: Callable[..., Any]) -> str:
    """The parameters of a function, as a peer's are recorded: names, defaults and the star, without annotations."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(bare))
