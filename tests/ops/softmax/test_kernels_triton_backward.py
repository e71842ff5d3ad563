"""The Triton backward of softmax attention: gradients of all five inputs through out and lse, interpreted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import triton  # noqa: F401  its interpreter is on or off from here
from torch import Tensor

from foci import Causal, Dense, Lengths, Packed, Window
from foci.check.memory import poisoned, strided
from foci.core.spec import Case
from foci.core.tune import TARGETS, interpreting, record_launches
from foci.ops.masks import Band
from foci.ops.softmax import gpu, reference
from foci.ops.softmax.probes import poison
from foci.ops.softmax.spec import SPEC
from tests.ops.softmax.problems import CPU, assert_budget, assert_close, case, evaluate, inputs_of, promoted, pulls
from tests.ops.softmax.test_parts import in_parts

if not interpreting():
    pytest.skip("these run in Triton's interpreter: TRITON_INTERPRET=1", allow_module_level=True)

INPUTS = ("q", "k", "v", "bias", "sink")
Pull = tuple[Tensor | None, Tensor | None]


def gradients(
    inputs: dict[str, Any], through: Pull | None = None, needs: list[bool] | None = None
) -> dict[str, Tensor]:
    """Those of the kernels, from the reference's out and lse."""
    torch.manual_seed(3)
    call = SPEC.bind(**inputs)
    outputs = reference.forward(call)
    needs = needs or [getattr(call, name) is not None for name in INPUTS]
    found = gpu.backward(call, outputs, pulls(inputs) if through is None else through, needs)
    return {f"d{name}": x for name, x in zip(INPUTS, found, strict=True) if x is not None}


def truth(inputs: dict[str, Any], through: Pull | None = None) -> dict[str, Tensor]:
    found = evaluate(promoted(inputs), through=through)
    return {name: x for name, x in found.items() if name.startswith("d")}


def agree(inputs: dict[str, Any], through: Pull | None = None) -> None:
    """Within the budget of the inputs' dtype (check/compare.py)."""
    found, true = gradients(inputs, through), truth(inputs, through)
    if inputs["q"].dtype == torch.float32:
        assert_close(found, true, 1e-5)
    else:
        assert_budget(found, true, evaluate(inputs, call=SPEC.plain, through=through))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("problem", SPEC.cases, ids=lambda problem: problem.name)
def test_every_case_is_within_the_budget(problem: Case, dtype: torch.dtype) -> None:
    agree(problem.make(dtype, CPU, 0))


def drawn(B: int = 2, T: int = 9, S: int = 9, H: int = 2, G: int = 2, K: int = 8, V: int | None = None, seed: int = 0) -> dict[str, Any]:  # fmt: skip  # noqa: E501
    draw = torch.Generator().manual_seed(seed)
    sizes = {"q": (B, T, H, K), "k": (B, S, G, K), "v": (B, S, G, V or K)}
    return {name: torch.randn(shape, generator=draw) for name, shape in sizes.items()}


@pytest.mark.parametrize("T", [1, 16, 63, 64, 65, 129])
def test_lengths_round_a_block(T: int) -> None:
    agree(drawn(B=1, T=T, S=T, H=2, G=1) | {"mask": Causal() & Window(70, None)})


@pytest.mark.parametrize(("K", "V"), [(1, 3), (33, 70), (200, 130)])
def test_odd_widths(K: int, V: int) -> None:
    agree(drawn(B=1, K=K, V=V) | {"sink": torch.randn(2)})


@pytest.mark.parametrize("extra", [{}, {"softcap": 3.0}, {"bias": torch.ones(1, 2, 1, 70)}], ids=str)
def test_wide_heads_in_half(extra: dict[str, Any]) -> None:
    """On Hopper dv and dk are made one after the other."""
    drawing = drawn(B=1, T=70, S=70, H=2, G=1, K=200, V=130) | extra
    agree({n: x.half() if isinstance(x, Tensor) else x for n, x in drawing.items()} | {"mask": Causal()})


MASKS = {
    "cross": lambda: Causal() & Window(3, None),
    "band": lambda: Band(-3, torch.tensor([1, 4])),
    "lengths and window": lambda: Lengths(torch.tensor([7, 0])) & Window(2, 2),
    "padded queries": lambda: Lengths(torch.tensor([5, 9]), torch.tensor([4, 0])) & Causal(),
    "dense rows": lambda: Dense(torch.rand(2, 1, 9, 9) < 0.5) & Causal(align="top-left"),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_masks_with_bias_and_sink(name: str, softcap: float | None) -> None:
    torch.manual_seed(0)
    inputs = drawn(H=4) | {"mask": MASKS[name](), "bias": torch.randn(1, 4, 9, 9), "sink": torch.randn(4)}
    agree(inputs | {"softcap": softcap})


@pytest.mark.parametrize("shape", [(1,), (9, 1), (1, 9), (2, 9), (2, 1, 1, 9), (1, 2, 9, 1), (2, 2, 9, 9)])
@pytest.mark.parametrize("through", ["both", "out"])
def test_a_bias_of_any_shape(shape: tuple[int, ...], through: str) -> None:
    if shape == (2, 9):
        shape = (2, 1, 9)
    inputs = drawn() | {"bias": torch.randn(shape), "mask": Window(6, 6)}
    dout, dlse = pulls(inputs)
    agree(inputs, (dout, dlse if through == "both" else None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_number_as_bias_gets_what_lse_gets(dtype: torch.dtype) -> None:
    """Its gradient is the sum of dlse: where out is half, all that is left of pull would be rounding."""
    inputs = {n: x.to(dtype) for n, x in drawn(T=40, S=40).items()} | {"bias": torch.randn(1, dtype=dtype)}
    agree(inputs, (pulls(inputs)[0], None))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("large", ["q", "bias"])
@pytest.mark.parametrize("wanted", [False, True])
def test_what_rounds_lse_leaves_no_gradient_of_a_bias(sink: bool, large: str, wanted: bool) -> None:
    """lse of thousands is rounded by 1e-4, and so is the sum of what is recomputed from it: pull is for a sum of 1."""
    inputs = drawn(T=24, S=24) | {"bias": torch.randn(24, 24)}
    inputs[large] = 3e3 * inputs[large]
    if sink:
        inputs["sink"] = torch.tensor([-4e3, 4e3])
    needs = [True, True, True, True, sink and wanted]
    dout, _ = pulls(inputs)
    found, true = gradients(inputs, (dout, None), needs), truth(inputs, (dout.double(), None))
    assert (found["dbias"] - true["dbias"]).abs().max() < 1e-6


def test_a_bias_that_leaves_no_probability_leaves_no_nan() -> None:
    """lse lost the sum over keys, and what is recomputed from it may be 0 for all."""
    inputs = drawn(T=24, S=24) | {"bias": -1e12 * (1 + torch.rand(24, 24))}
    assert not any(x.isnan().any() for x in gradients(inputs).values())


PACKED = {
    "documents": Packed(torch.tensor([0, 4, 4, 9, 30]), torch.tensor([0, 3, 8, 8, 33])),
    "causal": Packed(torch.tensor([0, 0, 17, 31], dtype=torch.int32)) & Causal(),
    "causal with unused tail": Packed(torch.tensor([0, 5, 20])) & Causal() & Window(4, None),
    "lengths": Packed(torch.tensor([0, 9, 20, 33])) & Lengths(torch.tensor([4, 0, 9])) & Causal(),
    "padded queries": Packed(torch.tensor([0, 9, 20])) & Lengths(torch.tensor([4, 9]), torch.tensor([3, 0])),
    "one band each": Packed(torch.tensor([0, 9, 20])) & Band(torch.tensor([-2, 0]), torch.tensor([1, 3])),
    "no document": Packed(torch.tensor([0])),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str) -> None:
    agree(drawn(B=1, T=33, S=33, H=4) | {"mask": PACKED[name], "sink": torch.randn(4)})


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", [*PACKED, "padding", "padded queries, alone"])
def test_nan_in_what_is_excluded_does_not_matter(name: str, softcap: float | None) -> None:
    """The excluded get a gradient of 0, and the others the bits they had."""
    queries = torch.tensor([9, 33]) if name == "padded queries, alone" else None
    mask = PACKED[name] if name in PACKED else Lengths(torch.tensor([20, 3]), queries)
    B = 1 if name in PACKED else 2
    inputs = drawn(B=B, T=33, S=33) | {"mask": mask, "bias": torch.randn(33), "softcap": softcap}
    spoiled = poison(case("plain"), inputs)
    assert spoiled is not None
    for found, clean in zip(gradients(spoiled).values(), gradients(inputs).values(), strict=True):
        assert torch.equal(found, clean)


@pytest.mark.parametrize(
    "name", ["causal, empty rows", "everything", "packed cross", "bias per key", "sink, empty rows"]
)
def test_unwritten_memory_and_strides_do_not_matter(name: str) -> None:
    inputs = inputs_of(name, torch.float32)
    expected = gradients(inputs)
    dout, dlse = pulls(inputs)
    with poisoned():
        found = gradients(
            strided(inputs), (strided({"x": dout})["x"], dlse.transpose(1, 2).contiguous().transpose(1, 2))
        )
    assert all(torch.equal(found[name], expected[name]) and found[name].is_contiguous() for name in expected)


def test_gradients_of_stride_0_or_none() -> None:
    inputs = inputs_of("everything", torch.float32)
    dout, dlse = (torch.ones(()).expand(x.shape) for x in pulls(inputs))
    assert_close(gradients(inputs, (dout, dlse)), truth(inputs, (dout.double(), dlse.double())), 1e-5)
    agree(inputs, (dout.contiguous(), None))
    with poisoned():
        found = gradients(inputs, (None, dlse))
    true = truth(inputs, (None, dlse.double()))
    assert not found["dv"].any()
    assert_close(found, true | {"dv": torch.zeros_like(found["dv"])}, 1e-5)


def test_twice_gives_the_same_bits() -> None:
    inputs = inputs_of("everything", torch.float16)
    for a, b in zip(gradients(inputs).values(), gradients(inputs).values(), strict=True):
        assert torch.equal(a, b)


def launches(needs: list[bool], dtype: torch.dtype = torch.float32, K: int = 8, **extra: Any) -> Counter[str]:
    meta = {n: x.to("meta", dtype) for n, x in drawn(K=K).items()}
    call = SPEC.bind(**meta, **extra)
    outputs = tuple(output.empty(call.q) for output in SPEC.outputs(call))  # type: ignore[misc]
    with record_launches(TARGETS["sm_90"]) as seen:
        found = gpu.backward(call, outputs, outputs, needs)  # type: ignore[arg-type]
    assert [x is not None for x in found] == needs
    return Counter(launch.kernel.__name__ for launch in seen)


def test_launches() -> None:
    """Two; one more for a sink, one or two for a bias, one for wide heads in half; nothing that is not needed."""
    bias, sink = torch.empty(9, 9, device="meta"), torch.empty(2, device="meta")
    plain = {"queries_kernel": 1, "keys_kernel": 1}
    assert launches([True, True, True, False, False]) == plain
    assert launches([True, True, True, False, False], bias=bias, sink=sink) == plain
    assert launches([True, True, True, False, False], torch.float16, 200) == plain | {"keys_kernel": 2}
    assert launches([True, True, False, False, False], torch.float16, 200) == plain
    assert launches([True, False, False, False, False]) == {"queries_kernel": 1}
    assert launches([False, True, False, False, False]) == plain
    assert launches([False] * 5) == {}
    assert launches([True, True, True, False, True], sink=sink) == plain | {"sum_kernel": 1}
    assert launches([False, False, False, False, True], sink=sink) == {"queries_kernel": 1, "sum_kernel": 1}
    assert launches([True, True, True, True, False], bias=bias) == plain | {"bias_kernel": 1, "sum_kernel": 1}


@pytest.mark.parametrize("place", range(5))
def test_each_gradient_alone_has_the_same_bits(place: int) -> None:
    """A bias that wants its gradient has all of them made from a pull that is summed exactly, so it is asked apart."""
    inputs = inputs_of("everything", torch.float32)
    alone = gradients(inputs, needs=[each == place for each in range(5)])
    every = gradients(inputs, needs=[each != 3 or place == 3 for each in range(5)])
    assert list(alone) == [f"d{INPUTS[place]}"]
    assert all(torch.equal(alone[name], every[name]) for name in alone)


@pytest.mark.parametrize(
    "name", ["grouped heads", "causal", "everything", "dropout", "bias per key", "sink, empty rows"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_of_the_keys_add_up(name: str, dtype: torch.dtype) -> None:
    """What a ring asks for: out, lse and gradients are sums of float32, which no part rounds to half."""
    inputs = inputs_of(name, dtype)
    found = in_parts(inputs, "triton", pulls(inputs))
    true = {name: x for name, x in evaluate(promoted(inputs)).items() if name != "dsink"}
    if dtype == torch.float32:
        assert_close(found, true, 1e-5)
    else:
        assert_budget(found, true, evaluate(inputs, call=SPEC.plain))
