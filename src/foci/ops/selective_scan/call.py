"""Call: the validated arguments of the selective scan; the one place where its shapes are declared."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foci.core.shapes import Signature
from foci.core.spec import accumulator
from foci.ops import arguments

NAME = "selective_scan"

Tokens = Float[Tensor, "B T D"]
Rates = Float[Tensor, "D K"]
Keys = Float[Tensor, "B T K"]
Skip = Float[Tensor, "D"]
State = Float[Tensor, "N D K"]
Offsets = Int[Tensor, "M"]


class Call(NamedTuple):
    """One call, flat, in the order its ops take it."""

    x: Tokens
    dt: Tokens
    A: Rates
    B: Keys
    C: Keys
    skip: Skip | None
    state: State | None
    offsets: Offsets | None
    return_state: bool = True

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """B, T, D, K and N, the number of states."""
        B, T, D = self.x.shape
        return B, T, D, self.A.shape[1], arguments.rows(self.offsets, B)

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator(self.x.dtype)

    @property
    def ends(self) -> int:
        """The number of final states returned: one per sequence, or 0 if they are not asked for."""
        return self.sizes[-1] if self.return_state else 0


SIGNATURE = Signature(Call, NAME)


def bind(
    x: Tokens,
    dt: Tokens,
    A: Rates,
    B: Keys,
    C: Keys,
    *,
    skip: Skip | None = None,
    state: State | None = None,
    offsets: Offsets | None = None,
    return_state: bool = True,
) -> Call:
    """The Call of these arguments, by default with all outputs.

    Raises ShapeError, ValueError or TypeError naming the argument and its value.
    """
    floating = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "skip": skip, "state": state}
    sizes = SIGNATURE.bind(floating | {"offsets": offsets})
    if not isinstance(return_state, bool):
        raise TypeError(f"{NAME}: return_state must be True or False, got {return_state!r}")
    arguments.check_rest(NAME, x, floating)
    arguments.check_documents(NAME, offsets, state, sizes["B"])
    return Call(x, dt, A, B, C, skip, state, offsets, return_state)


def rates(A: Tensor, dtype: torch.dtype) -> Tensor:
    """A with -inf replaced by half the lowest number: 0 * -inf is NaN, in dt A for dt = 0 and in dt's gradient."""
    return A.to(dtype).clamp(min=torch.finfo(dtype).min / 2)
