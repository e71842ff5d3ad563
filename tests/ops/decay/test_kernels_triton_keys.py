"""Gradients of queries, keys and gates in half precision: far tokens among near ones, heads shared by programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.check import memory
from foci.core import tune
from foci.core.tune import Config
from foci.ops import gpu
from foci.ops.decay import kernels_triton_keys as keys
from foci.ops.decay import kernels_triton_pairs
from foci.ops.decay.api import linear_attention
from foci.ops.decay.call import bind
from foci.ops.decay.spec import SPEC
from foci.ops.draw import Draw
from tests.ops.decay.test_kernels_triton_forward import problem
from tests.ops.in_triton import DEVICE, there
from tests.ops.recurrences import BUDGET, answers, error, exact


def apart(inputs: dict[str, Any]) -> dict[str, float]:
    """In float16, from the equation in float64."""
    inputs = inputs | {name: inputs[name].half() for name in ("q", "k", "v")}
    found, truth = (
        answers(linear_attention, SPEC, made(inputs), by) for made, by in ((there, "triton"), (exact, "reference"))
    )
    return {name: error(found[name].cpu(), truth[name]) for name in truth}


def gates_of(kind: str, *shape: int) -> torch.Tensor:
    if kind == "mixed":
        return Draw(torch.float32, torch.device("cpu"), 0).extremes(*shape)
    return -3.0 * torch.rand(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["mixed", "meeting"])
@pytest.mark.parametrize("bonus", [False, True])
def test_far_tokens_are_added(kind: str, bonus: bool) -> None:
    inputs = problem(100, H=4, K=40, decay="channel", **({"bonus": torch.ones(4, 40)} if bonus else {}))
    inputs |= {"q": inputs["q"][:, :, :2], "k": inputs["k"][:, :, :2]}
    inputs["log_decay"] = gates_of(kind, *inputs["log_decay"].shape)
    errors = apart(inputs)
    assert max(errors.values()) < BUDGET[torch.float16], errors


def test_far_tokens_of_a_block_are_added_by_narrower_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(70, H=2, K=40, decay="channel")
    inputs["log_decay"] = gates_of("meeting", 1, 70, 2, 40)
    monkeypatch.setattr(keys, "keys_rule", lambda *_: Config({"BLOCK_K": 64, "BLOCK_V": 16}))
    errors = apart(inputs)
    assert max(errors.values()) < BUDGET[torch.float16], errors


@pytest.mark.parametrize("share", [1, 3, 5])
def test_any_share_of_the_heads_of_a_group(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(70, H=5, decay="token")
    inputs |= {"q": inputs["q"][:, :, :1], "k": inputs["k"][:, :, :1]}
    monkeypatch.setattr(keys, "_share", lambda *_: share)
    errors = apart(inputs)
    assert max(errors.values()) < BUDGET[torch.float16], errors


@pytest.mark.parametrize("offsets", [None, (0, 1, 1, 70, 90)])
@pytest.mark.parametrize("decay", ["token", "head"])
def test_gates_of_all_channels_are_summed_by_one_program(
    decay: str, offsets: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "keys_rule", lambda *_: Config({"BLOCK_K": 16, "BLOCK_V": 16}))
    inputs = problem(90, H=3, K=40, V=24, decay=decay)
    errors = apart(inputs | ({} if offsets is None else {"offsets": torch.tensor(offsets)}))
    assert "log_decay" in " ".join(errors) and max(errors.values()) < BUDGET[torch.float16], errors


@pytest.mark.parametrize("decay", ["token", "head", "channel"])
def test_parts_that_no_document_has_are_not_summed(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anything clear them: heads of a group and blocks of channels have parts, which hold what memory held."""
    monkeypatch.setattr(gpu, "documents", lambda *_: None)  # a CPU refuses offsets that leave the first tokens out
    monkeypatch.setattr(keys, "keys_rule", lambda *_: Config({"BLOCK_K": 16, "BLOCK_V": 16}))
    monkeypatch.setattr(keys, "_share", lambda *_: 2)
    inputs = there(problem(90, H=5, K=40, decay=decay))
    inputs |= {name: inputs[name][:, :, :1].contiguous() for name in "qk"}
    weights = torch.randn(inputs["v"].shape, device=DEVICE)

    def gradients(rows: slice, *offsets: int) -> dict[str, torch.Tensor]:
        leaves = {name: (x[:, rows] if len(x.shape) > 1 else x).requires_grad_() for name, x in inputs.items()}
        with memory.poisoned():
            out, _ = linear_attention(**leaves, offsets=torch.tensor(offsets, device=DEVICE), backend="triton")
            return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), weights[:, rows]), strict=True))

    some = gradients(slice(20, 80), 0, 30, 60)
    for name, x in gradients(slice(0, 90), 20, 50, 80).items():
        if len(x.shape) > 1:
            assert not x[:, :20].any() and not x[:, 80:].any(), name
            x = x[:, 20:80]
        assert torch.equal(x, some[name]), name


@pytest.mark.parametrize(
    "target, groups, parts",
    [("sm_90", 1, 0), ("sm_80", 1, 1), ("sm_90", 2, 1)],
)
def test_who_has_all_channels_leaves_nothing_to_sum(target: str, groups: int, parts: int) -> None:
    inputs = {name: x.bfloat16() if name in "qkv" else x for name, x in problem(130, H=4, K=256, decay="token").items()}
    inputs |= {name: inputs[name][:, :, ::groups] for name in "qk"}
    call = bind(**inputs)
    states, do = torch.empty(3, 4, 256, 8).bfloat16(), torch.empty_like(call.v)
    found = [torch.empty_like(x) for x in (call.q, call.k, call.log_decay)]
    with tune.record_launches(tune.TARGETS[target]) as launches:
        keys.backward(call, None, states, torch.empty_like(states), do, (*found, None), 3)
    names = [launch.kernel.fn.__name__ for launch in launches]
    assert names == ["keys_kernel", *["sums_kernel"] * parts]


def test_a_sum_that_rounding_puts_below_the_bound_loses_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sum is the bound itself, one before it below: as a parallel scan may give it."""
    seeds = (torch.Generator().manual_seed(seed) for seed in range(3))
    inputs = {name: torch.randn(1, 64, 1, 16, generator=seed).half() for name, seed in zip("qkv", seeds, strict=True)}
    inputs["log_decay"] = torch.zeros(1, 64, 1, 16)
    inputs["log_decay"][:, :30] = -2.0
    real = kernels_triton_pairs.prepared

    def moved(*arguments: Any) -> Any:
        made = real(*arguments)
        if made is not None and made.sums is not None:
            made.sums[:, 40] = torch.nextafter(torch.tensor(-60.0), torch.tensor(-61.0))
            made.far.fill_(1)  # as who makes such sums would say
        return made

    monkeypatch.setattr(kernels_triton_pairs, "prepared", moved)
    wanted = answers(linear_attention, SPEC, exact(inputs), "reference")
    found = answers(linear_attention, SPEC, there(inputs), "triton")
    assert max(error(found[name].cpu(), x) for name, x in wanted.items() if x.numel()) <= BUDGET[torch.float16]
