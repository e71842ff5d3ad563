"""flash-attn's arguments in foci's terms: windows, causality, ALiBi, packed tensors, longest sequences, indices."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from foci.core.errors import ShapeError
from foci.core.shapes import dense
from foci.core.spec import accumulator
from foci.ops.arguments import INTEGERS, number, short, switch
from foci.ops.masks import Causal, Mask, Window
from foci.ops.softmax.call import cap


def mask_of(causal: bool, window_size: tuple[int, int]) -> Mask | None:
    """causal and window_size (left, right), measured from the last key; -1 is open, causal closes the right side."""
    causal = switch("flash_attn", "causal", causal)
    pair = isinstance(window_size, tuple | list) and len(window_size) == 2
    if not pair or any(isinstance(w, bool) or not isinstance(w, int) or w < -1 for w in window_size):
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
    if torch.compiler.is_compiling():
        return
    count = declared.numel() == 1 if isinstance(declared, Tensor) else isinstance(declared, Integral)
    if not count or isinstance(declared, bool):
        raise TypeError(f"flash_attn: {name} must be an int, got {declared!r:.200}")
    if offsets.numel() < 2:
        return
    if (real := int(offsets.diff().max())) > int(declared):
        raise ValueError(f"flash_attn: {name} is {int(declared)}, but one of the sequences has {real} tokens")


def indices(name: str, given: Tensor, rows: int, device: torch.device, *more: str) -> Tensor:
    """Whole numbers [rows], or [rows, pages] where `more` names the pages, as int64."""
    given = dense("flash_attn", name, given)
    if given.dtype not in INTEGERS or given.device != device:
        raise ValueError(
            f"flash_attn: {name} is {short(given.dtype)} on {given.device}; expected int32 or int64 on {device}"
        )
    if given.dim() != 1 + len(more) or given.shape[0] != rows:
        expected = ", ".join((str(rows), *more))
        raise ShapeError(f"flash_attn: {name} has shape {list(given.shape)}; expected [{expected}]")
    return given.long()


def check_inside(name: str, index: Tensor, count: int, kind: str, needed: Tensor | None = None) -> None:
    """Raise when an entry, of those that are needed, names none of `count`: -1 would be the last one to torch."""
    wrong = (index < 0) | (index >= count)
    found = (wrong if needed is None else wrong & needed).nonzero().tolist()  # one wait for a GPU
    if found:
        place = found[0]
        raise ValueError(
            f"flash_attn: {name}{place} is {int(index[tuple(place)])}; expected 0 to {count - 1}, {kind} that there is"
        )


def check_own(name: str, index: Tensor, count: int, kind: str, needed: Tensor, written: Tensor) -> None:
    """Raise when one of `count` that an entry is written through is another entry's too, of those that are needed.

    It waits for a GPU, as whoever reads lengths there has.
    """
    if not count:  # then none is needed
        return
    uses = torch.bincount(index[needed], minlength=count)
    found = (written & (uses[index.clamp(0, count - 1)] > 1)).nonzero().tolist()
    if found:
        place = found[0]
        which = int(index[tuple(place)])
        other = next(x for x in (needed & (index == which)).nonzero().tolist() if x != place)
        raise ValueError(
            f"flash_attn: {name}{place} and {name}{other} are both {which}; expected {kind} of its own for row "
            f"{place[0]}, which writes k and v there"
        )
