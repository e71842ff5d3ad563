"""Call: sizes, defaults, and log_decay in its one form whatever its rank."""

from __future__ import annotations

import torch

from foci.ops.decay import call
from tests.ops.in_slices import B, G, H, InCall, K, T, V


class TestCall(InCall):
    module = call
    args = (torch.zeros(B, T, G, K), torch.zeros(B, T, G, K), torch.zeros(B, T, H, V))


def test_gates_are_constant_that_a_head_has_one_of() -> None:
    def constant(gates: tuple[int, ...]) -> bool:
        return call.bind(*TestCall.args, log_decay=torch.zeros(gates) if gates else None).constant

    assert constant((H,)) and not constant((B, T, H)) and not constant((B, T, H, K)) and not constant(())
