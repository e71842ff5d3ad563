"""What a call of the recurrences costs at least, counted by hand."""

from __future__ import annotations

import torch

from foci.ops.decay.spec import SPEC as LINEAR
from foci.ops.delta.spec import SPEC as DELTA

B, T, G, H, K, V, C = 2, 5, 1, 3, 4, 6, 64
Q, VALUE, TOKEN = torch.zeros(B, T, G, K), torch.zeros(B, T, H, V), torch.zeros(B, T, H)


def test_linear_attention() -> None:
    done = LINEAR.work(LINEAR.bind(Q, Q, VALUE, log_decay=TOKEN))
    assert done.flops == B * T * H * (2 * C * K + 2 * C * V + 2 * K * V + 2 * K * V)
    assert done.bytes == 4 * (2 * Q.numel() + 2 * VALUE.numel() + TOKEN.numel())
    assert LINEAR.work(LINEAR.bind(Q, Q, VALUE, causal=False)).flops == B * T * H * 4 * K * V


def test_delta_rule() -> None:
    done = DELTA.work(DELTA.bind(Q, Q, VALUE, TOKEN, erase=Q))
    assert done.flops == B * T * H * (2 * 2 * C * K + 2 * C * V + C * V + 3 * 2 * K * V)
    assert done.bytes == 4 * (3 * Q.numel() + 2 * VALUE.numel() + TOKEN.numel())
