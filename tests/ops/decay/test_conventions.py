"""The words of this operator's own arguments; those of every recurrence are tested in tests/ops/test_conventions.py."""

from __future__ import annotations

import torch

from foci.ops.decay.api import linear_attention
from foci.ops.decay.cases import CASES
from foci.ops.decay.conventions import adapt

BY_NAME = {case.name: case for case in CASES}


def test_the_bonus_and_the_gates_of_rwkv() -> None:
    seen: dict = {}

    def rwkv6(q, k, v, w, u=None):
        seen.update(w=w, u=u)
        return linear_attention(q, k, v, log_decay=w, bonus=u)[0]

    candidate = adapt(rwkv6)
    inputs = BY_NAME["bonus"].make(torch.float64, torch.device("cpu"), 0)
    torch.testing.assert_close(candidate.call(inputs)[0], linear_attention(**inputs)[0])
    assert seen["w"] is inputs["log_decay"] and seen["u"] is inputs["bonus"]
    assert candidate.refuses(BY_NAME["decay per token"])


def test_an_order_of_tokens_can_be_switched_off() -> None:
    def vision(q, k, v, is_causal=True):
        return linear_attention(q, k, v, causal=is_causal)[0]

    inputs = BY_NAME["not causal"].make(torch.float64, torch.device("cpu"), 0)
    torch.testing.assert_close(adapt(vision).call(inputs)[0], linear_attention(**inputs)[0])
    assert adapt(lambda q, k, v: v).refuses(BY_NAME["not causal"])
