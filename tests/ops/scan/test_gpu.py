"""What the Triton backend of the scan takes: any number of channels."""

from __future__ import annotations

import torch

from foci.ops.scan.call import bind
from foci.ops.scan.gpu import reasons


def test_channels_are_no_width() -> None:
    wide = torch.zeros(1, 1, 5000)
    assert not any("wider" in reason for reason in reasons(bind(wide, wide)))
