"""The public functions: defaults, gradients, transforms, the compiler, and pieces that merge."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

import foci
from foci.merge.affine import Affine
from foci.merge.algebra import fold
from foci.ops.scan.spec import SPEC
from tests.ops.recurrences import inputs_of


def test_the_state_comes_when_asked_for() -> None:
    inputs = inputs_of(SPEC, "state")
    out, nothing = foci.scan(**inputs)
    again, state = foci.scan(**inputs, return_state=True)
    assert nothing is None and torch.equal(out, again) and torch.equal(out[:, -1], state)


def test_chunked_is_chosen_and_unknown_backends_are_refused() -> None:
    x = torch.ones(1, 3, 2)
    assert foci.explain("scan", x, -x).chosen == "chunked"
    with pytest.raises(ValueError, match="scan: unknown backend 'fast'"):
        foci.scan(x, -x, backend="fast")


def test_gradcheck() -> None:
    inputs = inputs_of(SPEC, "packed, states")
    leaves = [inputs[name][..., :2].clone().requires_grad_() for name in ("x", "log_decay", "state")]

    def run(x, log_decay, state):
        return foci.scan(x, log_decay, state=state, offsets=inputs["offsets"], return_state=True)

    assert torch.autograd.gradcheck(run, leaves)


def test_a_stretch_is_an_affine_map_and_any_number_of_them_merge() -> None:
    inputs = inputs_of(SPEC, "state")
    x, gates, state = (inputs[name] for name in ("x", "log_decay", "state"))
    maps = []
    for piece in (slice(0, 1), slice(1, 8), slice(8, 8), slice(8, 19)):
        _, offset = foci.scan(x[:, piece], gates[:, piece], return_state=True)
        maps.append(Affine(gates[:, piece].sum(1).exp(), offset[..., None]))
    _, final = foci.scan(**inputs, return_state=True)
    torch.testing.assert_close(fold(maps).apply(state[..., None])[..., 0], final)


def test_vmap_and_grad() -> None:
    x, gates = torch.randn(3, 2, 7, 4, dtype=torch.float64), -torch.rand(3, 2, 7, 4, dtype=torch.float64)

    def loss(x, gates):
        return foci.scan(x, gates)[0].square().sum()

    alone = [grad(loss, (0, 1))(*each) for each in zip(x, gates, strict=True)]
    together = vmap(grad(loss, (0, 1)))(x, gates)
    torch.testing.assert_close(together, tuple(map(torch.stack, zip(*alone, strict=True))))


def test_compiled_is_eager() -> None:
    x, gates = torch.randn(2, 33, 4, requires_grad=True), -torch.rand(2, 33, 4)
    torch.compiler.reset()
    compiled = torch.compile(foci.scan, fullgraph=True, backend="aot_eager")
    gradients = [torch.autograd.grad(run(x, gates)[0].square().sum(), x)[0] for run in (compiled, foci.scan)]
    torch.testing.assert_close(*gradients)


def test_a_second_derivative_is_refused_not_zero() -> None:
    x = torch.ones(1, 3, 2, requires_grad=True)
    (first,) = torch.autograd.grad(foci.scan(x, -x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(foci.Unsupported, match="scan"):
        first.sum().backward()


def test_a_step_is_one_token() -> None:
    x, state = torch.randn(2, 1, 3), torch.randn(2, 3)
    out, final = foci.scan(x, -x.abs(), state=state, return_state=True)
    assert torch.allclose(foci.scan_step(x[:, 0], -x[:, 0].abs(), state), out[:, 0]) and torch.allclose(state, final)
