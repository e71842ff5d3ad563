"""Call: the validated arguments of the delta rule; the one place where its shapes are declared."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foci.core.shapes import Signature
from foci.core.spec import accumulator
from foci.ops import arguments

NAME = "delta_rule"

Query = Float[Tensor, "B T G K"]
Key = Float[Tensor, "B T G K"]
Value = Float[Tensor, "B T H V"]
Beta = Float[Tensor, "B T H"]
Decay = Float[Tensor, "H"] | Float[Tensor, "B T H"] | Float[Tensor, "B T H K"]
State = Float[Tensor, "N H K V"]
Offsets = Int[Tensor, "M"]
Out = Float[Tensor, "B T H V"]


class Call(NamedTuple):
    """One call, flat, in the order its ops take it; log_decay is [B or 1, T or 1, H, K or 1]."""

    q: Query
    k: Key
    v: Value
    beta: Beta
    log_decay: Float[Tensor, "#B #T #H #K"] | None
    erase: Key | None
    state: State | None
    offsets: Offsets | None
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
    def per_channel(self) -> bool:
        """Whether each channel has its own gate."""
        return self.log_decay is not None and self.log_decay.shape[3] > 1

    @property
    def tiles(self) -> int:
        """[chunk, K] tiles that a kernel reads: queries, keys, erase keys; per channel keys count as two bfloat16."""
        if self.per_channel:
            return 4 if self.v.dtype == torch.bfloat16 else 3
        return 2 if self.erase is None else 3

    @property
    def ends(self) -> int:
        """The number of final states returned: one per sequence, or 0 if they are not asked for."""
        return self.sizes[-1] if self.return_state else 0


SIGNATURE = Signature(Call, NAME)
_DECAYS = {1: ("H",), 3: ("B", "T", "H"), 4: ("B", "T", "H", "K")}


def bind(
    q: Query,
    k: Key,
    v: Value,
    beta: Beta,
    *,
    log_decay: Decay | None = None,
    erase: Key | None = None,
    scale: float | None = None,
    state: State | None = None,
    offsets: Offsets | None = None,
    return_state: bool = True,
) -> Call:
    """The Call of these arguments, by default with all outputs.

    Raises ShapeError, ValueError or TypeError naming the argument and its value.
    """
    tensors = {
        "q": q, "k": k, "v": v, "beta": beta, "log_decay": None, "erase": erase, "state": state, "offsets": offsets
    }  # fmt: skip
    sizes = SIGNATURE.bind(tensors)
    alike = arguments.in_one_dtype(NAME, tensors)
    q, k, v = (alike[name] for name in "qkv")
    arguments.check_heads(NAME, sizes)
    if not isinstance(return_state, bool):
        raise TypeError(f"{NAME}: return_state must be True or False, got {return_state!r}")
    log_decay = arguments.decay(NAME, log_decay, _DECAYS, (*v.shape[:3], sizes["K"]))
    arguments.check_rest(NAME, v, {"beta": beta, "log_decay": log_decay, "state": state})
    arguments.check_documents(NAME, offsets, state, sizes["B"])
    scale = arguments.scaling(NAME, scale, sizes["K"])
    return Call(q, k, v, beta, log_decay, alike.get("erase"), state, offsets, scale, return_state)
