"""The public functions: defaults, gradients, the compiler, and Mamba's own loop."""

from __future__ import annotations

import pytest
import torch

import foci
from foci.ops.selective_scan.spec import SPEC
from tests.ops.recurrences import CPU, error, inputs_of


def test_the_state_comes_when_asked_for() -> None:
    inputs = inputs_of(SPEC, "state")
    out, nothing = foci.selective_scan(**inputs)
    again, state = foci.selective_scan(**inputs, return_state=True)
    assert nothing is None and torch.equal(out, again) and state.shape == inputs["state"].shape


def test_chunked_is_chosen_and_unknown_backends_are_refused() -> None:
    inputs = inputs_of(SPEC, "plain")
    assert foci.explain("selective_scan", **inputs).chosen == "chunked"
    with pytest.raises(ValueError, match="selective_scan: unknown backend 'fast'"):
        foci.selective_scan(**inputs, backend="fast")


def test_gradcheck() -> None:
    inputs = next(case for case in SPEC.cases if case.name == "packed, states").make(torch.float64, CPU, 0)
    names = ("x", "dt", "A", "B", "C", "skip", "state")
    narrow = {n: inputs[n][:, :40] if n in ("x", "dt", "B", "C") else inputs[n] for n in names}
    narrow |= {n: narrow[n][..., :2] for n in ("x", "dt", "skip")} | {n: narrow[n][..., :2, :] for n in ("A", "state")}
    leaves = [narrow[name].clone().requires_grad_() for name in names]

    def run(x, dt, A, B, C, skip, state):
        offsets = torch.tensor([0, 1, 1, 36, 40])
        return foci.selective_scan(x, dt, A, B, C, skip=skip, state=state, offsets=offsets, return_state=True)

    assert torch.autograd.gradcheck(run, leaves)


def test_compiled_is_eager() -> None:
    inputs = inputs_of(SPEC, "no whole slabs", torch.float32)
    inputs["dt"].requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(foci.selective_scan, fullgraph=True, backend="aot_eager")
    gradients = [
        torch.autograd.grad(run(**inputs)[0].square().sum(), inputs["dt"])[0] for run in (compiled, foci.selective_scan)
    ]
    torch.testing.assert_close(*gradients)


def test_it_is_what_transformers_computes_in_a_loop() -> None:
    mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    theirs = getattr(mamba.mamba_selective_scan, "__wrapped__", mamba.mamba_selective_scan)
    inputs = inputs_of(SPEC, "skip", torch.float32)
    x, dt, B, C = (inputs[name].transpose(1, 2) for name in ("x", "dt", "B", "C"))
    out, state = theirs(x, dt, inputs["A"], B, C, D=inputs["skip"], return_last_state=True)
    ours, final = foci.selective_scan(**inputs, return_state=True)
    assert error(ours, out.transpose(1, 2)) < 1e-6 and error(final, state) < 1e-6


def test_a_step_is_one_token() -> None:
    inputs = inputs_of(SPEC, "one token")
    out, final = foci.selective_scan(**inputs, return_state=True)
    one = {name: x[:, 0] if name in ("x", "dt", "B", "C") else x for name, x in inputs.items()}
    torch.testing.assert_close(foci.selective_scan_step(**one), out[:, 0])
    torch.testing.assert_close(one["state"], final)
