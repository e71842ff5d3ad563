"""One token per row, in place, by a kernel: each launch against the step in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.core import tune
from foci.ops.kernels_triton_step import rule, step, step_kernel
from tests.ops.in_triton import DEVICE, DTYPES
from tests.ops.recurrences import BUDGET, error

B, G, H, K, V = 3, 2, 4, 20, 33
STEPS = {"linear": foci.linear_attention_step, "delta": foci.delta_rule_step}
each = pytest.mark.parametrize("operator", STEPS)
EXTREMES = torch.tensor([0.0, -1e-6, -20.0, -1e4, -torch.inf])


def gates(kind: str | None) -> Tensor | None:
    shape = {None: None, "head": (H,), "token": (B, H), "channel": (B, H, K)}[kind]
    return None if shape is None else EXTREMES[torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(1))]


def drawn(
    operator: str, dtype: torch.dtype, kind: str | None = None, extra: bool = False, states: int = B
) -> dict[str, Any]:
    """What the kernel takes; `extra`: a bonus or the delta rule's keys to erase."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    made = {"q": normal(B, G, K), "k": normal(B, G, K) / K**0.5, "v": normal(B, H, V)}
    if operator == "delta":
        made |= {"beta": 2 * torch.rand(B, H, generator=draw)} | ({"erase": normal(B, G, K) / K**0.5} if extra else {})
    elif extra:
        made["bonus"] = normal(H, K)
    made = {name: x.to(dtype) for name, x in made.items()}
    return made | {"state": normal(states, H, K, V), "log_decay": gates(kind)}


def apart(operator: str, inputs: dict[str, Any], dtype: torch.dtype, slots: Tensor | None = None) -> None:
    """Run both; out and the whole state must agree, and the state stay where it is."""
    decay = inputs["log_decay"]
    in_form = None if decay is None else (decay[None, :, None] if decay.dim() == 1 else decay.view(B, H, -1))
    here = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in (inputs | {"log_decay": in_form}).items()}
    here["state"] = inputs["state"].to(DEVICE, copy=True)
    with torch.no_grad():
        found = step(**here, scale=0.3, slots=None if slots is None else slots.to(DEVICE))
        exact = {n: x.double() if isinstance(x, Tensor) else x for n, x in inputs.items()}
        truth = STEPS[operator](**exact, scale=0.3, slots=slots)
    assert found.dtype == dtype
    assert error(found.cpu(), truth) <= BUDGET[dtype]
    assert error(here["state"].cpu(), exact["state"]) <= 1e-6


@each
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("kind", [None, "head", "token", "channel"])
def test_one_token(operator: str, kind: str | None, extra: bool, dtype: torch.dtype) -> None:
    apart(operator, drawn(operator, dtype, kind, extra), dtype)


@each
def test_any_strides(operator: str) -> None:
    inputs = drawn(operator, torch.float32, "channel", True)
    apart(operator, {n: x.movedim(-1, 0).contiguous().movedim(0, -1) for n, x in inputs.items()}, torch.float32)


@each
@pytest.mark.parametrize("whole", [torch.int32, torch.int64])
def test_slots_and_padding_touch_only_their_states(operator: str, whole: torch.dtype) -> None:
    inputs, slots = drawn(operator, torch.float32, "token", states=5), torch.tensor([3, -1, 0], dtype=whole)
    inputs["v"][1] = torch.nan  # what a row of padding holds does not matter
    inputs["log_decay"][1] = torch.nan
    before = inputs["state"].clone()
    if DEVICE.type == "cpu":
        apart(operator, inputs, torch.float32, slots)
    here = {n: x.to(DEVICE) for n, x in inputs.items()} | {"log_decay": inputs["log_decay"].view(B, H, 1).to(DEVICE)}
    here["state"] = before.to(DEVICE).clone()
    apart_in_memory = slots.to(DEVICE).repeat_interleave(2)[::2]
    out = step(**here, scale=0.3, slots=apart_in_memory)
    assert torch.equal(out[1].cpu(), torch.zeros(H, V))
    untouched = here["state"].cpu()
    assert all(torch.equal(untouched[m], before[m]) != (m in (0, 3)) for m in range(5))


@each
def test_slots_out_of_range_read_and_write_nothing(operator: str) -> None:
    inputs = drawn(operator, torch.float32)
    before = inputs["state"].clone()
    here = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in inputs.items()}
    out = step(**here, scale=0.3, slots=torch.tensor([B, -7, 2**40]).to(DEVICE))
    assert torch.equal(out.cpu(), torch.zeros(B, H, V)) and torch.equal(here["state"].cpu(), before)


@each
def test_one_launch_and_no_allocation_but_the_output(operator: str) -> None:
    meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in drawn(operator, torch.float16).items()}
    with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
        out = step(**meta, scale=1.0, slots=torch.zeros(B, dtype=torch.int64, device="meta"))
    assert [launch.kernel for launch in launches] == [step_kernel]
    assert out.dtype == torch.float16 and out.shape == (B, H, V)


@pytest.mark.parametrize("target", tune.TARGETS.values(), ids=tune.TARGETS)
def test_rule_fills_the_gpu_and_holds_a_head_in_registers(target: tune.Target) -> None:
    for heads in (1, 32, 4096):
        for size in (1, 16, 64, 128, 200, 512):
            config = rule(target, heads, size, size)
            assert config["BLOCK_K"] >= size and config["BLOCK_K"] * config["BLOCK_V"] <= 8192 * 2
