"""What layers compute with: the operators, what stands before a token, what a cache keeps; here all in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from foci.core.errors import Unsupported
from foci.nn.cache import LayerCache
from foci.nn.parts import History, history
from foci.ops.decay.api import linear_attention
from foci.ops.delta.api import delta_rule
from foci.ops.softmax.api import attention


def _alone(T: int) -> tuple[int, int]:
    return 0, T


@dataclass(frozen=True)
class Operators:
    """What passes between the tokens of a layer, as `layer.operators`. Another set serves a sequence over ranks.

    attention, linear_attention, delta_rule: called as the functions of foci. history: as in nn.parts. remember(memory,
    name, new, last): LayerCache.append, and what of it this process attends. span(T): with T tokens here, how many of
    this call stand before them, and how many there are in all. `whole`: this process has every token.
    """

    attention: Callable[..., Tensor] = attention
    linear_attention: Callable[..., tuple[Tensor, Tensor | None]] = linear_attention
    delta_rule: Callable[..., tuple[Tensor, Tensor | None]] = delta_rule
    history: Callable[..., History] = history
    remember: Callable[[LayerCache, str, Tensor, int | None], Tensor] = LayerCache.append
    span: Callable[[int], tuple[int, int]] = _alone
    whole: bool = True

    def allow(self, name: str, mask: Tensor | None) -> None:
        """Unsupported for padding where the sequence is on several ranks."""
        if mask is not None and not self.whole:
            raise Unsupported(
                f"{name}: mask, where the sequence is split over ranks",
                ["real tokens are moved to one end of their row, which lies on other ranks"],
                "pack the rows end to end (offsets), or pad on the right and leave the mask out",
            )


ALONE = Operators()
