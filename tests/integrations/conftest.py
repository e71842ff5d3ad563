"""What several tests of transformers' models share."""

from __future__ import annotations

import pytest


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as foci's code for transformers asks; kernels' work is done by torch's operations on a CPU."""
    for part in ("parts", "recurrences"):
        monkeypatch.setattr(f"foci.integrations.transformers_{part}.on_gpu", lambda x: True)
