"""Linear attention in one walk, both ways: bfloat16 on Hopper, in place of the launches that hand on states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.check import memory
from foci.ops.decay import gpu
from foci.ops.decay.api import linear_attention
from foci.ops.decay.call import bind
from foci.ops.decay.cases import Linear
from foci.ops.decay.spec import SPEC
from foci.ops import stretches
from foci.ops.draw import Draw
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, CPU, answers, error, exact

from foci.ops.decay import kernels_triton_walks as walks  # isort: skip  after Triton's presence is known

SQUARE: list[dict[str, Any]] = [
    {"B": 2, "T": 150, "H": 2, "decay": "token", "state": True},
    {"T": 130, "H": 4, "decay": "head", "state": True},
    {"T": 66, "decay": ""},
    {"T": 129, "K": 128, "decay": "token"},
    {"T": 150, "H": 2, "decay": "token", "offsets": (0, 3, 3, 140, 150), "state": True},
    {"T": 150, "H": 4, "decay": "head", "offsets": (0, 70, 70, 150)},
    {"T": 200, "H": 2, "decay": "token", "gates": Draw.extremes},
]
CHANNELS: list[dict[str, Any]] = [
    {"T": 130, "V": 96, "decay": "channel", "state": True},
    {"T": 70, "H": 4, "G": 2, "decay": "channel"},
    {"T": 130, "decay": "channel", "bonus": True, "offsets": (0, 3, 3, 130)},
    {"T": 130, "decay": "channel", "gates": Draw.extremes},
]


def problem(more: dict[str, Any]) -> dict[str, Any]:
    return Linear("", **{"B": 1, "H": 1, "K": 64, **more}).case.make(torch.bfloat16, CPU, 0)


@pytest.fixture(params=[0, 64, 128])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are walked whole, or in stretches of so many tokens."""
    tokens = request.param
    monkeypatch.setattr(stretches, "cheapest", lambda N, B, T, packed, *_: stretches.cut_into(tokens, N, T, packed))


@pytest.mark.usefixtures("halves", "cut")
class TestWithinBudget:
    @pytest.mark.parametrize("more", SQUARE + CHANNELS)
    def test_forward_and_every_gradient(self, more: dict[str, Any]) -> None:
        inputs = problem(more)
        with memory.poisoned():
            found = answers(linear_attention, SPEC, there(inputs), "triton")
        truth = answers(linear_attention, SPEC, exact(inputs), "chunked")
        errors = {n: error(found[n].cpu(), truth[n]) for n in truth}
        assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors

    def test_forward_of_heads_that_share_keys(self) -> None:
        inputs = problem({"T": 70, "H": 4, "G": 2, "V": 40, "decay": "token"})
        truth = linear_attention(**exact(inputs), return_state=True, backend="chunked")
        with memory.poisoned():
            found = gpu.forward(bind(**there(inputs)))
        errors = [error(x.cpu(), wanted) for x, wanted in zip(found, truth, strict=True)]
        assert all(e <= BUDGET[torch.bfloat16] for e in errors), errors
