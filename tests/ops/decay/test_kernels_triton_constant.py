"""The gradient of constant gates, which sums over all tokens: right however little its terms leave of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.check import memory
from foci.core import tune
from foci.ops.decay import gpu
from foci.ops.decay import kernels_triton_constant as constant
from foci.ops.decay.api import linear_attention
from foci.ops.decay.call import bind
from foci.ops.decay.cases import Linear
from foci.ops.draw import Draw
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_triton import there
from tests.ops.recurrences import CPU, error, exact

# Of what its terms are: bfloat16 as two, float16 as three TF32 of its products, float32 as it is.
DIGITS = {torch.bfloat16: 1e-4, torch.float16: 1e-5, torch.float32: 1e-5}
CASES: dict[str, dict[str, Any]] = {
    "no whole chunks": {"B": 2, "T": 150},
    "first state": {"T": 70, "state": True},
    "shared keys": {"T": 130, "H": 4, "G": 2, "state": True},
    "bonus": {"B": 2, "T": 130, "bonus": True, "state": True},
    "documents": {"T": 200, "offsets": (0, 0, 3, 70, 70, 200), "state": True},
    "wide": {"T": 70, "K": 80, "V": 40},
    "extreme gates": {"T": 150, "H": 5, "gates": Draw.extremes},
    "one token of a document": {"T": 4, "offsets": (0, 1, 2, 4)},
}


def problem(more: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    return Linear("", **{"B": 1, "H": 2, "K": 16, "decay": "head", **more}).case.make(dtype, CPU, seed)


def slow(draw: Draw, *shape: int) -> Tensor:
    return 0 * draw.gates(*shape) - 0.003


def of_gates(inputs: dict[str, Any], backend: str, through: slice) -> Tensor:
    """Their gradient through out, the final state, or both."""
    gates = inputs["log_decay"].detach().requires_grad_()
    outputs = linear_attention(**inputs | {"log_decay": gates}, return_state=True, backend=backend)[through]
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw).bfloat16().to(x) for x in outputs]
    return torch.autograd.grad(outputs, gates, weights)[0].cpu().double()


def wrong(inputs: dict[str, Any], through: slice) -> tuple[Tensor, Tensor]:
    """What it is off by, and what it is."""
    with memory.poisoned():
        found = of_gates(there(inputs), "triton", through)
    truth = of_gates(exact(inputs), "chunked", through)
    return found - truth, truth


@pytest.mark.usefixtures("halves")
class TestItsDigits:
    @pytest.mark.parametrize("dtype", DIGITS)
    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("through", [slice(0, 2), slice(0, 1), slice(1, 2)], ids=["both", "out", "state"])
    def test_of_each_case(self, case: str, dtype: torch.dtype, through: slice) -> None:
        apart, truth = wrong(problem(CASES[case], dtype), through)
        assert apart.norm() <= DIGITS[dtype] * truth.norm()

    def test_where_nearly_nothing_is_left(self) -> None:
        """Few tokens of heads that share keys: once 0.2 % of all draws together, 3.2 % of a single one."""
        few = {"T": 200, "H": 4, "G": 1, "K": 32}
        apart, truth = zip(*(wrong(problem(few, torch.bfloat16, seed), slice(0, 1)) for seed in range(12)), strict=True)
        assert torch.cat(apart).norm() <= 2e-5 * torch.cat(truth).norm()
        assert max(float(x.norm() / y.norm()) for x, y in zip(apart, truth, strict=True)) <= 1e-3

    @pytest.mark.parametrize("K", [64, 32])
    def test_where_gates_forget_slowly(self, K: int) -> None:
        """Of states rounded on their way 0.22 %."""
        found = [
            wrong(problem({"T": 640, "H": 4, "K": K, "gates": slow}, torch.bfloat16, seed), slice(0, 1))
            for seed in range(4)
        ]
        apart, truth = (torch.cat(each) for each in zip(*found, strict=True))
        assert apart.norm() <= 2e-5 * truth.norm()


@pytest.mark.parametrize("blocks", [(16, 16), (16, 64), (64, 16)])
def test_any_blocks_of_a_state(blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem({"T": 130, "K": 40, "V": 72, "state": True}, torch.float32)
    config = tune.Config(dict(zip(("BLOCK_K", "BLOCK_V"), blocks, strict=True)), warps=4, stages=1)
    monkeypatch.setattr(constant, "rule", lambda *_: config)
    apart, truth = wrong(inputs, slice(0, 2))
    assert apart.norm() <= 1e-5 * truth.norm()


def test_what_is_no_number_stays_where_it_is() -> None:
    """A document without tokens has no gate, and of a last token's value nothing is read behind it."""
    inputs = problem({"T": 70, "offsets": (0, 0, 70), "state": True}, torch.float32)
    call = bind(**there(inputs))
    outputs, d_final = gpu.forward(call, True), torch.ones_like(call.state)
    d_final[0] = torch.nan
    lost = call._replace(v=call.v.clone())
    lost.v[0, 69] = torch.nan
    of_gates = [False] * 3 + [True, False, False]
    for given, grads in ((call, (None, d_final)), (lost, (torch.ones_like(call.v), None))):
        found = gpu.backward(given, outputs, grads, of_gates)[3]
        assert found is not None and found.isfinite().all()


@pytest.mark.parametrize("T", [5, 40])
def test_gates_above_0_overflow_no_sooner_than_they_must(T: int) -> None:
    """Nobody checks for them."""
    inputs = problem({"T": T, "state": True, "gates": lambda draw, *shape: 0 * draw.gates(*shape) + 1.5}, torch.float32)
    apart, truth = wrong(inputs, slice(0, 2))
    assert truth.norm() > 0 and apart.norm() <= 1e-5 * truth.norm()


def test_no_other_gradient_knows_whether_it_is_wanted() -> None:
    call = bind(**there(problem({"T": 150, "state": True}, torch.float16)))
    outputs, grads = gpu.forward(call, True), (torch.randn_like(call.v), torch.randn_like(call.state))
    every, rest = (gpu.backward(call, outputs, grads, [True] * 3 + [wanted, False, True]) for wanted in (True, False))
    assert every[3] is not None and rest[3] is None
    assert all(x.equal(y) for x, y in zip(every, rest, strict=True) if x is not None and y is not None)


def test_tensors_of_any_strides() -> None:
    inputs = there(problem({"B": 2, "T": 70, "state": True}, torch.float32))
    spread = {n: torch.stack([x] * 2, -1)[..., 0] if isinstance(x, Tensor) else x for n, x in inputs.items()}
    spread["state"] = inputs["state"].transpose(2, 3).contiguous().transpose(2, 3)
    one, other = (of_gates(each, "triton", slice(0, 2)) for each in (inputs, spread))
    assert error(other, one) <= 1e-6


def test_gradients_of_any_strides() -> None:
    call = bind(**there(problem({"B": 2, "T": 70, "state": True}, torch.float32)))
    outputs, needs = gpu.forward(call, True), [False] * 3 + [True, False, False]
    expanded = call.v.new_ones(()).expand(call.v.shape), call.state.new_ones(()).expand(call.state.shape)
    whole = torch.ones_like(call.v), torch.ones_like(call.state)
    spread = torch.stack([whole[0]] * 2, -1)[..., 0], whole[1].transpose(2, 3).contiguous().transpose(2, 3)
    wanted = gpu.backward(call, outputs, whole, needs)[3]
    for each in (expanded, spread):
        assert error(gpu.backward(call, outputs, each, needs)[3], wanted) <= 1e-6


@pytest.mark.parametrize("target", tune.TARGETS.values(), ids=tune.TARGETS)
def test_two_launches_are_all_it_takes(target: tune.Target) -> None:
    q = torch.empty(1, 8192, 4, 64, dtype=torch.bfloat16, device="meta")
    call = bind(q, q, q, log_decay=torch.empty(4, device="meta"))
    with tune.record_launches(target) as launches:
        outputs = gpu.forward(call, True)
        made = len(launches)
        found = gpu.backward(call, outputs, (torch.empty_like(q), None), [False] * 3 + [True, False, False])
    assert [launch.kernel.fn.__name__ for launch in launches[made:]] == ["constant_kernel", "sums_kernel"]
    assert [x is None for x in found] == [True] * 3 + [False] + [True] * 2
