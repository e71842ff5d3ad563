"""Random shapes, strides, masks, offsets and options: every backend that takes them is the reference."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import foci
from foci.ops.softmax.spec import SPEC
from tests.ops.oracle import joined, mask_parts
from tests.ops.softmax.problems import OPAQUE, assert_close, evaluate, refused

SETTINGS = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def tensors(draw: st.DrawFn, generator: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers of this shape, dimensions stored in any order, cut out of something larger, or expanded."""
    order = draw(st.permutations(range(len(shape))))
    step = draw(st.sampled_from((1, 1, 2)))
    stored = [shape[dim] * step for dim in order]
    x = torch.randn(stored, generator=generator, dtype=torch.float64)[tuple(slice(None, None, step) for _ in stored)]
    x = x.permute([order.index(dim) for dim in range(len(shape))])
    if draw(st.integers(0, 5)) == 0:
        dim = draw(st.integers(0, len(shape) - 1))
        x = x.narrow(dim, 0, min(1, shape[dim])).expand(shape)
    assert tuple(x.shape) == shape
    return x


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    B, G, R = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    T, S = (
        draw(st.integers(0, 7) | st.sampled_from((16, 33, 40))),
        draw(st.integers(0, 7) | st.sampled_from((16, 33, 40))),
    )
    if draw(st.booleans()):
        S = T
    K, V = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    H = G * R
    inputs: dict[str, Any] = {
        "q": draw(tensors(generator, B, T, H, K)),
        "k": draw(tensors(generator, B, S, G, K)),
        "v": draw(tensors(generator, B, S, G, V)),
    }
    mask = joined(draw(mask_parts(B, H, T, S)))
    if mask is not None:
        inputs["mask"] = mask
    if draw(st.integers(0, 2)) == 0:
        shape = [draw(st.sampled_from((1, n))) for n in (B, H, T, S)][draw(st.integers(0, 4)) :]
        inputs["bias"] = draw(tensors(generator, *shape)) if shape else torch.tensor(0.3, dtype=torch.float64)
    if draw(st.integers(0, 2)) == 0:
        inputs["sink"] = torch.randn(H, generator=generator, dtype=torch.float64)
    if draw(st.integers(0, 3)) == 0:
        inputs["softcap"] = draw(st.floats(0.5, 50.0))
    if draw(st.integers(0, 3)) == 0:
        inputs["scale"] = draw(st.floats(-2.0, 2.0))
    if draw(st.integers(0, 5)) == 0:
        inputs["dropout"] = draw(st.floats(0.05, 0.9))
    return inputs


@SETTINGS
@given(problems())
def test_every_backend_is_the_reference(inputs: dict[str, Any]) -> None:
    truth = evaluate(inputs)
    # aten leaves a bias that wants a gradient to the others, so it is asked without.
    for backend in OPAQUE:
        leave = ("bias",) if backend == "aten" else ()
        if refused(inputs, backend, bias_gradient=False):
            assert backend == "aten"
            continue
        found = evaluate(inputs, backend, leave=leave)
        assert_close(found, {name: x for name, x in truth.items() if name in found}, 1e-10)


@settings(SETTINGS, max_examples=40)
@given(problems(), st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
def test_every_dtype_is_finite_with_the_right_lse(inputs: dict[str, Any], dtype: torch.dtype) -> None:
    taken = {n: x.to(dtype) if n in SPEC.differentiable else x for n, x in inputs.items()}
    exact = {n: x.double() if n in SPEC.differentiable else x for n, x in taken.items()}
    _, truth = foci.attention_with_lse(**exact | {"dropout": 0.0}, backend="reference")
    for backend in OPAQUE:
        if refused(taken, backend, bias_gradient=False):
            continue
        out, lse = foci.attention_with_lse(**taken, backend=backend)
        assert torch.isfinite(out).all()
        seen = truth > -torch.inf
        assert torch.equal(lse > -torch.inf, seen)
        assert ((lse.double() - truth)[seen].abs() <= 2e-4).all()
