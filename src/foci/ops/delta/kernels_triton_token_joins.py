"""How pieces of a sequence begin where gates forget too slowly for them to warm up: by maps, for few heads.

Which pieces these are only the GPU knows. So the walk of kernels_triton_token_walks.py is launched once more before: it
finds out, and makes maps S -> M S + N (tiles/affine.py) of all pieces before one of those; mostly it has nothing to do.
Then the launch here joins them, one product M S after the other. What is before a piece decides, and nothing later; in
a backward what is behind it, but not what is behind all gradients: of those no bit may know what comes later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foci.core.tune import Config, Target, configure, launch, precision, side, target_of
from foci.tiles.affine import mapped
from foci.tiles.memory import load_tile, store_tile


@triton.jit
def join_kernel(  # type: ignore[no-untyped-def]
    slow_ptr, M_ptr, N_ptr, first_ptr, H, V, pieces,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of one head's state at the first chunk of each piece of a sequence, up to the last slow one."""
    K: tl.constexpr = BLOCK_K
    v0, head = tl.program_id(0) % tl.cdiv(V, BLOCK_V) * BLOCK_V, tl.program_id(0) // tl.cdiv(V, BLOCK_V)
    at, piece = (tl.cast(head, tl.int64) // H * pieces) * H + head % H, tl.arange(0, PIECES)
    slow = tl.load(slow_ptr + at + piece * H, mask=piece < pieces, other=0)
    last = tl.max(tl.where(slow > 0, piece, 0), 0)
    if last == 0:
        return
    S = (load_tile(N_ptr + at * K * V, 0, K, V, v0, V, 1, K, BLOCK_V),)
    for _ in tl.range(1, last):
        at += H
        store_tile(first_ptr + at * K * V, S[0], 0, K, V, v0, V, 1)
        S = mapped(S, M_ptr, N_ptr, at, K, v0, V, PRECISION, 1, K, BLOCK_V)
    store_tile(first_ptr + (at + H) * K * V, S[0], 0, K, V, v0, V, 1)


def by_maps(call: Any, target: Target, pieces: int) -> bool:
    """Whether pieces that warm up too slowly are told from others, and joined by maps.

    Where whole ones would fill a quarter of the processors or less: there is room then for twice the work. Not of
    documents: each has as many pieces, and those of one that is longer than all others would be as long.
    """
    *_, H, _, V, N = call.sizes
    return pieces > 1 and call.offsets is None and target.processors >= 4 * N * H * -(-V // 64)


def starts(call: Any, pieces: int, make: Callable[..., None]) -> tuple[Tensor | None, Tensor | None]:
    """Which pieces are slow [N,pieces,H], if above 0, and with what state these begin [N,pieces,H,K,V].

    Two launches, without much to do where none is; none where `by_maps` says so. `make` fills (slow, N, M).
    """
    *_, H, K, V, N = call.sizes
    device, target = call.v.device, target_of(call.v.device)
    if not by_maps(call, target, pieces):
        return None, None
    slow = torch.empty(N, pieces, H, dtype=torch.int32, device=device)
    M = torch.empty(N, pieces, H, 2, K, K, dtype=torch.bfloat16, device=device)
    states, first = torch.empty(2, N, pieces, H, K, V, device=device).unbind()
    make(slow, states, M)
    config = configure("delta_token_join", (K, V), partial(_join_rule, V), target)
    launch(
        join_kernel, (N * H * -(-V // config["BLOCK_V"]),), slow, M, states, first, H, V, pieces,
        config=config, PRECISION=precision(torch.float32, target), PIECES=side(pieces, 1 << 20), BLOCK_K=K,
    )  # fmt: skip
    return slow, first


def _join_rule(V: int, target: Target) -> Config:
    """Few columns a program: products follow each other, and there are few heads."""
    return Config({"BLOCK_V": side(V, 16)}, warps=4, stages=2)
