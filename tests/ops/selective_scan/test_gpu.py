"""Which states the Triton backend of the selective scan keeps."""

from __future__ import annotations

from typing import Any

import torch

from foci.ops.selective_scan.call import bind
from foci.ops.selective_scan.gpu import KEEP, kept


def call(B: int = 1, **more: Any) -> Any:
    x, key = torch.zeros(B, 2 * KEEP + 1, 3), torch.zeros(B, 2 * KEEP + 1, 4)
    return bind(x, x, torch.zeros(3, 4), key, key, **more)


def test_a_state_is_kept_every_so_many_tokens_of_each_sequence() -> None:
    assert kept(call(B=5)).shape == (5 * 3 + 2, 3, 4)
    packed = kept(call(offsets=torch.tensor([0, 1, 2, 2 * KEEP + 1])))
    assert packed.shape[0] >= 1 + 1 + 2 and packed.dtype == torch.float32
