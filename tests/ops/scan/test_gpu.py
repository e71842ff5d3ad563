"""What the Triton backend of the scan refuses."""

from __future__ import annotations

import torch

from foci.ops.scan.call import bind
from foci.ops.scan.gpu import reasons


def test_refusals_have_reasons() -> None:
    x = torch.zeros(1, 2, 3)
    assert reasons(bind(x, x)) == ["it needs a GPU, the tensors are on cpu"]
    meta = x.to("meta").double()
    found = reasons(bind(meta, meta))
    assert "float64 is not supported" in found
    assert any("a size is 0" in reason for reason in reasons(bind(x[:, :0], x[:, :0])))
    wide = torch.zeros(1, 1, 5000)
    assert len(reasons(bind(wide, wide))) == 1
