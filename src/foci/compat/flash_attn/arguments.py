"""flash-attn's arguments in foci's terms: windows and causality, ALiBi, packed tensors, longest sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.core.errors import ShapeError
from foci.core.spec import accumulator
from foci.ops.arguments import number
from foci.ops.masks import Causal, Mask, Window
from foci.ops.softmax.call import cap


def mask_of(causal: bool, window_size: tuple[int, int]) -> Mask | None:
    """causal and window_size (left, right), measured from the last key; -1 is open, causal closes the right side."""
    good = len(window_size) == 2 and all(isinstance(w, int) and not isinstance(w, bool) for w in window_size)
    if not good or min(window_size) < -1:
        raise ValueError(
            f"flash_attn: window_size must be (left, right), each -1 (open) or a non-negative int, got {window_size!r}"
        )
    left, right = (None if w == -1 else w for w in window_size)
    if causal or right == 0:
        return join(Causal(), None if left is None else Window(left, None))
    return None if left is None and right is None else Window(left, right)


def logits(softmax_scale: float | None, softcap: float) -> tuple[float | None, float | None]:
    """scale and softcap as foci has them: softcap <= 0 is none."""
    scale = None if softmax_scale is None else number("flash_attn", "softmax_scale", softmax_scale)
    capped = number("flash_attn", "softcap", softcap) > 0
    return scale, cap("flash_attn", softcap if capped else None)


def join(one: Mask | None, other: Mask | None) -> Mask | None:
    return other if one is None else one if other is None else one & other


def alibi(slopes: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """-slope |row - column| as a bias [B|1,H,T,S]; slopes [B|1,H] (or [1,H,T,1]), places [B|1,T] and [B|1,S]."""
    slopes = slopes if slopes.dim() == 4 else slopes[..., None, None]
    distance = (rows[:, None, :, None] - columns[:, None, None, :]).abs()
    return -slopes * distance.to(slopes.dtype)


def per_head(slopes: Tensor, rows: int, q: Tensor) -> Tensor:
    """alibi_slopes as [1, H] or [rows, H], in the dtype logits are summed in."""
    H = q.shape[-2]
    if slopes.shape not in ((H,), (rows, H)):
        raise ShapeError(
            f"flash_attn: alibi_slopes has shape {list(slopes.shape)}; expected [{H}] or [{rows}, {H}], "
            "a slope for each query head"
        )
    return slopes.to(accumulator(q.dtype)).view(-1, H)


def unpack(name: str, packed: Tensor, dim: int, count: int) -> tuple[Tensor, ...]:
    """The `count` tensors that lie side by side along `dim`."""
    if packed.dim() != dim + 3 or packed.shape[dim] != count:
        lead = "batch, tokens" if dim == 2 else "tokens"
        raise ShapeError(f"flash_attn: {name} has shape {list(packed.shape)}; expected [{lead}, {count}, heads, D]")
    return packed.unbind(dim)


def longest(name: str, declared: int, offsets: Tensor) -> None:
    """Raise when a sequence is longer than declared. The compiler shows no values to look at."""
    if torch.compiler.is_compiling() or offsets.numel() < 2:
        return
    if (real := int(offsets.diff().max())) > int(declared):
        raise ValueError(f"flash_attn: {name} is {int(declared)}, but one of the sequences has {real} tokens")
