"""Call: the validated arguments of linear attention; the one place where its shapes are declared."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foci.core.shapes import Signature
from foci.core.spec import accumulator
from foci.ops import arguments

NAME = "linear_attention"

Query = Float[Tensor, "B T G K"]
Key = Float[Tensor, "B T G K"]
Value = Float[Tensor, "B T H V"]
Decay = Float[Tensor, "H"] | Float[Tensor, "B T H"] | Float[Tensor, "B T H K"]
Bonus = Float[Tensor, "H K"]
State = Float[Tensor, "N H K V"]
Offsets = Int[Tensor, "M"]
Out = Float[Tensor, "B T H V"]


class Call(NamedTuple):
    """One call, flat, in the order its ops take it; log_decay is [B or 1, T or 1, H, K or 1]."""

    q: Query
    k: Key
    v: Value
    log_decay: Float[Tensor, "#B #T #H #K"] | None
    bonus: Bonus | None
    state: State | None
    offsets: Offsets | None
    causal: bool
    scale: float
    return_state: bool = True

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, T, G, H, K, V and N, the number of states."""
        B, T, G, K = self.q.shape
        H, V = self.v.shape[2:]
        return B, T, G, H, K, V, arguments.rows(self.offsets, B)

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator(self.q.dtype)

    @property
    def constant(self) -> bool:
        """Whether all tokens of a head share one gate, whose gradient is then a sum over tokens."""
        g = self.log_decay
        return g is not None and g.shape[0] * g.shape[1] < self.q.shape[0] * self.q.shape[1]

    @property
    def per_channel(self) -> bool:
        """Whether each channel has its own gate."""
        return self.log_decay is not None and self.log_decay.shape[3] > 1

    @property
    def ends(self) -> int:
        """The number of final states returned: one per sequence, or 0 if they are not asked for.

        If not causal, every token reads them, so they are always returned.
        """
        return self.sizes[-1] if self.return_state or not self.causal else 0


SIGNATURE = Signature(Call, NAME)
_DECAYS = {1: ("H",), 3: ("B", "T", "H"), 4: ("B", "T", "H", "K")}


def bind(
    q: Query,
    k: Key,
    v: Value,
    *,
    log_decay: Decay | None = None,
    bonus: Bonus | None = None,
    scale: float | None = None,
    state: State | None = None,
    offsets: Offsets | None = None,
    causal: bool = True,
    return_state: bool = True,
) -> Call:
    """The Call of these arguments, by default with all outputs.

    Raises ShapeError, ValueError or TypeError naming the argument and its value.
    """
    tensors = {"q": q, "k": k, "v": v, "log_decay": None, "bonus": bonus, "state": state, "offsets": offsets}
    sizes = SIGNATURE.bind(tensors)
    q, k, v = arguments.common_dtype(NAME, {"q": q, "k": k, "v": v})
    arguments.check_heads(NAME, sizes)
    for flag, value in (("causal", causal), ("return_state", return_state)):
        if not isinstance(value, bool):
            raise TypeError(f"{NAME}: {flag} must be True or False, got {value!r}")
    if not causal and (log_decay is not None or bonus is not None):
        name = "bonus" if log_decay is None else "log_decay"
        raise ValueError(f"{NAME}: {name} needs causal=True; without an order of tokens there is nothing to decay")
    log_decay = arguments.decay(NAME, log_decay, _DECAYS, (*v.shape[:3], sizes["K"]))
    arguments.check_rest(NAME, v, {"log_decay": log_decay, "bonus": bonus, "state": state})
    arguments.check_documents(NAME, offsets, state, sizes["B"])
    scale = arguments.scaling(NAME, scale, sizes["K"])
    return Call(q, k, v, log_decay, bonus, state, offsets, causal, scale, return_state)
