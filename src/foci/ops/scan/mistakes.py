"""Wrong equations people implement, so that the checker can name a fault."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foci.core.spec import Inputs, Mistake, Outputs
from foci.ops.faults import another, of_states, replaced, without_documents
from foci.ops.scan import reference
from foci.ops.scan.call import bind


def forward(inputs: Inputs) -> Outputs:
    return reference.forward(bind(**inputs))


def _late(gates: Tensor) -> Tensor:
    moved = gates.roll(1, dims=1)
    moved[:, :1] = 0
    return moved


MISTAKES: tuple[Mistake, ...] = (
    another(
        "decay ignored", "log_decay is ignored: nothing would ever be forgotten",
        replaced("log_decay", torch.zeros_like), forward,
    ),
    another(
        "decay in base 2", "log_decay is read in base 2 where it is a natural logarithm: all would fade too slowly",
        replaced("log_decay", lambda g: g * math.log(2)), forward,
    ),
    another(
        "gate of the token before", "a token decays by the gate of the one before: forgetting comes a token late",
        replaced("log_decay", _late), forward,
    ),
    another(
        "x weighed", "x is weighed by 1 - exp(log_decay): what HGRN weighs before the call is weighed twice",
        lambda i: i | {"x": i["x"] * -torch.expm1(i["log_decay"].to(i["x"].dtype))}, forward,
    ),
    *of_states(forward),
    without_documents(forward),
)  # fmt: skip
