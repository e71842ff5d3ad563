"""Far chunks of gates per channel are made beside what does not wait for them: who may begin when, and equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core import tune
from foci.ops.delta import gpu
from foci.ops.delta.call import Call, bind
from foci.ops.delta.cases import Delta

if tune.interpreting():
    pytest.skip("its launches are those of a GPU, and Triton is its interpreter here", allow_module_level=True)

pytest.importorskip("triton")
from foci.ops.delta import kernels_triton_channel_chunks as channel_chunks
from foci.ops.delta import kernels_triton_channel_walks as walks
from foci.ops.delta import kernels_triton_channels as channels

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
GRADIENTS = [True] * 5 + [False] * 2


def call_of(device: str, B: int = 2, T: int = 512, H: int = 40) -> Call:
    """Some gates forget all at once: their chunks have far rows, and every third head none."""
    inputs: dict[str, Any] = Delta("", B=B, T=T, H=H, K=128, decay="channel").case.make(
        torch.bfloat16, torch.device(device), 0
    )
    gates = inputs["log_decay"]
    if device != "meta":
        gates[:, 7::113, 0::3] = -90.0
        gates[:, 50::201, 1::3, ::5] = -200.0
    return bind(**inputs)


@pytest.mark.parametrize("name", tune.TARGETS)
def test_the_launch_behind_the_far_ones_alone_begins_beside_them(name: str) -> None:
    target, call = tune.TARGETS[name], call_of("meta")
    with tune.recording(target) as launches:
        gpu.forward(call)
        assert not any("launch_pdl" in launch.meta for launch in launches)  # inference gains nothing by it
        launches.clear()
        made = gpu.forward(call, True)
        gpu.backward(call, made, (torch.empty_like(made[0]), torch.empty_like(made[1])), GRADIENTS)
    found = [
        (launch.kernel.fn.__name__, launch.meta.get("FAR"), launch.meta.get("launch_pdl", False)) for launch in launches
    ]
    able = target.kind == "cuda" and target.arch >= 90
    assert [each for each in found if each[0].startswith("near")] == [
        ("near_chunks_kernel", False, False), ("near_chunks_kernel", True, False),
        ("near_side_kernel", True, False), ("near_side_kernel", False, able),
    ]  # fmt: skip
    assert all(launch.meta["BESIDE"] == able for launch in launches if launch.kernel.fn.__name__ == "near_side_kernel")
    # A walk that is not turned over asks for no flags: it is launched as ever, behind all that was.
    walk = next(each for each in found if "walk" in each[0])
    assert walk[2] == (walk[0] == "channel_walk_kernel" and able) and (walk[0] == "channel_walk_kernel") == (
        name == "sm_90"
    )


def all_of(call: Call) -> list[Tensor]:
    """Outputs of inference and of training, and all gradients."""
    torch.manual_seed(0)
    made = gpu.forward(call, True)
    into = torch.randn_like(made[0]), torch.randn_like(made[1])
    found = gpu.backward(call, made, into, GRADIENTS)
    return [*gpu.forward(call), *made[:2], *(x for x in found if x is not None)]


@pytest.mark.skipif(not HOPPER, reason="one launch begins beside another on a GPU alone, and there is no Hopper here")
@pytest.mark.parametrize(("B", "T", "H"), [(2, 512, 40), (1, 4096, 32), (3, 200, 64)])
def test_bits_are_those_of_launches_behind_each_other(B: int, T: int, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of("cuda", B, T, H)
    found = [all_of(call) for _ in range(5)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gpu.forward(call)
    graph.replay()
    for module in (channel_chunks, walks, channels):
        monkeypatch.setattr(module, "beside", lambda target: {"BESIDE": False})
    wanted = all_of(call)
    assert all(x.equal(y) for each in found for x, y in zip(each, wanted, strict=True))
    assert captured[0].equal(wanted[0])
