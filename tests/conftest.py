"""Every test runs on two threads, from one seed, and without the network."""

from __future__ import annotations

import os

# Before any import of huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
