"""What pieces of a sequence are told of those before them: their maps, and what is no number any more.

Where gates forget too slowly for a piece to warm up, it begins by maps, for few heads. Which pieces these are only the
GPU knows. So the walk of kernels_triton_token_walks.py is launched once more before: it finds out, and makes maps
S -> M S + N (tiles/affine.py) of all pieces before one of those; mostly it has nothing to do. Then each slow piece
joins them, one product M S after the other; before the walk of kernels_gluon.py that launch does. What is before a
piece decides, and nothing later; in a backward what is behind it, but not what is behind all gradients: of those no bit
may know what comes later. Where too few heads are short (ops/delta/pieces.py), all pieces begin by maps, but for what
kernels_gluon.py walks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.core.tune import Target, target_of
from foci.tiles.pieces import FAR

CHUNK = 64


def few(call: Any, target: Target, pieces: int) -> bool:
    """Whether whole sequences, if cut into `pieces`, would fill a quarter of the processors or less.

    There is room then for twice the work. Not of more than four documents, or short ones: each has as many pieces, and
    those of one that is longer than all others are as long.
    """
    *_, H, _, V, N = call.sizes
    return pieces > 1 and _long(call) and target.processors >= 4 * N * H * -(-V // 64)


def _long(call: Any) -> bool:
    """Whether all sequences are as long as the others, or few documents whose pieces are long in the mean."""
    B, T, *_, N = call.sizes
    return call.offsets is None or (N <= 4 and 2 * int(FAR) * CHUNK * N <= B * T)


def by_maps(call: Any, target: Target, pieces: int) -> bool:
    """Whether pieces of `few` heads that warm up too slowly are told from others, and joined by maps.

    In sequences that are longer than what may warm a piece up.
    """
    return call.sizes[1] > int(FAR) * CHUNK and few(call, target, pieces)


def reaches_far(call: Any) -> bool:
    """Whether documents have more than FAR chunks in the mean, for a piece to warm up over, and `few` has no maps."""
    B, T, *_, N = call.sizes
    return not _long(call) and int(FAR) * CHUNK * N < B * T


def twice(call: Any, target: Target, pieces: int, keep: bool) -> bool:
    """Whether kernels_gluon.py, by 64 columns, walks each sequence by two programs, one of which reads the end alone.

    Where there are processors for both, and chunks that it pays, in place of whole sequences, or of two `pieces` of
    less than FAR chunks, which warm up over most of what is before them. `keep`: a backward is to come, and sequences
    that would be walked by less than a fifth of the processors are cut by maps (ops/delta/pieces.py).
    """
    B, T, _, H, K, V, N = call.sizes
    programs, chunks, least = N * H * (V // 64), B * T // (N * CHUNK), 10
    if keep or (K == 64 and call.offsets is None):
        least = 8
    room = 2 * programs <= target.processors and not (keep and 5 * programs < target.processors)
    return room and chunks >= least and (pieces == 1 or (pieces == 2 and chunks < int(FAR)))


def starts(
    call: Any, pieces: int, make: Callable[..., None], each: bool, at_once: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Which pieces are slow [N,pieces,H], if above 0, and maps turned over: N [N,pieces,H,V,K], M [N,pieces,H,2,K,K].

    `each` is slow, which nobody needs to be told: slow is None. `at_once`: where the walk does not join maps itself; in
    place of N the states with which slow pieces begin, M is None. A launch without much to do where none is slow; none,
    and nothing, where neither `each` nor `by_maps` says so. `make` fills (slow, N, M), and those states.
    """
    *_, H, K, V, N = call.sizes
    device, target = call.v.device, target_of(call.v.device)
    assert not (each and at_once)
    if not (each or by_maps(call, target, pieces)):
        return None, None, None
    slow = None if each else torch.empty(N, pieces, H, dtype=torch.int32, device=device)
    M = torch.empty(N, pieces, H, 2, K, K, dtype=torch.bfloat16, device=device)
    states = torch.empty(N, pieces, H, V, K, dtype=torch.float32, device=device)
    if not at_once:
        make((slow, states, M))
        return slow, states, M
    first = torch.empty_like(states)
    make((slow, states, M, first))
    return slow, first, None


def losses(call: Any, gated: Any, pieces: int) -> Tensor | None:
    """Room for the columns of a state that each piece has lost, where there are pieces."""
    *_, H, _, V, N = call.sizes
    if gated.reach is None or pieces == 1:
        return None
    return torch.empty(N, pieces, H, V, dtype=torch.int32, device=call.v.device)
