"""Memory for what packed documents give: 0 behind the last one, and nothing written before it."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foci.check.memory import poisoned
from foci.core import tune
from foci.ops import FUNCTIONS, SPECS, gpu
from tests.ops.in_triton import DEVICE

from foci.ops import kernels_triton_packed as packed  # isort: skip  after Triton's presence is known

T, KEPT = 700, 7.0
WIDTHS: list[tuple[int, ...]] = [(4, 32), (1,), (7,), (3, 5), (2, 1), (128,), (9,)]


def call(*offsets: int) -> Any:
    """All that is asked of one."""
    found = torch.tensor(offsets, device=DEVICE) if offsets else None
    return SimpleNamespace(sizes=(1, T), offsets=found, state=None)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is `KEPT`."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(*shape, KEPT, **options))


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("end", [0, 1, 64, 699, T])
def test_what_no_document_has_is_zero_and_nothing_else_is_written(end: int, dtype: torch.dtype) -> None:
    likes = [torch.zeros(1, T, *width, dtype=dtype, device=DEVICE) for width in WIDTHS]
    all_of, one = packed.rooms(call(0, end // 2, end), likes, [True] * len(likes)), packed.room(call(0, end), likes[0])
    for found, rest in (all_of, ([one[0]], one[1])):
        rest.end()
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
    x, rest = packed.room(call(*offsets), torch.zeros(1, T, 3, 5, device=DEVICE))
    rest.end()
    assert bool((x[:, start:stop] == KEPT).all())
    assert not x[:, :start].any()
    assert not x[:, stop:].any()


@pytest.mark.usefixtures("kept")
def test_what_has_other_rows_is_as_it_came() -> None:
    state = torch.zeros(2, 4, 8, 8, device=DEVICE)
    (_, found, none), rest = packed.rooms(call(0, 3, 600), (state, state, None), (False, True, True))
    rest.end()
    assert found is not None
    assert bool((found == KEPT).all())
    assert none is None


@pytest.mark.usefixtures("kept")
def test_a_state_of_as_many_heads_as_tokens_and_a_bonus_of_as_many_channels_are_no_tokens() -> None:
    state, bonus = torch.zeros(1, T, 2, 2, device=DEVICE), torch.zeros(1, T, device=DEVICE)
    given = call(0, 3)
    given.state = state
    found, rest = packed.rooms(given, (state, bonus), (True, True))
    rest.end()
    assert all(x is not None and bool((x == KEPT).all()) for x in found)


def test_what_another_launch_has_taken_is_not_cleared_again() -> None:
    x = torch.zeros(1, T, 4, device="meta")
    offsets = torch.zeros(3, device="meta")
    with tune.record_launches(tune.TARGETS["sm_90"]) as made:
        _, rest = packed.room(SimpleNamespace(sizes=(1, T), offsets=offsets, state=None), x)
        programs, (*tensors, widths) = rest.taken()
        rest.end()
    assert programs and len(tensors) == packed.MOST and widths[0] == 4 and not made
    assert rest.taken() == (0, (None,) * 7)


@pytest.mark.parametrize(
    ("operator", "gates", "forward", "backward"),
    [("linear", 4, 2, 3), ("linear", 3, 2, 3), ("linear", 0, 2, 3), ("delta", 3, 2, 4), ("delta", 4, 4, 5)],
)
def test_documents_take_no_launch_more_where_another_has_programs_for_them(
    operator: str, gates: int, forward: int, backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLA, simple GLA, no gates (whose launches are one fewer), Gated DeltaNet, Kimi Delta Attention: on Hopper."""
    monkeypatch.setattr(import_module("foci.ops.delta.gpu"), "with_gluon", lambda: False)  # by Gluon 3 backward, not 4
    spec, q = SPECS[operator], torch.empty(1, 4096, 64, 128, dtype=torch.bfloat16, device="meta")
    inputs = {"q": q, "k": q, "v": q, "offsets": torch.empty(3, dtype=torch.int64, device="meta")}
    if operator == "delta":
        inputs["beta"] = q[..., 0]
    if gates:
        inputs["log_decay"] = q.float() if gates == 4 else q[..., 0].float()
    one, module = spec.bind(**inputs), import_module(f"foci.ops.{'decay' if operator == 'linear' else operator}.gpu")
    with tune.record_launches(tune.TARGETS["sm_90"]) as made:
        outputs = module.forward(one, True)
    assert len(made) == forward
    needs = [getattr(one, name) is not None for name in spec.differentiable]
    with tune.record_launches(tune.TARGETS["sm_90"]) as made:
        module.backward(one, outputs, (outputs[0], None), needs)
    assert len(made) == backward


@pytest.mark.parametrize(("count", "launches"), [(1, 1), (6, 1), (7, 2)])
def test_launches(count: int, launches: int) -> None:
    likes = [torch.zeros(1, T, 4, device="meta")] * count
    for offsets, wanted in ((torch.zeros(3, device="meta"), launches), (None, 0)):
        with tune.record_launches(tune.TARGETS["sm_90"]) as made:
            packed.rooms(SimpleNamespace(sizes=(1, T), offsets=offsets, state=None), likes, [True] * count)[1].end()
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
