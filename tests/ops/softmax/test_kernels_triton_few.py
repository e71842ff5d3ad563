"""The Triton backward of few queries: every gradient it makes, against the equation in float64, interpreted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton  # noqa: F401  its interpreter is on or off from here

from foci import Causal, Dense, Lengths, Window
from foci.check.memory import poisoned, strided
from foci.core.tune import TARGETS, interpreting, record_launches
from foci.ops.masks import Band
from foci.ops.softmax import gpu
from foci.ops.softmax.kernels_triton_few import ROWS, suits
from foci.ops.softmax.spec import SPEC
from tests.ops.softmax.problems import pulls
from tests.ops.softmax.test_kernels_triton_backward import agree, drawn, gradients

if not interpreting():
    pytest.skip("these run in Triton's interpreter: TRITON_INTERPRET=1", allow_module_level=True)

FEATURES: dict[str, Any] = {
    "plain": dict,
    "causal": lambda: {"mask": Causal()},
    "softcap, window": lambda: {"softcap": 3.0, "mask": Causal() & Window(20, None)},
    "lengths": lambda: {"mask": Lengths(torch.tensor([7, 0]))},
    "band": lambda: {"mask": Band(-3, torch.tensor([1, 40]))},
    "dense": lambda: {"mask": Dense(torch.rand(2, 1, 1, 130) < 0.5)},
    "dense without a key for one row": lambda: {"mask": Dense(torch.tensor([True, False])[:, None, None, None])},
    "dropout": lambda: {"dropout": 0.3},
}


def kernels(inputs: dict[str, Any], needs: list[bool], lse_alone: bool = False) -> list[str]:
    """What a backward of these launches on Hopper."""
    moved = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    call = SPEC.bind(**moved)
    outputs = tuple(output.empty(call.q) for output in SPEC.outputs(call))  # type: ignore[misc]
    with record_launches(TARGETS["sm_90"]) as seen:
        gpu.backward(call, outputs, (None, outputs[1]) if lse_alone else outputs, needs)  # type: ignore[arg-type]
    return [launch.kernel.__name__ for launch in seen]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", FEATURES)
def test_one_query_of_grouped_heads(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    drawing = {n: x.to(dtype) for n, x in drawn(T=1, S=130, H=4, G=1).items()}
    inputs = drawing | FEATURES[name]()
    agree(inputs)
    agree(inputs, (pulls(inputs)[0], None))


@pytest.mark.parametrize(("T", "H", "G", "K", "V"), [(2, 4, 2, 8, 8), (1, 2, 2, 33, 70), (1, 16, 1, 40, 16)])
def test_several_queries_and_odd_widths(T: int, H: int, G: int, K: int, V: int) -> None:
    agree(drawn(T=T, S=64 * T + 1, H=H, G=G, K=K, V=V) | {"mask": Causal()})


def test_a_bias_that_wants_no_gradient() -> None:
    inputs = drawn(T=1, S=70, H=4, G=2) | {"bias": torch.randn(1, 4, 1, 70)}
    inputs["bias"][:, 1] = -torch.inf  # a head that sees nothing
    needs = [True, True, True, False, False]
    every = gradients(inputs)
    found = gradients(inputs, needs=needs)
    assert all(torch.allclose(found[name], every[name], atol=1e-5) for name in ("dq", "dk", "dv"))


def test_which_calls_it_takes() -> None:
    one, needs = drawn(T=1, S=128, H=4, G=1), [True, True, True, False, False]
    assert kernels(one, needs) == ["few_kernel", "sum_kernel"]
    assert kernels(one, needs, lse_alone=True) == ["queries_kernel", "keys_kernel"]
    assert kernels(one, [False, True, False, False, False]) == ["few_kernel"]
    assert kernels(drawn(T=1, S=63, H=4, G=1), needs) == ["queries_kernel", "keys_kernel"]
    assert kernels(drawn(T=1, S=128, H=ROWS, G=1), needs) == ["few_kernel", "sum_kernel"]
    assert kernels(drawn(T=1, S=128, H=ROWS + 1, G=1), needs) == ["queries_kernel", "keys_kernel"]


@pytest.mark.parametrize("name", ["sink", "bias"])
def test_gradients_that_it_does_not_make_are_made(name: str) -> None:
    beside = {"sink": torch.randn(4), "bias": torch.randn(1, 4, 1, 130)}
    agree(drawn(T=1, S=130, H=4, G=1) | {name: beside[name]})
    agree(drawn(T=1, S=130, H=4, G=1) | {name: beside[name], "mask": Lengths(torch.tensor([70, 0]))})


def test_unwritten_memory_strides_and_what_is_needed_do_not_matter() -> None:
    inputs = drawn(T=1, S=130, H=4, G=2)
    expected = gradients(inputs)
    with poisoned():
        found = gradients(strided(inputs))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for place, name in enumerate(("dq", "dk", "dv")):
        alone = gradients(inputs, needs=[each == place for each in range(5)])
        assert list(alone) == [name] and torch.equal(alone[name], expected[name])


def test_nan_in_keys_that_are_not_real_does_not_matter() -> None:
    inputs = drawn(T=1, S=70, H=2, G=1) | {"mask": Lengths(torch.tensor([20, 3]))}
    spoiled = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    for b, length in enumerate((20, 3)):
        spoiled["k"][b, length:] = spoiled["v"][b, length:] = torch.nan
    for found, clean in zip(gradients(spoiled).values(), gradients(inputs).values(), strict=True):
        assert torch.equal(found, clean)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("T", [2, 4])
def test_nor_in_queries_that_are_not_real(T: int, softcap: float | None) -> None:
    """Theirs are gradients of 0, and the keys' are as if there were no such queries."""
    mask = Lengths(torch.tensor([130, 7]), torch.tensor([1, 0]))
    inputs = drawn(T=T, S=64 * T + 3, H=4, G=1) | {"mask": mask, "softcap": softcap}
    assert suits(SPEC.bind(**inputs), pulls(inputs), [True, True, True, False, False])
    spoiled = inputs | {"q": inputs["q"].clone()}
    spoiled["q"][0, 1:] = math.nan
    spoiled["q"][1] = math.inf
    found, clean = gradients(spoiled), gradients(inputs)
    assert all(torch.equal(found[name], clean[name]) for name in clean) and not found["dq"][1].any()
