"""Wrong equations people implement, so that the checker can name a fault."""

from __future__ import annotations

import torch

from foci.core.spec import Inputs, Mistake, Outputs
from foci.ops.faults import another, of_states, replaced, without_documents
from foci.ops.selective_scan import reference
from foci.ops.selective_scan.call import bind


def forward(inputs: Inputs) -> Outputs:
    return reference.forward(bind(**inputs))


MISTAKES: tuple[Mistake, ...] = (
    another(
        "A for A_log", "A is read as A_log, as if -exp(A) were wanted: every rate would be another",
        replaced("A", lambda A: -A.exp()), forward,
    ),
    another(
        "softplus twice", "softplus is applied to dt, which has it already: every step would be too long",
        replaced("dt", torch.nn.functional.softplus), forward,
    ),
    another(
        "x without dt", "x is written without dt: short steps would write as much as long ones",
        lambda i: i | {"x": i["x"] / i["dt"]}, forward,
    ),
    another(
        "B and C exchanged", "B and C are exchanged: what is written and what is read trade places",
        lambda i: i | {"B": i["C"], "C": i["B"]}, forward,
    ),
    another(
        "skip ignored", "skip is ignored: a token would reach the output through the state alone",
        replaced("skip", lambda skip: None), forward,
    ),
    another(
        "skip of 1", "x is added as it is where skip weighs each channel",
        replaced("skip", torch.ones_like), forward,
    ),
    *of_states(forward),
    without_documents(forward),
)  # fmt: skip
