"""Dropout's coins: the hash of seed and position of ops/softmax/dropout.py, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

# The constants of splitmix64 (Steele, Lea and Flood 2014).
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def row_coins(seed_ptr, b, h, t, PLACED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The hash of (seed, b, h, t), which `kept` goes on from: made once for all keys of a row.

    b, h and t are numbers or tiles that broadcast. PLACED: the seed is one of nine numbers (dropout.py: placed).
    """
    seed = tl.load(seed_ptr).to(tl.uint64)
    b, h, t = _moved(seed_ptr, 0, b, PLACED), _moved(seed_ptr, 1, h, PLACED), _moved(seed_ptr, 2, t, PLACED)
    return _mixed(_mixed(_mixed(seed + b * _GOLDEN) + h * _GOLDEN) + t * _GOLDEN)


@triton.jit
def kept(row, seed_ptr, s, threshold, PLACED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether the probability of key s in this row stays; `threshold` is int(p * 2**53), p that of being dropped."""
    coin = _mixed(row + _moved(seed_ptr, 3, s, PLACED) * _GOLDEN) >> 11
    return coin.to(tl.int64) >= threshold


@triton.jit
def _moved(seed_ptr, dimension: tl.constexpr, index, PLACED: tl.constexpr):  # type: ignore[no-untyped-def]
    """An index in the larger problem in which a placed seed lies: start + step * index."""
    if PLACED:
        step = tl.load(seed_ptr + 2 + 2 * dimension)
        return (tl.load(seed_ptr + 1 + 2 * dimension) + step * index).to(tl.uint64)
    else:
        return index.to(tl.uint64)


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)
