"""The inverse of I + N, N strictly lower triangular, by block substitution and not by a power series.

The inverse of [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']], A' and D' the inverses of the diagonal blocks, themselves
blocks of the whole inverse: no factor is larger than the result. (With similar keys, a power series of N sums terms
that grow like 2^C and cancel.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def inverse(N: Tensor) -> Tensor:
    """(I + N)^-1 for N [M, C, C], C a power of two; only what is below the diagonal is read."""
    found = torch.zeros_like(N, memory_format=torch.contiguous_format)
    found.diagonal(dim1=1, dim2=2).fill_(1)
    m = 1
    while m < N.shape[1]:
        below, before, after = _block(N, m, 1, 0), _block(found, m, 0, 0), _block(found, m, 1, 1)
        product = torch.bmm(torch.bmm(after.reshape(-1, m, m), below.reshape(-1, m, m)), before.reshape(-1, m, m))
        _block(found, m, 1, 0).copy_(product.neg_().view(below.shape))
        m *= 2
    return found


def _block(x: Tensor, m: int, row: int, column: int) -> Tensor:
    """One quarter of each diagonal block of 2m, [M, C/2m, m, m], of x [M, C, C]: a view."""
    blocks = x.unflatten(2, (-1, 2, m)).unflatten(1, (-1, 2, m))
    return blocks[:, :, row, :, :, column].diagonal(dim1=1, dim2=3).movedim(-1, 1)
