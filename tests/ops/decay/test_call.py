"""Call: sizes, defaults, and log_decay in its one form whatever its rank."""

from __future__ import annotations

import torch

from foci.ops.decay import call
from tests.ops.in_slices import B, G, H, InCall, K, T, V


class TestCall(InCall):
    module = call
    args = (torch.zeros(B, T, G, K), torch.zeros(B, T, G, K), torch.zeros(B, T, H, V))


def test_only_constant_gates_of_bfloat16_have_states_rounded_to_two() -> None:
    def in_two(gates: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> bool:
        q, k, v = (torch.zeros(B, T, heads, n, dtype=dtype) for heads, n in ((G, K), (G, K), (H, V)))
        return call.bind(q, k, v, log_decay=torch.zeros(gates) if gates else None).in_two

    assert in_two((H,)) and not in_two((H,), torch.float16) and not in_two((H,), torch.float32)
    assert not in_two((B, T, H)) and not in_two((B, T, H, K)) and not in_two(())
