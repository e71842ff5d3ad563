"""Partial(out, lse): softmax over a part of the keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some of the keys: out [..., V] and its natural-log lse [...], -inf where none of them was seen.

    Two parts over disjoint keys combine exactly, in any order, differentiably:
    lse = log(exp lse_a + exp lse_b);  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b   (arXiv 2205.14135)
    The sum is kept in lse's dtype (float32 at least) and out keeps its own.
    """

    out: Tensor
    lse: Tensor

    def combine(self, later: Partial) -> Partial:
        lse = _logaddexp(self.lse, later.lse)
        out = _weigh(self, lse) + _weigh(later, lse)
        return Partial(out.to(self.out.dtype), lse)

    def neutral(self) -> Partial:
        return Partial(torch.zeros_like(self.out), torch.full_like(self.lse, -torch.inf))


def _weigh(part: Partial, lse: Tensor) -> Tensor:
    # Where the whole row is empty both lse are -inf: a finite stand-in keeps -inf + inf, and its gradient, out.
    seen = part.lse != -torch.inf
    weight = torch.exp(torch.where(seen, part.lse, 0.0) - torch.where(seen, lse, 0.0))
    return torch.where(seen, weight, 0.0)[..., None] * part.out.to(lse.dtype)


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    # torch.logaddexp gives a NaN gradient where both are -inf.
    top = torch.maximum(a, b)
    both_empty = top == -torch.inf
    safe = torch.where(both_empty, 0.0, top).detach()
    total = torch.exp(a - safe) + torch.exp(b - safe)
    return torch.where(both_empty, -torch.inf, safe + torch.log(torch.where(both_empty, 1.0, total)))
