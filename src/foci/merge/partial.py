"""Partial(out, lse): softmax over a part of the keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some of the keys: out [..., V] and its natural-log lse [...], -inf if none of them is seen.

    Two parts over disjoint keys combine exactly, in any order, differentiably:
    lse = log(exp lse_a + exp lse_b);  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b   (arXiv 2205.14135)
    The sum is computed in lse's dtype, so lse should be float32, and out keeps the first part's: of many parts in half
    precision make the first one's float32, or each merge rounds once more. Parts of different shapes raise ValueError,
    as does an lse that is not out's shape without V; what is no Partial raises TypeError.
    """

    out: Tensor
    lse: Tensor

    def combine(self, later: Partial) -> Partial:
        if not isinstance(later, Partial):
            raise TypeError(f"Partial: a part is of type {type(later).__name__}; expected a foci.Partial, as before it")
        if self.lse.shape != self.out.shape[:-1]:  # it would be broadcast, and weigh other rows
            raise ValueError(
                f"Partial: lse has shape {list(self.lse.shape)} with out {list(self.out.shape)}; expected "
                f"{list(self.out.shape[:-1])}"
            )
        if later.out.shape != self.out.shape or later.lse.shape != self.lse.shape:
            raise ValueError(
                f"Partial: a part has out {list(later.out.shape)} and lse {list(later.lse.shape)}; expected "
                f"{list(self.out.shape)} and {list(self.lse.shape)}, the shapes of the part before"
            )
        top = torch.maximum(self.lse, later.lse).detach()
        empty = top == -torch.inf
        top = torch.where(empty, 0.0, top)  # -inf + inf would be NaN, and so would its gradient
        ours, theirs = torch.exp(self.lse - top), torch.exp(later.lse - top)
        total = torch.where(empty, 1.0, ours + theirs)
        lse = torch.where(empty, -torch.inf, top + torch.log(total))
        # The weights come from the sum itself: exp(lse_a - lse) would carry the rounding of lse, 3e-5 at lse = 800.
        out = (ours / total)[..., None] * self._seen(lse.dtype) + (theirs / total)[..., None] * later._seen(lse.dtype)
        return Partial(out.to(self.out.dtype), lse)

    def _seen(self, dtype: torch.dtype) -> Tensor:
        """out, 0 in rows that see nothing, whatever stands there: NaN times 0 is none."""
        return torch.where((self.lse == -torch.inf)[..., None], 0.0, self.out.to(dtype))

    def neutral(self) -> Partial:
        return Partial(torch.zeros_like(self.out), torch.full_like(self.lse, -torch.inf))


def absorb(out: Tensor, lse: Tensor, part: Tensor, top: Tensor, mass: Tensor | None = None) -> None:
    """Merge a part over other keys into a running Partial (out, lse), in place and without a gradient.

    Without `mass`, (part, top) is an (out, lse) pair. With it, `part` and `mass` are unnormalised sums relative to
    exp(top), top being the largest logit (-inf: nothing seen). `lse` should be float64, so that merging many parts adds
    no rounding.
    """
    highest = torch.maximum(lse, top)
    empty = highest == -torch.inf
    highest.masked_fill_(empty, 0.0)
    ours, theirs = torch.exp(lse - highest), torch.exp(top - highest)
    total = ours + (theirs if mass is None else theirs * mass)
    total.masked_fill_(empty, 1.0)
    out.mul_((ours / total).to(out.dtype)[..., None]).addcmul_(part, (theirs / total).to(part.dtype)[..., None])
    lse.copy_(highest.add_(total.log_()).masked_fill_(empty, -torch.inf))
