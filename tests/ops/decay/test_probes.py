"""What linear attention adds to the probes: an order of tokens, and its own bad arguments."""

from __future__ import annotations

import torch

from foci.ops.decay.cases import CASES
from foci.ops.decay.probes import PROBES, sized
from foci.ops.decay.spec import SPEC
from tests.ops.in_slices import InProbes

CPU, F64 = torch.device("cpu"), torch.float64
BY_NAME = {case.name: case for case in CASES}


def taken(probe, name):
    return probe(BY_NAME[name], BY_NAME[name].make(F64, CPU, 0))


def test_without_an_order_only_the_state_is_handed_on() -> None:
    parts = taken(PROBES.cut, "not causal")
    assert [set(part.place) for part in parts] == [set(), set(), {"state"}]
    assert taken(PROBES.future, "not causal") is None
    assert len(taken(PROBES.documents, "not causal, packed")) == 3


class TestProbes(InProbes):
    spec = SPEC


def test_sized() -> None:
    for n in (0, 1, 65):
        assert sized(n).make(torch.float32, CPU, 0)["log_decay"].shape == (1, n, 2, 8)
