"""How many pairs of a query and a key a mask leaves: what the operations of attention are counted by."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.ops.deferred_checks import unreadable
from foci.ops.masks import Visible, segments


def pairs(visible: Visible, B: int, T: int, S: int) -> int:
    """The number of (query, key) pairs that the mask allows, over all rows, without its Dense part. Reads values.

    Where values or sizes are not known (tensors on `meta`, fake ones, symbolic sizes) all B T S of them, the most there
    can be.
    """
    hides = any(x is not None and x is not False for x in visible[1:])
    if not hides or not _known(visible, B, T, S):
        return B * T * S
    total = 0
    for segment in segments(visible, B, T, S):
        queries, keys = segment.q_stop - segment.q_start, segment.k_stop - segment.k_start
        before_last = queries * keys if segment.high is None else _keys_before(segment.high + 1, queries, keys)
        before_first = 0 if segment.low is None else _keys_before(segment.low, queries, keys)
        total += max(0, before_last - before_first) * len(range(*segment.rows.indices(B)))
    return total


def without_causal(visible: Visible) -> Visible:
    """The mask by torch's convention of counting: a causal mask halves nothing, except with a window or a band."""
    if any(x is not None for x in (visible.left, visible.right, visible.band_low, visible.band_high)):
        return visible
    return visible._replace(causal_end=False, causal_start=False)


def _known(visible: Visible, *sizes: int) -> bool:
    given = [x for x in visible[1:7] if x is not None]
    plain = all(type(x) is Tensor and not x.is_meta for x in given)
    return plain and not unreadable(*given) and not any(isinstance(size, torch.SymInt) for size in sizes)


def _keys_before(bound: int, queries: int, keys: int) -> int:
    """The sum over queries i of how many of the keys 0, 1 ... lie before i + bound: of i + bound, within [0, keys]."""

    def up_to(last: int) -> int:
        ramp = max(0, min(last, keys))
        return ramp * (ramp + 1) // 2 + max(0, last - keys) * keys

    return up_to(queries - 1 + bound) - up_to(bound - 1)
