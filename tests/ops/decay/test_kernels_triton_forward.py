"""The forward kernels of linear attention: lengths, widths, causality, memory, launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from foci.check import memory
from foci.core import tune
from foci.ops import stretches
from foci.ops.decay import gpu, reference
from foci.ops.decay.call import bind
from foci.ops.draw import Draw
from tests.ops.in_triton import DEVICE, there
from tests.ops.recurrences import BUDGET, error, exact


def problem(
    T: int, B: int = 1, H: int = 1, K: int = 8, V: int = 8, decay: str = "token", **more: Any
) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(T)
    made = {name: torch.randn(B, T, H, D, generator=draw) for name, D in (("q", K), ("k", K), ("v", V))}
    shape = {"head": (H,), "token": (B, T, H), "channel": (B, T, H, K)}.get(decay)
    gates = (
        {} if shape is None else {"log_decay": torch.nn.functional.logsigmoid(torch.randn(shape, generator=draw) + 2)}
    )
    return made | gates | more


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence is cut into stretches of one chunk."""
    monkeypatch.setattr(stretches, "cut", lambda _, N, B, T, packed, *__: stretches.cut_into(64, N, T, packed))


def errors(inputs: dict[str, Any]) -> list[float]:
    with memory.poisoned():
        found = gpu.forward(bind(**there(inputs)))
    return [error(x.cpu(), y) for x, y in zip(found, reference.forward(bind(**exact(inputs))), strict=True)]


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 129])
def test_lengths_around_a_chunk(T: int) -> None:
    for decay in ("none", "token", "channel"):
        assert max(errors(problem(T, decay=decay))) < BUDGET[torch.float32], decay


@pytest.mark.parametrize("decay, K, V", [("none", 20, 12), ("token", 130, 130), ("channel", 20, 12)])
def test_widths_that_are_no_powers_of_two(decay: str, K: int, V: int) -> None:
    assert max(errors(problem(66, K=K, V=V, decay=decay))) < BUDGET[torch.float32]


@pytest.mark.parametrize("offsets", [(0, 0, 0, 70), (0, 64, 64, 65, 70, 70), (0, 70)])
def test_documents_also_empty_ones(offsets: tuple[int, ...]) -> None:
    state = torch.randn(len(offsets) - 1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    inputs = problem(70, offsets=torch.tensor(offsets), state=state)
    assert max(errors(inputs)) < BUDGET[torch.float32]


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_gates_of_every_size_in_one_chunk(decay: str) -> None:
    inputs = problem(70, H=3, decay=decay)
    inputs["log_decay"] = Draw(torch.float32, torch.device("cpu"), 0).extremes(*inputs["log_decay"].shape)
    assert max(errors(inputs)) < BUDGET[torch.float32]


@pytest.mark.parametrize("T, tokens", [(64, 64), (65, 64), (200, 64), (330, 128)])
def test_lengths_cut(T: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "cut", lambda _, N, B, T, packed, *__: stretches.cut_into(tokens, N, T, packed))
    state = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for decay in ("none", "head", "token", "channel"):
        assert max(errors(problem(T, B=2, decay=decay, state=state))) < BUDGET[torch.float32], decay


@pytest.mark.parametrize("decay, K, V", [("token", 130, 70), ("channel", 20, 12)])
def test_widths_cut(decay: str, K: int, V: int, cut: None) -> None:
    assert max(errors(problem(150, K=K, V=V, decay=decay))) < BUDGET[torch.float32]


def test_views_of_any_stride() -> None:
    inputs = problem(66, H=2, decay="channel")
    assert max(errors(memory.strided(inputs))) < BUDGET[torch.float32]
    turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    assert max(errors(turned)) < BUDGET[torch.float32]


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
@pytest.mark.parametrize("whole", [True, False])
def test_what_comes_later_changes_no_bit_of_what_comes_before(
    whole: bool, decay: str, request: pytest.FixtureRequest
) -> None:
    T, at = (70, 40) if whole else (200, 70)
    if not whole:
        request.getfixturevalue("cut")
    inputs = there(problem(T, decay=decay))
    before = gpu.forward(bind(**inputs))[0][:, :at]
    for name in ("q", "k", "v"):
        inputs[name][:, at:] = 3 * inputs[name][:, at:] - 1
    if decay != "head":
        inputs["log_decay"][:, at:] = -torch.inf
    assert torch.equal(gpu.forward(bind(**inputs))[0][:, :at], before)


@pytest.mark.parametrize("heads", [1, 128])
@pytest.mark.parametrize("target", tune.TARGETS.values(), ids=tune.TARGETS)
def test_two_launches_one_more_for_pairs_or_for_documents_and_where_few_heads_are_cut(
    target: tune.Target, heads: int
) -> None:
    """In float16, and on all but Hopper (test_kernels_triton_walks.py)."""
    meta = torch.device("meta")
    q, offsets = torch.empty(1, 8192, heads, 128, dtype=torch.float16, device=meta), torch.empty(4, device=meta).int()
    calls = [bind(q, q, q), bind(q, q, q, causal=False), bind(q, q, q, log_decay=q, offsets=offsets)]
    calls += [bind(q, q, q, log_decay=q[..., 0], bonus=q[0, 0]), bind(q, q, q, offsets=offsets)]
    for call in calls:
        for keep in (False, True):
            with tune.record_launches(target) as launches:
                gpu.forward(call, keep)
            counted = Counter(launch.kernel.fn.__name__ for launch in launches)
            channel = call.log_decay is not None and call.log_decay.shape[3] > 1
            pairs = {"pairs_kernel": 1} if channel else {}
            rest = {} if call.offsets is None or channel else {"rest_kernel": 1}  # pairs_kernel does that too
            assert counted == {"states_kernel": 2 if heads == 1 else 1, "out_kernel": 1} | pairs | rest


def test_what_is_kept_is_the_state_at_each_chunks_start() -> None:
    inputs = problem(130)
    kept = gpu.forward(bind(**there(inputs)), True)[2]
    assert not kept[0].any()
    for slot in (1, 2):
        part = {name: x[:, : 64 * slot] for name, x in exact(inputs).items()}
        assert error(kept[slot].cpu(), reference.forward(bind(**part))[1][0]) < BUDGET[torch.float32]
    assert kept.device.type == DEVICE.type
