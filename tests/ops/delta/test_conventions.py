"""The words of this operator's own arguments; those of every recurrence are tested in tests/ops/test_conventions.py."""

from __future__ import annotations

import torch

from foci.ops.delta.api import delta_rule
from foci.ops.delta.cases import CASES
from foci.ops.delta.conventions import adapt

BY_NAME = {case.name: case for case in CASES}


def test_the_erase_key_of_comba() -> None:
    seen: dict = {}

    def comba(q, k, v, p, g, beta):
        seen.update(p=p)
        return delta_rule(q, k, v, beta, log_decay=g, erase=p)[0]

    def wants_no_p(q, k, v, g, beta, p=None):
        return comba(q, k, v, p, g, beta)

    inputs = BY_NAME["erase"].make(torch.float64, torch.device("cpu"), 0)
    torch.testing.assert_close(adapt(wants_no_p).call(inputs)[0], delta_rule(**inputs)[0])
    assert seen["p"] is inputs["erase"]
    assert adapt(lambda q, k, v, beta: v).refuses(BY_NAME["erase"])
