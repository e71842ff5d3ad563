"""EXTRACT_FUNC_DICT: what each rank holds of a whole tensor, in yunchang's orders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.parallel.balance import Order, cut, length, pieces

ORDERS: dict[str, Order] = {"basic": "plain", "zigzag": "zigzag", "strip": "stripe"}


def basic_extract_local(value: Tensor, rank: int, world_size: int, rd: int = 1, ud: int = 1, dim: int = 1) -> Tensor:
    """The rank-th of `world_size` runs of tokens: value [B, T, ...] -> [B, T of this rank, ...]. Any T; differentiable.

    rd, ud: the degrees of ring and Ulysses, whose product is world_size; 1 and 1 leave both open, as yunchang does.
    """
    if rd * ud == 1:
        rd = world_size
    return _extract("plain", value, rank, world_size, rd, ud, dim)


def zigzag_extract_local(value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1) -> Tensor:
    """Of 2 * rd runs the r-th from the front and the r-th from the back, of which this rank has its u-th part.

    rank = r * ud + u: neighbours form a Ulysses group. Any T, where yunchang needs a multiple of 2 * rd * ud.
    """
    return _extract("zigzag", value, rank, world_size, rd, ud, dim)


def stripe_extract_local(value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1) -> Tensor:
    """Tokens r, r + rd, r + 2 rd ..., of which this rank has its u-th part; rank = r * ud + u. Any T."""
    return _extract("stripe", value, rank, world_size, rd, ud, dim)


EXTRACT_FUNC_DICT: dict[str, Any] = {
    "basic": basic_extract_local,
    "strip": stripe_extract_local,
    "zigzag": zigzag_extract_local,
}


def _extract(order: Order, value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int) -> Tensor:
    if rd * ud != world_size or not 0 <= rank < world_size:
        raise ValueError(
            f"extract_local: rank={rank}, world_size={world_size}, rd={rd}, ud={ud}; expected rd * ud = world_size and "
            "a rank below it"
        )
    ring = pieces(order, value.shape[dim], rd, rank // ud)
    small, more = divmod(length(ring), ud)
    place = rank % ud
    start = place * small + min(place, more)
    held = cut(ring, start, start + small + (place < more))
    places = [position for piece in held for position in piece.positions]
    return value.index_select(dim, torch.tensor(places, dtype=torch.int64, device=value.device))
