"""What a launch tells a kernel of tiles: pointers, or maps for TMA, which a kernel takes 1 us each to make itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.tools.tensor_descriptor import TensorDescriptor


class Tiles(NamedTuple):
    """How a launch tells a kernel where tiles lie (tiles/memory.py: rows_of).

    `tma`: 0 by pointers; 1 so too, of which the kernel makes maps; 2 by maps.
    """

    tma: int

    def rows(self, x: Any, rows: int, columns: int) -> Any:
        """Of a tensor [..,B,T,H,C] as a matrix [.. B T, H C], for tiles of so many rows and columns."""
        return x if x is None or self.tma < 2 else _map(x, x.stride(-3), x.shape[-2] * x.shape[-1], rows, columns)

    def lines(self, x: Any, rows: int, columns: int) -> Any:
        """Of [..,C], one after another, as a matrix."""
        return x if x is None or self.tma < 2 else _map(x, x.shape[-1], x.shape[-1], rows, columns)


def _map(x: Any, step: int, width: int, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, *matrix(x, step, width), [rows, columns])


def matrix(x: Any, step: int, width: int) -> tuple[list[int], list[int]]:
    """Shape and strides of all of a tensor as rows so wide, a `step` apart."""
    return [x.numel() // width, width], [step, 1]


def in_line(x: Any) -> bool:
    """Whether all rows of a tensor [B,T,H,C] are those of one matrix [B T, H C]."""
    (B, T, H, C), (b, t, h, _) = x.shape, x.stride()
    return bool((B == 1 or b == T * t) and (H == 1 or h == C))


def tiles_of(able: bool, whole: bool, chunk: int, offsets: Any, *operands: Any) -> Tiles:
    """By TMA where it is `able` to read these tensors [B,T,H,C]; by maps where no tile of so many tokens is cut.

    Neither by columns (`whole`), nor by a sequence's end, nor because what a map has for one matrix is none; nor where
    all rows of one, a state for each chunk, or two rows of a chunk for each token, are more than a map `reaches`.
    """
    if not able:
        return Tiles(0)
    whole, tokens, widest, longest = whole and offsets is None, 0, 0, 0
    for x in operands:
        if x is not None:
            B, T, H, C = x.shape
            tokens, widest = max(tokens, B * T * H), max(widest, C)
            longest = max(longest, B * T * x.stride(1) * x.element_size())
            whole = whole and T % chunk == 0 and in_line(x)
    return Tiles(2 if whole and reaches(max(longest, tokens * max(4 * chunk, 2 * widest * widest // chunk))) else 1)


def reaches(size: int) -> bool:
    """Whether a launch may be given a map of so many bytes.

    Triton from 3.7 on adds them up in an int, and takes what overflows for one of those below 128 KiB, in whose maps it
    changes a bit.
    """
    return size < 1 << 31 or triton.__version__.startswith("3.6.")
