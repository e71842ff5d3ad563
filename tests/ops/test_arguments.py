"""What the recurrences' arguments must be, and the sentence each wrong one gets."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import foci
from foci.core.errors import ShapeError
from foci.core.spec import Backend, Spec
from foci.ops import SPECS
from foci.ops.arguments import LARGEST, switch, whole
from tests.ops.recurrences import CPU, told_of_nothing, unasked

B, T, G, H, K, V = 2, 6, 2, 4, 3, 5


def good(function: str = "linear_attention") -> dict[str, Any]:
    given = {"q": torch.zeros(B, T, G, K), "k": torch.zeros(B, T, G, K), "v": torch.zeros(B, T, H, V)}
    return given | ({"beta": torch.zeros(B, T, H)} if function == "delta_rule" else {})


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"k": torch.zeros(B, T, G, 7)},
        ShapeError,
        "k has shape [2, 6, 2, 7] for [B, T, G, K], so K would be 7; q says K=3",
    ),
    ({n: torch.zeros(B, T, 3, K) for n in "qk"}, ShapeError, "k has 3 heads but v has 4; v heads must be a multiple"),
    ({"q": torch.zeros(T, G, K)}, ShapeError, "q has 3 dimensions"),
    ({"q": torch.zeros(B, T, G, K).half()}, ValueError, "q, k, v have dtypes float16, float32, float32"),
    ({"q": None}, TypeError, "q must be a tensor, got None"),
    ({"k": torch.zeros(B, T, G, K, device="meta")}, ValueError, "q, k, v are on cpu, meta, cpu; expected one device"),
    ({"log_decay": torch.zeros(B, T)}, ShapeError, "log_decay has shape [2, 6]; expected [H] = [4] or [B, T, H]"),
    ({"log_decay": torch.zeros(B, 1, H)}, ShapeError, "log_decay has shape [2, 1, 4]"),
    ({"log_decay": 0.5}, TypeError, "log_decay must be a tensor, got 0.5"),
    ({"log_decay": torch.zeros(H, dtype=torch.int64)}, ValueError, "log_decay must be a floating tensor, got int64"),
    ({"state": torch.zeros(3, H, K, V)}, ShapeError, "state has 3 rows; expected 2, the rows in the batch"),
    ({"state": torch.zeros(B, H, V, K)}, ShapeError, "state has shape [2, 4, 5, 3]"),
    ({"offsets": torch.tensor([0, T])}, ShapeError, "offsets need a batch of 1"),
    ({"offsets": torch.tensor([0.0, T])}, ValueError, "offsets must be a 1-D int32 or int64 tensor [N + 1]"),
    ({"scale": float("nan")}, ValueError, "scale must be a finite number, got nan"),
    ({"scale": 1e39}, ValueError, f"scale must be a finite number, got 1e+39; expected {-LARGEST} to {LARGEST}"),
    ({"scale": -(10**400)}, ValueError, "scale must be a finite number, got -1000"),
    ({"scale": "big"}, TypeError, "scale must be a number, got 'big'"),
    ({"return_state": 1}, TypeError, "return_state must be True or False, got 1"),
]


@pytest.mark.parametrize("function", ["linear_attention", "delta_rule"])
@pytest.mark.parametrize(("change", "kind", "sentence"), WRONG, ids=[each[2][:40] for each in WRONG])
def test_wrong(function: str, change: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as caught:
        getattr(foci, function)(**good(function) | change)
    assert str(caught.value).startswith(f"{function}: ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("backend", [None, "chunked", "reference"])
@pytest.mark.parametrize("scale", [LARGEST, -LARGEST])
def test_the_largest_scale_is_taken(scale: float, backend: str | None) -> None:
    given = good() | {"q": torch.full((B, T, G, K), 1e-30), "k": torch.ones(B, T, G, K), "v": torch.ones(B, T, H, V)}
    for dtype in (torch.float32, torch.float64):
        out, _ = foci.linear_attention(**{n: x.to(dtype) for n, x in given.items()}, scale=scale, backend=backend)
        token = torch.arange(1.0, T + 1, dtype=dtype)[None, :, None, None]
        torch.testing.assert_close(out, (K * scale * 1e-30 * token).expand_as(out), rtol=1e-5, atol=0)


ON_CPU = [(spec, each) for spec in SPECS.values() if spec.recurrent for each in spec.backends if each.name != "triton"]


@pytest.mark.parametrize(("spec", "backend"), ON_CPU, ids=lambda each: each.name)
@pytest.mark.parametrize("offsets", [[1, 6], [0, 5], [0, 4, 2, 6], [0, 7]])
def test_offsets_that_do_not_rise_from_0_to_T(spec: Spec, offsets: list[int], backend: Backend) -> None:
    """No backend reads what is behind its tokens, the compiled one least of all."""
    function = spec.function
    x, A, key = torch.zeros(1, T, V), torch.zeros(V, K), torch.zeros(1, T, K)
    given = {name: x[:1] for name, x in good(function).items()}
    if "scan" in function:
        given = {"x": x, "log_decay": x} if function == "scan" else {"x": x, "dt": x, "A": A, "B": key, "C": key}
    assert spec.bind is not None
    if missing := backend.reasons(spec.bind(**given)):
        pytest.skip(missing[0])
    with pytest.raises(ValueError, match=f"{function}: offsets must rise from 0 to T=6, got"):
        getattr(foci, function)(**given, offsets=torch.tensor(offsets), backend=backend.name)


@pytest.mark.parametrize("backend", [None, "chunked", "reference"])
@pytest.mark.parametrize("function", ["linear_attention", "delta_rule"])
def test_offsets_are_mapped_by_no_backend(function: str, backend: str | None) -> None:
    given = {name: x[:1] for name, x in good(function).items()}
    with pytest.raises(ValueError, match=f"{function}: offsets cannot be mapped by vmap"):
        torch.vmap(lambda each: getattr(foci, function)(**given, offsets=each, backend=backend)[0])(
            torch.tensor([[0, 2, T], [0, 4, T]])
        )


@pytest.mark.parametrize("function", ["linear_attention", "delta_rule", "scan", "selective_scan"])
def test_offsets_of_several_ranks_are_named(function: str, of_ranks: Callable[[Tensor], Tensor]) -> None:
    (spec,) = (spec for spec in SPECS.values() if spec.function == function)
    case = next(case for case in spec.cases if "offsets" in case.make(torch.float32, CPU, 0))
    given = case.make(torch.float32, CPU, 0)
    with pytest.raises(ValueError, match=rf"^{function}: offsets is a DTensor of .*: offsets.to_local\(\)"):
        getattr(foci, function)(**given | {"offsets": of_ranks(given["offsets"])})


def test_without_an_order_nothing_decays() -> None:
    for name, value in (("log_decay", torch.zeros(H)), ("bonus", torch.zeros(H, K))):
        with pytest.raises(ValueError, match=f"{name} needs causal=True"):
            foci.linear_attention(**good(), causal=False, **{name: value})


def test_autocast_gives_its_dtype_and_keeps_the_gates() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = foci.linear_attention(**good(), log_decay=torch.full((H,), -0.1), return_state=True)
    assert out.dtype == torch.bfloat16
    assert state is not None
    assert state.dtype == torch.float32


STEP = {
    "q": torch.zeros(B, G, K),
    "k": torch.zeros(B, G, K),
    "v": torch.zeros(B, H, V),
    "state": torch.zeros(B, H, K, V),
}
WRONG_STEPS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"state": torch.zeros(B, H, V, K)}, ShapeError, "state has shape [2, 4, 5, 3]; expected [B=2, H=4, K=3, V=5]"),
    ({"v": torch.zeros(B, 3, V), "state": torch.zeros(B, 3, K, V)}, ShapeError, "k has 2 heads but v has 3"),
    ({"state": torch.zeros(B, H, K, V).double()}, ValueError, "state is float64; expected float32 for float32 inputs"),
    ({"state": torch.zeros(K, V).expand(B, H, K, V)}, ValueError, "state has strides [0, 0, 5, 1] for sizes"),
    ({"k": torch.zeros(B, G, K).half()}, ValueError, "q, k, v have dtypes float32, float16, float32"),
    ({"q": None}, TypeError, "q must be a tensor, got None"),
    ({"k": torch.zeros(B, G, K, device="meta")}, ValueError, "q, k, v are on cpu, meta, cpu; expected one device"),
    ({"log_decay": -0.1}, TypeError, "log_decay must be a tensor, got -0.1"),
    ({"log_decay": torch.zeros(B, H, 2)}, ShapeError, "log_decay has shape [2, 4, 2]; expected [H] = [4] or [B, H]"),
    ({"q": torch.zeros(B, G, K, requires_grad=True)}, ValueError, "it has no gradients"),
    ({"scale": 1e39}, ValueError, f"scale must be a finite number, got 1e+39; expected {-LARGEST} to {LARGEST}"),
]


@pytest.mark.parametrize("function", ["linear_attention_step", "delta_rule_step"])
@pytest.mark.parametrize(("change", "kind", "sentence"), WRONG_STEPS, ids=[each[2][:40] for each in WRONG_STEPS])
def test_wrong_steps(function: str, change: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    given = STEP | change
    if function == "delta_rule_step":
        given["beta"] = torch.zeros(given["v"].shape[:2])
    with pytest.raises(kind) as caught:
        getattr(foci, function)(**given)
    assert str(caught.value).startswith(f"{function}: ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("function", ["linear_attention", "delta_rule"])
def test_a_step_under_vmap_wants_a_state_of_each(function: str) -> None:
    given = {name: torch.rand(3, *x[:, 0].shape) for name, x in good(function).items()}
    step, states = getattr(foci, f"{function}_step"), torch.rand(3, B, H, K, V)
    alone = [step(**{name: x[i] for name, x in given.items()}, state=states[i].clone()) for i in range(3)]
    with pytest.raises(ValueError, match=f"{function}_step: vmap maps q and not state, .*; expected a state of each"):
        torch.vmap(lambda q: step(**{name: x[0] for name, x in given.items()} | {"q": q}, state=states[0]))(given["q"])
    found = torch.vmap(lambda each, state: step(**each, state=state))(given, states)
    torch.testing.assert_close(found, torch.stack(alone))


@pytest.mark.parametrize("function", ["linear_attention", "delta_rule"])
def test_a_step_under_autocast_is_the_call_of_one_token(function: str) -> None:
    shapes = {name: x.shape[:1] + x.shape[2:] for name, x in good(function).items()}
    token = {name: torch.rand(shape) for name, shape in shapes.items()}
    token["k"] = token["k"].bfloat16()  # what a product gave, beside what a norm gave
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = getattr(foci, function)(**{name: x[:, None] for name, x in token.items()})
        torch.testing.assert_close(getattr(foci, f"{function}_step")(**token, state=torch.zeros(B, H, K, V)), out[:, 0])


RECURRENT = [spec for spec in SPECS.values() if spec.recurrent]
ON_CPU = [(spec, backend) for spec in RECURRENT for backend in spec.backends if backend.name != "triton"]


@pytest.mark.parametrize(("spec", "backend"), ON_CPU, ids=lambda each: each.name)
def test_a_state_that_nobody_asks_for_holds_no_memory(spec: Spec, backend: Backend) -> None:
    assert spec.bind is not None
    ran = 0
    for case in spec.cases:
        call = spec.bind(**case.make(torch.float32, CPU, 0))
        if not backend.reasons(call):
            state = unasked(spec, backend.load().forward, call)
            assert state.untyped_storage().nbytes() == 0 or not getattr(call, "causal", True), case.name
            assert backend.name == "reference" or told_of_nothing(spec, backend.name, call), case.name
            ran += 1
    assert ran > 3


@pytest.mark.parametrize(("spec", "backend"), ON_CPU, ids=lambda each: each.name)
def test_compiled_without_a_state_gradients_are_those_of_eager(spec: Spec, backend: Backend) -> None:
    inputs = spec.cases[0].make(torch.float32, CPU, 0)
    names = [name for name in inputs if name in spec.differentiable]
    function = getattr(foci, spec.function)

    def out(*leaves: torch.Tensor) -> torch.Tensor:
        return function(**inputs | dict(zip(names, leaves, strict=True)), backend=backend.name)[0]

    found = []
    for run in (out, torch.compile(out, backend="aot_eager")):
        leaves = [inputs[name].clone().requires_grad_() for name in names]
        found.append(torch.autograd.grad(run(*leaves).square().sum(), leaves))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_op_gives_as_many_states_as_its_fake_says(wanted: bool) -> None:
    call = [torch.randn(B, T, G, K), torch.randn(B, T, G, K), torch.randn(B, T, H, V), *[None] * 4, True, 0.5, wanted]
    # Nobody fills all of `kept`: bits are not compared.
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.foci.linear_chunked_fwd.default, tuple(call), test_utils=utilities)
    assert len(torch.ops.foci.linear_chunked_fwd(*call)[1]) == (B if wanted else 0)


@pytest.mark.parametrize("value", [np.float32(0.25), np.float64(0.25), Fraction(1, 4)])
def test_a_number_of_any_library_is_a_number(value: Any) -> None:
    x = torch.randn(1, 3, 2, 4)
    assert torch.equal(foci.attention(x, x, x, scale=value), foci.attention(x, x, x, scale=0.25))


def test_a_whole_number_is_of_any_library_and_no_bool() -> None:
    assert [whole("f", "x", value) for value in (1, np.int64(3))] == [1, 3] and whole("f", "x", 0, 0) == 0
    for wrong in (0, -1, 1.0, True, "1", None, torch.tensor(1)):
        with pytest.raises(ValueError, match=r"^f: x must be a whole number, at least 1, got"):
            whole("f", "x", wrong)


def test_a_switch_is_a_bool_or_0_or_1() -> None:
    assert [switch("f", "x", value) for value in (True, False, 1, 0)] == [True, False, True, False]
    for wrong in ("False", "", 2, -1, 1.0, None, torch.tensor(True)):
        with pytest.raises(TypeError, match=r"^f: x must be True or False, got"):
            switch("f", "x", wrong)


@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 0])])
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (foci.linear_attention, [(1, 0, 2, 4)] * 3 + [(1, 0, 2)]),
        (foci.delta_rule, [(1, 0, 2, 4)] * 3 + [(1, 0, 2)] * 2),
        (foci.scan, [(1, 0, 4)] * 2),
        (foci.selective_scan, [(1, 0, 4), (1, 0, 4), (4, 2), (1, 0, 2), (1, 0, 2)]),
    ],
)
def test_gradients_through_no_token_are_0_of_every_input(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], offsets: Tensor | None
) -> None:
    """In the reference too, whose loop over tokens has seen none."""
    inputs = [torch.ones(shape, requires_grad=True) for shape in shapes]
    names = {foci.linear_attention: ["log_decay"], foci.delta_rule: ["beta", "log_decay"]}.get(function, [])
    plain, named = inputs[: len(inputs) - len(names)], dict(zip(names, inputs[len(inputs) - len(names) :], strict=True))
    out, _ = function(*plain, **named, offsets=offsets, return_state=True, backend="reference")
    for x, found in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert found.shape == x.shape and not found.any()


def test_a_trace_of_no_token_has_its_output() -> None:
    x = torch.ones(1, 0, 2, 4)
    traced = torch.jit.trace(lambda *x: foci.linear_attention(*x, backend="reference")[0], (x, x, x), check_trace=False)
    assert traced(x, x, x).shape == x.shape


@pytest.mark.parametrize(
    "function", [foci.attention, lambda *x: foci.linear_attention(*x)[0]], ids=["softmax", "decay"]
)
def test_the_scale_of_a_trace_is_as_exact_as_any(function: Callable[..., Tensor]) -> None:
    """torch.jit.trace makes tensors of sizes, whose powers are of the default dtype."""
    x = torch.randn(1, 4, 2, K, dtype=torch.float64)
    traced = torch.jit.trace(function, (x, x, x), check_trace=False)
    torch.testing.assert_close(traced(x, x, x), function(x, x, x), rtol=0, atol=1e-14)
