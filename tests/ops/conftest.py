"""What is asked of kernels in bfloat16 is asked of them without a GPU too."""

from __future__ import annotations

import pytest
import torch

from foci.core.tune import interpreting


@pytest.fixture(autouse=True)
def _in_bfloat16(request: pytest.FixtureRequest) -> None:
    """Where a test's parameters say bfloat16, Triton's interpreter computes it as a GPU does."""
    spec = getattr(request.node, "callspec", None)
    if interpreting() and spec is not None and any(x is torch.bfloat16 for x in spec.params.values()):
        from tests.ops import in_bfloat16

        in_bfloat16.mend(request.getfixturevalue("monkeypatch"))
