"""The Spec of softmax attention: declared outputs are real, and the work is counted."""

from __future__ import annotations

import pytest
import torch

import foci
from foci import Partial
from foci.core.spec import Case
from foci.ops import SPECS
from foci.ops.softmax.spec import SPEC, outputs, work
from tests.ops.softmax.problems import BACKENDS, CPU, refused


def test_it_is_listed() -> None:
    assert SPECS["softmax"] is SPEC
    assert tuple(backend.name for backend in SPEC.backends) == ("aten", "flash", "triton", "chunked", "reference")
    assert SPEC.merge is Partial


@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
@pytest.mark.parametrize("problem", SPEC.cases, ids=lambda problem: problem.name)
def test_declared_shapes_dtypes_and_strides_are_real(problem: Case, dtype: torch.dtype) -> None:
    """On every backend, forward and the gradients too."""
    inputs = problem.make(dtype, CPU, 0)
    for backend in BACKENDS:
        if refused(inputs, backend):
            continue
        leaves = {name: x.requires_grad_() for name, x in inputs.items() if name in SPEC.differentiable}
        found = foci.attention_with_lse(**inputs | leaves, backend=backend)
        for declared, real in zip(outputs(SPEC.bind(**inputs)), found, strict=True):
            assert (tuple(real.shape), real.dtype) == (declared.shape, declared.dtype), (backend, declared.name)
            assert real.is_contiguous(), (backend, declared.name)
        total = sum(x.masked_fill(x == -torch.inf, 0.0).sum() for x in found)
        for name, grad in zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True):
            assert (grad.shape, grad.dtype) == (leaves[name].shape, leaves[name].dtype), (backend, name)


def test_every_feature_of_the_signature_has_a_case() -> None:
    features = {feature for problem in SPEC.cases for feature in problem.features}
    assert features >= {
        "gqa", "value width", "softcap", "bias", "sink", "causal", "causal top-left", "window", "packed", "padding",
        "padded queries", "dense", "cross", "dropout", "empty rows", "scale",
    }  # fmt: skip


def test_work_counts_both_products_and_each_byte_once() -> None:
    q, k, v = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8), torch.zeros(2, 5, 2, 6)
    counted = work(SPEC.bind(q, k, v))
    assert counted.flops == 2 * 2 * 4 * 3 * 5 * (8 + 6)
    assert counted.bytes == 4 * (q.numel() + k.numel() + v.numel() + 2 * 3 * 4 * 6) + 4 * 2 * 3 * 4


def test_work_counts_two_products_and_every_tensor_once() -> None:
    q, k, v = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8), torch.zeros(2, 5, 2, 6)
    assert SPEC.work is not None
    done = SPEC.work(SPEC.bind(q, k, v))
    assert done.flops == 2 * (2 * 4 * 3 * 5) * (8 + 6)
    assert done.bytes == 4 * (q.numel() + k.numel() + v.numel() + 2 * 3 * 4 * 6 + 2 * 3 * 4)


def test_the_backward_makes_five_products_and_a_causal_mask_halves_no_count() -> None:
    q, k, v = torch.zeros(2, 8, 4, 8), torch.zeros(2, 8, 2, 8), torch.zeros(2, 8, 2, 6)
    whole, causal = work(SPEC.bind(q, k, v)), work(SPEC.bind(q, k, v, mask=foci.Causal()))
    pair = 2 * 2 * 4
    assert whole.flops * whole.backward == pytest.approx(pair * 64 * (3 * 8 + 2 * 6))
    assert (whole.counted, causal.counted) == (whole.flops, whole.flops)
    assert causal.flops == pair * 36 * (8 + 6)
    nothing = torch.zeros(1, 2, 1, 0)
    assert work(SPEC.bind(nothing, nothing, nothing)).flops == 0
