"""Which positions of a sequence each rank holds: the definition that parallel functions are checked against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ORDERS = ("plain", "zigzag", "stripe")
Places = list[Tensor]


def places(order: str, length: int, size: int) -> Places:
    """For each of `size` ranks the positions, of 0 .. length - 1, that it holds, in the order of its shard.

    plain: `size` contiguous runs, as equal as possible, the longer ones first. zigzag: 2 size such runs; rank r holds
    runs r and 2 size - 1 - r, which balances causal work. stripe: rank r holds r, r + size, r + 2 size ...
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
    whole = torch.arange(length, device="cpu")
    if order == "stripe":
        return [whole[rank::size] for rank in range(size)]
    if order == "plain":
        return list(whole.tensor_split(size))
    runs = whole.tensor_split(2 * size)
    return [torch.cat([runs[rank], runs[2 * size - 1 - rank]]) for rank in range(size)]


def cut(tensor: Tensor, dim: int, parts: Places) -> list[Tensor]:
    """Each rank's shard of a whole tensor, contiguous."""
    return [tensor.index_select(dim, part) for part in parts]


def join(shards: Sequence[Tensor], dim: int, parts: Places) -> Tensor:
    """The whole tensor from the ranks' shards; a plain concatenation if their lengths are not as expected."""
    joined = torch.cat(list(shards), dim)
    positions = torch.cat(parts)
    if joined.shape[dim] != len(positions):
        return joined
    return torch.empty_like(joined).index_copy_(dim, positions, joined)


def format_positions(positions: Tensor) -> str:
    """Positions as people write them: 0..7, 12, and a count where there are many runs."""
    values = positions.sort().values.tolist()
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    words = [str(a) if a == b else f"{a}..{b}" for a, b in runs]
    more = f" and {len(words) - 4} more runs" if len(words) > 5 else ""
    return ", ".join(words[:4] if more else words) + more
