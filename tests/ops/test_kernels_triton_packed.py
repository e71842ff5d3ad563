"""Memory for what packed documents give: 0 behind the last one, and nothing written before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foci.check.memory import poisoned
from foci.cli_check import FUNCTIONS
from foci.core import tune
from foci.ops import gpu
from tests.ops.in_triton import DEVICE

from foci.ops import kernels_triton_packed as packed  # isort: skip  after Triton's presence is known

T, KEPT = 700, 7.0
WIDTHS: list[tuple[int, ...]] = [(4, 32), (1,), (), (3, 5), (2, 1), (128,), (9,)]


def call(*offsets: int) -> Any:
    """All that is asked of one."""
    return SimpleNamespace(sizes=(1, T), offsets=torch.tensor(offsets, device=DEVICE) if offsets else None)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is `KEPT`."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(*shape, KEPT, **options))


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("end", [0, 1, 64, 699, T])
def test_what_no_document_has_is_zero_and_nothing_else_is_written(end: int, dtype: torch.dtype) -> None:
    likes = [torch.zeros(1, T, *width, dtype=dtype, device=DEVICE) for width in WIDTHS]
    for found in (
        packed.rooms(call(0, end // 2, end), likes, [True] * len(likes)),
        [packed.room(call(0, end), likes[0])],
    ):
        for x, like in zip(found, likes, strict=False):
            assert x is not None
            assert x.shape == like.shape
            assert x.dtype == dtype
            assert bool((x[:, :end] == KEPT).all())
            assert not x[:, end:].any()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("offsets", "start", "stop"), [((20, 60), 20, 60), ((-5, 60), 0, 60), ((0, 9, -5), 0, 9), ((5, 5, 9999), 5, T)]
)
def test_offsets_that_a_gpu_moves_inside(offsets: tuple[int, ...], start: int, stop: int) -> None:
    x = packed.room(call(*offsets), torch.zeros(1, T, 3, 5, device=DEVICE))
    assert bool((x[:, start:stop] == KEPT).all())
    assert not x[:, :start].any()
    assert not x[:, stop:].any()


@pytest.mark.usefixtures("kept")
def test_what_has_other_rows_is_as_it_came() -> None:
    state = torch.zeros(2, 4, 8, 8, device=DEVICE)
    _, found, none = packed.rooms(call(0, 3, 600), (state, state, None), (False, True, True))
    assert found is not None
    assert bool((found == KEPT).all())
    assert none is None


@pytest.mark.parametrize(("count", "launches"), [(1, 1), (6, 1), (7, 2)])
def test_launches(count: int, launches: int) -> None:
    likes = [torch.zeros(1, T, 4, device="meta")] * count
    for offsets, wanted in ((torch.zeros(3, device="meta"), launches), (None, 0)):
        with tune.recording(tune.TARGETS["sm_90"]) as made:
            packed.rooms(SimpleNamespace(sizes=(1, T), offsets=offsets), likes, [True] * count)
        assert len(made) == wanted


def problems() -> dict[str, dict[str, Any]]:
    """One of each operator, of 70 tokens: what it is given, all of which may have gradients."""
    x, K = (lambda *shape: torch.randn(1, 70, *shape, device=DEVICE)), 8
    gates = -torch.rand(1, 70, 4, K, device=DEVICE)
    keys = {"q": x(2, K), "k": x(2, K), "v": x(4, 5)}
    return {
        "linear": keys | {"log_decay": gates},
        "delta": keys | {"beta": x(4).sigmoid(), "log_decay": gates[..., 0].contiguous()},
        "scan": {"x": x(3), "log_decay": -x(3).abs()},
        "selective_scan": {
            "x": x(3), "dt": x(3).abs(), "A": -torch.rand(3, 4, device=DEVICE), "B": x(4), "C": x(4),
            "skip": torch.randn(3, device=DEVICE),
        },
    }  # fmt: skip


@pytest.mark.parametrize("offsets", [(0, 0, 3, 66, 66), (4, 9, 30)], ids=str)
@pytest.mark.parametrize("name", ["linear", "delta", "scan", "selective_scan"])
def test_outputs_and_gradients_of_tokens_in_no_document_are_zero(
    name: str, offsets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets as they may lie on a GPU, where nobody looks at them; a CPU refuses such."""
    monkeypatch.setattr(gpu, "documents", lambda *_: None)
    leaves = {each: x.requires_grad_() for each, x in problems()[name].items()}
    with poisoned():
        out = FUNCTIONS[name](**leaves, offsets=torch.tensor(offsets, device=DEVICE), backend="triton")
        out = out[0] if isinstance(out, tuple) else out
        found = torch.autograd.grad(out, list(leaves.values()), torch.randn_like(out))
    for each, x in {"out": out, **dict(zip(leaves, found, strict=True))}.items():
        assert x.isfinite().all(), each
        if x.shape[:2] == (1, 70):
            assert not x[:, : offsets[0]].any(), each
            assert not x[:, offsets[-1] :].any(), each
            assert bool(x[:, offsets[0] : offsets[-1]].any()), each
