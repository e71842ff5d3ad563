"""Far chunks of gates per channel are made beside what does not wait for them: who may begin when, and equal bits."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core import tune
from foci.core.tensor_maps import tensor_of
from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
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


def call_of(device: str, B: int = 2, T: int = 512, H: int = 40, offsets: tuple[int, ...] = ()) -> Call:
    """Some gates forget all at once: where two of a chunk do, it has far rows, and every third head has none."""
    problem = Delta("", B=1 if offsets else B, T=T, H=H, K=128, decay="channel", offsets=offsets)
    inputs: dict[str, Any] = problem.case.make(torch.bfloat16, torch.device(device), 0)
    gates = inputs["log_decay"]
    if device != "meta":
        for first in 7, 9:
            gates[:, first::113, 0::3] = -90.0
        for first in 50, 51:
            gates[:, first::201, 1::3, ::5] = -200.0
        gates[:, 100::301, 2::3] = -90.0
    return bind(**inputs)


@pytest.mark.parametrize("offsets", [(), (0, 0, 100, 100, 512)])
@pytest.mark.parametrize("name", tune.TARGETS)
def test_the_launch_behind_the_far_ones_alone_begins_beside_them(name: str, offsets: tuple[int, ...]) -> None:
    target, call = tune.TARGETS[name], call_of("meta", offsets=offsets)
    with tune.record_launches(target) as launches:
        gpu.forward(call)
        assert not any("launch_pdl" in launch.meta for launch in launches)  # inference gains nothing by it
        launches.clear()
        made = gpu.forward(call, True)
        gpu.backward(call, made, (torch.empty_like(made[0]), torch.empty_like(made[1])), GRADIENTS)
    able = target.kind == "cuda" and target.arch >= 90
    behind = {}
    for one, other in pairwise(launches):
        if "launch_pdl" in other.meta:
            behind[other.kernel.fn.__name__] = one.kernel.fn.__name__
            assert one.meta["FAR"] and one.meta["BESIDE"] and "launch_pdl" not in one.meta
            assert other.meta["BESIDE"] and not other.meta.get("FAR")
            # No memory of the first is given back before the second is there: that could be the second one's.
            kept = [*tensors(other.arguments), *tensors([*call, *made])]
            assert all(any(x is y or x._base is y._base is not None for y in kept) for x in tensors(one.arguments))
    turned = {"channel_walk_kernel": "near_chunks_kernel"} if name == "sm_90" else {}  # others ask for no flags
    assert behind == ({**turned, "near_side_kernel": "near_side_kernel"} if able else {})
    assert all(each.meta["BESIDE"] == able for each in launches if each.kernel.fn.__name__ == "near_side_kernel")


def tensors(told: Iterable[Any]) -> list[Tensor]:
    """What a launch is told of, by maps too."""
    return [x for x in map(tensor_of, told) if isinstance(x, Tensor)]


def all_of(call: Call) -> list[Tensor]:
    """Outputs of inference and of training, and all gradients."""
    made = gpu.forward(call, True)
    generator = torch.Generator(made[0].device).manual_seed(0)
    into = [torch.empty_like(x).normal_(generator=generator) for x in made[:2]]
    found = gpu.backward(call, made, (into[0], into[1]), GRADIENTS)
    return [*gpu.forward(call), *made[:2], *(x for x in found if x is not None)]


@pytest.mark.skipif(not HOPPER, reason="one launch begins beside another on a GPU alone, and there is no Hopper here")
@pytest.mark.parametrize(
    ("B", "T", "H", "offsets"),
    [(2, 512, 40, ()), (1, 4096, 32, ()), (3, 200, 64, ()), (1, 900, 32, (0, 0, 290, 290, 900))],
)
def test_bits_are_those_of_launches_behind_each_other(
    B: int, T: int, H: int, offsets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of("cuda", B, T, H, offsets)
    found, played = [all_of(call) for _ in range(5)], []
    q, k, v, beta, gates = (x.detach().requires_grad_() for x in (call.q, call.k, call.v, call.beta, call.log_decay))
    into = torch.randn_like(v)
    for _ in range(4):  # plans play from the third on
        out, _state = delta_rule(q, k, v, beta=beta, log_decay=gates, offsets=call.offsets, backend="triton")
        played.append([out.detach(), *torch.autograd.grad(out, (q, k, v, beta, gates), into)])
    graph, into_all = torch.cuda.CUDAGraph(), [torch.randn_like(x) for x in found[0][:2]]
    with torch.cuda.graph(graph):
        made = gpu.forward(call, True)
        captured = [*made[:2], *gpu.backward(call, made, (into_all[0], into_all[1]), GRADIENTS)[:5]]
    graph.replay()
    for module in (channel_chunks, walks, channels):
        monkeypatch.setattr(module, "dependent_launch", lambda target, second: {"BESIDE": False})
    wanted = all_of(call)
    assert all(x.equal(y) for each in found for x, y in zip(each, wanted, strict=True))
    assert all(x.equal(y) for each in played for x, y in zip(each, played[0], strict=True))
    assert played[0][0].equal(wanted[0])
    made = gpu.forward(call, True)
    again = [*made[:2], *gpu.backward(call, made, (into_all[0], into_all[1]), GRADIENTS)[:5]]
    assert all(x.equal(y) for x, y in zip(captured, again, strict=True) if x is not None)
