"""The backward kernels of linear attention: every case of the Spec, lengths, widths, memory, launches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from foci.check import memory
from foci.core import tune
from foci.ops.decay import gpu
from foci.ops.decay.api import linear_attention
from foci.ops.decay.call import Call, bind
from foci.ops.decay.spec import SPEC
from foci.ops.draw import Draw
from tests.ops.decay.test_kernels_triton_forward import cut, problem  # noqa: F401  a fixture
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_triton import DTYPES, InTriton, there
from tests.ops.recurrences import BUDGET, error, inputs_of

NAMES = ("q", "k", "v", "log_decay", "bonus", "state")


class TestInTriton(InTriton):
    spec, function, module = SPEC, staticmethod(linear_attention), gpu

    def right(self, inputs: dict[str, Any], truth_by: str = "reference") -> None:
        with memory.poisoned():
            errors = self.apart(inputs, truth_by)
        assert all(e <= BUDGET[inputs["v"].dtype] for e in errors.values()), errors

    @pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 129])
    def test_lengths_around_a_chunk(self, T: int) -> None:
        state = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        for decay in ("token", "channel"):
            self.right(problem(T, decay=decay, state=state))

    @pytest.mark.parametrize("decay, K, V", [("head", 20, 12), ("channel", 20, 12), ("token", 130, 130)])
    def test_widths_that_are_no_powers_of_two(self, decay: str, K: int, V: int) -> None:
        self.right(problem(20, K=K, V=V, decay=decay, bonus=torch.ones(1, K)))

    @pytest.mark.parametrize("decay", ["head", "channel"])
    def test_documents_also_empty_ones(self, decay: str) -> None:
        state = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        self.right(problem(70, decay=decay, offsets=torch.tensor((0, 0, 64, 64, 65, 70)), state=state))

    @pytest.mark.parametrize("decay", ["head", "token", "channel"])
    def test_gates_of_every_size_in_one_chunk(self, decay: str) -> None:
        inputs = problem(70, H=3, decay=decay)
        inputs["log_decay"] = Draw(torch.float32, torch.device("cpu"), 0).extremes(*inputs["log_decay"].shape)
        self.right(inputs)

    @pytest.mark.parametrize("pick", [min, max])
    @pytest.mark.parametrize("decay", ["token", "channel"])
    def test_every_size_that_may_be_tuned_is_right(self, decay: str, pick: Any) -> None:
        inputs = problem(70, H=2, K=20, V=36, decay=decay)
        with tune.override_configs({}) as asked:
            self.right(inputs)
        chosen = {
            key: replace(each.rule, blocks={**each.rule.blocks, **{name: pick(n) for name, n in each.vary.items()}})
            for key, each in asked.items()
        }
        assert {kernel for kernel, _ in chosen} >= {"linear_states", "linear_out", "linear_values", "linear_keys"}
        with tune.override_configs(chosen):
            self.right(inputs)

    @pytest.mark.usefixtures("halves")
    @pytest.mark.parametrize("decay", ["head", "token", "channel"])
    def test_sums_that_telescope_in_float16(self, decay: str) -> None:
        """One key, values of both signs, gates near 0: TF32 cuts digits off, always towards 0."""
        inputs = problem(1024, decay=decay)
        sign, third = torch.arange(1024) % 2 * 2.0 - 1, torch.arange(1024) % 300 == 3
        inputs["k"] = inputs["k"][:, :1].expand(1, 1024, 1, 8)
        inputs["v"] = inputs["v"][:, :1] * (sign * torch.where(third, 0.5, 1.0))[None, :, None, None]
        inputs["log_decay"] = torch.full_like(inputs["log_decay"], -1e-6)
        self.right({name: x if name == "log_decay" else x.half() for name, x in inputs.items()})

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_case_of_more_than_a_chunk_cut(self, dtype: torch.dtype, cut: None) -> None:  # noqa: F811
        every = [inputs_of(SPEC, case.name, dtype) for case in SPEC.cases]
        cases = [inputs for inputs in every if inputs["v"].shape[1] > 64]
        assert len(cases) > 7
        for inputs in cases:
            self.right(inputs, "chunked")

    @pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
    def test_lengths_cut(self, decay: str, cut: None) -> None:  # noqa: F811
        state = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        self.right(problem(200, B=2, decay=decay, state=state), "chunked")
        if decay == "none":
            self.right(problem(200, B=2, decay=decay, state=state, causal=False), "chunked")

    @pytest.mark.parametrize("decay", ["head", "channel"])
    def test_documents_cut_also_empty_ones(self, decay: str, cut: None) -> None:  # noqa: F811
        state = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        self.right(problem(210, decay=decay, offsets=torch.tensor((0, 0, 130, 130, 131, 210, 210)), state=state))

    def test_gates_of_every_size_cut(self, cut: None) -> None:  # noqa: F811
        for decay, H in (("head", 5), ("token", 1), ("channel", 1)):
            inputs = problem(140, H=H, decay=decay)
            inputs["log_decay"] = Draw(torch.float32, torch.device("cpu"), 0).extremes(*inputs["log_decay"].shape)
            self.right(inputs, "chunked")

    def test_float16_cut(self, cut: None) -> None:  # noqa: F811
        inputs = problem(140, decay="channel")
        self.right(inputs | {name: inputs[name].half() for name in ("q", "k", "v")}, "chunked")


def gradients(call: Call, grads: tuple[Any, ...], needs: list[bool] | None = None) -> tuple[Any, ...]:
    needs = [getattr(call, name) is not None for name in NAMES] if needs is None else needs
    return gpu.backward(call, gpu.forward(call, True), grads, needs)


def full(**more: Any) -> Call:
    draw = torch.Generator().manual_seed(2)
    rest = {"bonus": torch.randn(1, 8, generator=draw), "state": torch.randn(1, 1, 8, 8, generator=draw)}
    return bind(**there(problem(20, decay="channel") | rest | more))


def test_gradients_of_any_stride() -> None:
    call = full()
    grads = torch.ones_like(call.v), torch.ones_like(call.state)
    expected = gradients(call, grads)
    expanded = tuple(x.new_ones(()).expand(x.shape) for x in grads)
    spread = tuple(memory.strided({"x": x})["x"] for x in grads)
    for other in (expanded, spread):
        assert all(torch.equal(x, y) for x, y in zip(gradients(call, other), expected, strict=True))


def test_a_gradient_of_one_output_alone() -> None:
    call = full()
    of_out, of_state = torch.randn_like(call.v), torch.randn_like(call.state)
    both = gradients(call, (of_out, of_state))
    apart = zip(gradients(call, (of_out, None)), gradients(call, (None, of_state)), strict=True)
    assert all(error(x + y, z) < BUDGET[torch.float32] for (x, y), z in zip(apart, both, strict=True))


def test_only_what_is_needed_comes_and_it_is_the_same() -> None:
    for call in (full(), full(log_decay=None, bonus=None, causal=False)):
        grads = torch.randn_like(call.v), torch.randn_like(call.state)
        expected = gradients(call, grads)
        for place, name in enumerate(NAMES):
            needs = [place == other for other in range(len(NAMES))]
            if getattr(call, name) is None:
                continue
            found = gradients(call, grads, needs)
            assert [x is not None for x in found] == needs
            torch.testing.assert_close(found[place], expected[place])


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_the_gradient_of_a_loss_on_the_past_does_not_know_the_future(decay: str, cut: None) -> None:  # noqa: F811
    inputs, at = there(problem(200, decay=decay)), 70
    weight = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(3))
    weight[:, at:] = 0
    grads = there({"out": weight})["out"], None
    before = gradients(bind(**inputs), grads)
    for name in ("q", "k", "v"):
        inputs[name][:, at:] = 3 * inputs[name][:, at:] - 1
    inputs["log_decay"][:, at:] = -torch.inf
    for x, y in zip(before, gradients(bind(**inputs), grads), strict=True):
        assert x is y is None or torch.equal(x[:, :at], y[:, :at])


@pytest.mark.parametrize("heads", [1, 512])
@pytest.mark.parametrize("target", tune.TARGETS.values(), ids=tune.TARGETS)
def test_three_launches_and_one_more_for_pairs_for_what_is_left_to_sum_and_where_few_heads_are_cut(
    target: tune.Target, heads: int
) -> None:
    meta = torch.device("meta")
    q = torch.empty(1, 8192, heads, 64, dtype=torch.float16, device=meta)
    three = {"dstates_kernel": 2 if heads == 1 else 1, "values_kernel": 1, "keys_kernel": 1}
    channel = three | {"pairs_kernel": 1}
    counted = {
        "token": (bind(q, q, q, log_decay=q[..., 0]), three),
        "channel": (bind(q, q, q, log_decay=q), channel),
        "not causal": (bind(q, q, q, causal=False), three),
        "head": (bind(q, q, q, log_decay=q[0, 0, :, 0]), three | {"constant_kernel": 1, "sums_kernel": 1}),
        "bonus": (bind(q, q, q, log_decay=q, bonus=q[0, 0]), channel | {"sums_kernel": 1}),
    }
    for name, (call, expected) in counted.items():
        with tune.record_launches(target) as launches:
            gradients(call, (torch.empty_like(call.v), None))
        forward = (3 if heads == 1 else 2) + ("pairs_kernel" in expected)
        found = Counter(launch.kernel.fn.__name__ for launch in launches[forward:])
        assert found == expected, name
    with tune.record_launches(target) as launches:
        gradients(full(), (None, None), [False] * 5 + [True])
    assert len(launches) == 5  # of which three are the forward's
