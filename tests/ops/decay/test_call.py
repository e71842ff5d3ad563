"""Call: sizes, defaults, and log_decay in its one form whatever its rank."""

from __future__ import annotations

import torch

from foci.ops.decay import call
from tests.ops.in_slices import B, G, H, InCall, K, T, V


class TestCall(InCall):
    module = call
    args = (torch.zeros(B, T, G, K), torch.zeros(B, T, G, K), torch.zeros(B, T, H, V))
