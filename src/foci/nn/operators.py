"""Operators: what layers call for anything between tokens: attention, history, cache; here within one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foci.core.errors import ShapeError, Unsupported, a_type
from foci.nn.cache import Cache, LayerCache
from foci.nn.parts import History, history
from foci.ops.arguments import INTEGERS, check_near
from foci.ops.decay.api import linear_attention
from foci.ops.delta.api import delta_rule
from foci.ops.softmax.api import attention


def _alone(T: int) -> tuple[int, int]:
    return 0, T


@dataclass(frozen=True)
class Operators:
    """All computation between tokens of a layer, as `layer.operators`; another set serves a sequence split over ranks.

    attention, linear_attention, delta_rule: with the signatures of foci's functions. history: as in nn.parts.
    remember(memory, name, new, last, saved): LayerCache.append; returns the part that this process attends to. span(T):
    for T tokens here, the number of this call's tokens before them, and in all. `whole`: this process has all tokens.
    """

    attention: Callable[..., Tensor] = attention
    linear_attention: Callable[..., tuple[Tensor, Tensor | None]] = linear_attention
    delta_rule: Callable[..., tuple[Tensor, Tensor | None]] = delta_rule
    history: Callable[..., History] = history
    remember: Callable[[LayerCache, str, Tensor, int | None, bool], Tensor] = LayerCache.append
    span: Callable[[int], tuple[int, int]] = _alone
    whole: bool = True

    def check(
        self, name: str, size: int, hidden: Tensor, mask: Tensor | None, offsets: Tensor | None, cache: Cache | None
    ) -> None:
        """Checks shared by all layers: TypeError, ShapeError, ValueError; Unsupported for padding over ranks."""
        if not isinstance(hidden, Tensor):
            raise TypeError(f"{name}: hidden is {a_type(hidden)}; expected a tensor [B, T, {size}]")
        if hidden.dim() != 3 or hidden.shape[2] != size:
            raise ShapeError(f"{name}: hidden has shape {list(hidden.shape)}; expected [B, T, {size}]")
        if mask is not None and not self.whole:
            raise Unsupported(
                f"{name}: mask, where the sequence is split over ranks",
                ["real tokens are moved to one end of their row, which lies on other ranks"],
                "pack the rows end to end (offsets), or pad on the right and leave the mask out",
            )
        if mask is not None and not isinstance(mask, Tensor):
            raise TypeError(f"{name}: mask is {a_type(mask)}; expected a tensor of torch.bool {list(hidden.shape[:2])}")
        if mask is not None and (mask.shape != hidden.shape[:2] or mask.dtype != torch.bool):
            raise ShapeError(
                f"{name}: mask is {mask.dtype} {list(mask.shape)}; expected torch.bool {list(hidden.shape[:2])}"
            )
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(f"{name}: cache is {cache!r}; expected a foci.nn.Cache")
        if offsets is None:
            return
        if not isinstance(offsets, Tensor):
            raise TypeError(f"{name}: offsets is {offsets!r}; expected a tensor [N + 1]")
        if offsets.dtype not in INTEGERS:
            raise ValueError(f"{name}: offsets is {offsets.dtype}; expected torch.int32 or torch.int64")
        if hidden.shape[0] != 1 or offsets.dim() != 1 or offsets.shape[0] < 1:
            raise ShapeError(
                f"{name}: offsets {list(offsets.shape)} with hidden {list(hidden.shape)}; expected [N + 1], batch 1"
            )
        if hidden.shape[1] and offsets.shape[0] == 1 and offsets.device.type != "cpu":
            raise ValueError(f"{name}: offsets has 1 entry, no document; expected some of {hidden.shape[1]} tokens")
        if self.whole:  # over ranks offsets are those of the whole sequence, and are checked there
            check_near(name, offsets, hidden.shape[1])


ALONE = Operators()
