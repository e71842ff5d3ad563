"""Decay-weighted products within a chunk by recursive halving: no difference of sums, no quotients, no exp above 1.

For tokens t >= s of one chunk the recurrences need  A[t,s] = sum_c x[t,c] y[s,c] exp(g[s+1,c] + ... + g[t,c]).  A chunk
is split in halves, recursively: for t in the right half of a block and s in its left half the weight is rise[t] *
fall[s], the products of the decays from the block's middle to t, and from s to the middle. Every factor is exp(g) <= 1,
for any g, also -inf, and each weight has the relative precision of a product.

No branch depends on the gates' values, so later tokens cannot change the rounding of earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor


def halves(x: Tensor, m: int, dim: int) -> tuple[Tensor, Tensor]:
    """The left and right halves of every block of 2m tokens: [..., C, ...] -> twice [..., C/2m, m, ...]."""
    blocks = x.unflatten(dim, (-1, 2, m))
    return blocks.select(dim + 1, 0), blocks.select(dim + 1, 1)


class Gates:
    """The decays of M chunks of C tokens (a power of two): log_decay [M, C, D], D = 1 or K.

    `idle`: all decays are 1. rise [M,C,D]: the product from the chunk's start through token t (`own=False`: without t's
    own decay, as RWKV-6's bonus needs). fall [M,C,D]: from after token s to the chunk's end. total [M,D]: of the chunk,
    from the sum of its gates: rounded once. A product of its decays, each rounded to 2^-25, would be off by C times as
    much where gates are constant, and chunk by chunk that adds up: to 6e-5 in float32 over 8192 tokens that remember.
    """

    def __init__(self, log_decay: Tensor, own: bool = True, idle: bool = False) -> None:
        self.own, self.idle = own, idle
        self.decay, self.total = torch.exp(log_decay), torch.exp(log_decay.sum(1))
        self.C, self.D = log_decay.shape[1:]
        self._ends: tuple[Tensor, Tensor] | None = None
        self.weights = self._weights() if self.D == 1 else None

    def levels(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(m, rise from the middle [M,C/2m,m,D], fall to it) for m = 1, 2, .. C/2; at the end `_ends` is set."""
        rise = self.decay.clone() if self.own else torch.ones_like(self.decay)
        fall, total, m = torch.ones_like(self.decay), self.decay, 1
        while m < self.C:
            before, after = halves(fall, m, 1)[0], halves(rise, m, 1)[1]
            yield m, after, before
            left, right = total[:, 0::2], total[:, 1::2]
            after *= left[:, :, None]
            before *= right[:, :, None]
            total, m = left * right, 2 * m
        self._ends = rise, fall

    @property
    def rise(self) -> Tensor:
        return self._computed_ends()[0]

    @property
    def fall(self) -> Tensor:
        return self._computed_ends()[1]

    def risen(self, x: Tensor) -> Tensor:
        """rise * x [M,C,K], in x's dtype."""
        return x if self.idle else (x * self.rise).to(x.dtype)

    def fallen(self, x: Tensor) -> Tensor:
        """fall * x [M,C,K], in x's dtype."""
        return x if self.idle else (x * self.fall).to(x.dtype)

    def _computed_ends(self) -> tuple[Tensor, Tensor]:
        if self._ends is None:
            for _ in self.levels():
                pass
        assert self._ends is not None
        return self._ends

    def _weights(self) -> Tensor:
        weights = self.decay.new_zeros(*self.decay.shape[:2], self.C)
        for m, rise, fall in self.levels():
            torch.mul(rise, fall.transpose(-1, -2), out=_lower(weights, m))
        if self.own:
            weights.diagonal(dim1=1, dim2=2).fill_(1)
        return weights

    def pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """A[t,r,s] [M,C,R,C] of rows x [M,C,R,K], columns y [M,C,K]: zero above the diagonal (on it, without `own`)."""
        M, C, R, _ = x.shape
        if self.weights is not None:
            products = torch.bmm(x.flatten(1, 2), y.transpose(1, 2)).view(M, C, R, C)
            return products.mul_(self.weights[:, :, None])
        A = x.new_zeros(M, C, R, C)
        for m, rise, fall in self.levels():
            rows, columns = self._level(x, y, m, rise, fall)
            block = torch.bmm(rows.flatten(0, 1).flatten(1, 2), columns.flatten(0, 1).transpose(1, 2))
            _lower(A, m).copy_(block.view(M, -1, m, R, m))
        if self.own:
            A.diagonal(dim1=1, dim2=3).copy_((x * y[:, :, None]).sum(-1).transpose(1, 2))
        return A

    def _level(self, x: Tensor, y: Tensor, m: int, rise: Tensor, fall: Tensor) -> tuple[Tensor, Tensor]:
        return halves(x, m, 1)[1] * rise[:, :, :, None], halves(y, m, 1)[0] * fall

    def pairs_backward(self, dA: Tensor, A: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, y and log_decay [M,C,D] through A = pairs(x, y); dA may hold anything where A is zero."""
        if self.weights is not None:
            return self._pairs_backward_by_token(dA, A, x, y)
        R = x.shape[2]
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        for m, rise, fall in self.levels():
            rows, columns = self._level(x, y, m, rise, fall)
            block = _lower(dA, m).reshape(-1, m * R, m)
            halves(dx, m, 1)[1].addcmul_(torch.bmm(block, columns.flatten(0, 1)).view_as(rows), rise[:, :, :, None])
            to_columns = torch.bmm(block.transpose(1, 2), rows.flatten(0, 1).flatten(1, 2))
            halves(dy, m, 1)[0].addcmul_(to_columns.view_as(columns), fall)
        # Gate r enters the pairs s < r <= t: the sum over rows from r on, less that over columns. A token's product
        # with itself has no gate; leaving it out keeps the summands as small as the result.
        rows, columns = over_reads(x * dx), y * dy
        dg = _sums_from(rows - columns) if self.own else _sums_from(rows) - rows - _sums_from(columns)
        if self.own:
            diagonal = dA.diagonal(dim1=1, dim2=3).transpose(1, 2)[..., None]
            dx.addcmul_(diagonal, y[:, :, None])
            dy += over_reads(diagonal * x)
        return dx, dy, dg

    def _pairs_backward_by_token(self, dA: Tensor, A: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.weights is not None
        # Computed per token, as constant gates sum it over tokens: for each row, the pairs with s < r.
        before = torch.bmm(over_reads(dA * A), _upper(A, 1, self.C))
        dg = before.mul_(_upper(A, 0 if self.own else 1, self.C).transpose(1, 2)).sum(1)[..., None]
        dA = (dA * self.weights[:, :, None]).flatten(1, 2)
        dx = torch.bmm(dA, y).view_as(x)
        dy = torch.bmm(dA.transpose(1, 2), x.flatten(1, 2))
        return dx, dy, dg

    def backward(self, by_rise: Tensor, by_fall: Tensor, by_total: Tensor) -> Tensor:
        """Gradient of log_decay [M,C,D] through rise, fall and total.

        The first two [M,C,K] come as gradient times value, the last [M,K] as gradient alone; D = 1 sums the channels.
        """
        if self.D == 1:
            by_rise, by_fall, by_total = (x.sum(-1, keepdim=True) for x in (by_rise, by_fall, by_total))
        through_rise = _sums_from(by_rise) if self.own else _sums_from(by_rise) - by_rise
        return through_rise + _sums_before(by_fall) + (by_total * self.total)[:, None]

    def zero_where_forgotten(self, dg: Tensor) -> Tensor:
        """dg, the whole gradient of log_decay [M,C,D], in place 0 where a decay is 0: nothing depends on that gate.

        Sums leave rounding errors there, small beside other gradients; a gate of -exp(w) multiplies them by its size.
        """
        return dg.masked_fill_(self.decay == 0, 0)


def over_reads(x: Tensor) -> Tensor:
    """The sum over R of [M,C,R,..], R = 1 or 2: faster than `sum`."""
    return reduce(torch.add, x.unbind(2))


def _lower(A: Tensor, m: int) -> Tensor:
    """The blocks right half x left half, [M, C/2m, m, (R,) m], of A [M, C, (R,) C]: a view."""
    rows = A.unflatten(1, (-1, 2, m)).select(2, 1)
    return rows.unflatten(-1, (-1, 2, m)).select(-2, 0).diagonal(dim1=1, dim2=-2).movedim(-1, 1)


def _sums_from(x: Tensor) -> Tensor:
    """Entry r of [M, C, D]: the sum of x from r on."""
    return torch.bmm(_upper(x, 0, x.shape[1]), x)


def _sums_before(x: Tensor) -> Tensor:
    """Entry r of [M, C, D]: the sum of x before r."""
    return torch.bmm(_upper(x, 1, x.shape[1]).transpose(1, 2), x)


def _upper(like: Tensor, diagonal: int, C: int) -> Tensor:
    return torch.ones(C, C, dtype=like.dtype, device=like.device).triu(diagonal).expand(like.shape[0], C, C)
