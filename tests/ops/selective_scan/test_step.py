"""Steps are the selective scan, token by token, and only the state changes."""

from __future__ import annotations

import pytest
import torch

from foci.ops.selective_scan.spec import SPEC
from foci.ops.selective_scan.step import forward
from tests.ops.recurrences import error, inputs_of


@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
@pytest.mark.parametrize("name", ["extreme rates", "skip"])
def test_steps_are_the_scan(name: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(SPEC, name, dtype)
    out, final = SPEC.reference(**inputs)
    x, dt, A, B, C = (inputs[name] for name in ("x", "dt", "A", "B", "C"))
    state = inputs.get("state", torch.zeros_like(final))
    steps = [forward(x[:, t], dt[:, t], A, B[:, t], C[:, t], state, skip=inputs.get("skip")) for t in range(x.shape[1])]
    found = torch.stack(steps, dim=1)
    assert found.dtype == dtype and error(found, out) < 2e-3 and error(state, final) < 1e-6
    assert dtype in (torch.bfloat16, torch.float16) or error(found, out) < 1e-6


def test_only_the_state_changes() -> None:
    x, A, key = torch.ones(2, 3), -torch.ones(3, 4), torch.ones(2, 4)
    before = [each.clone() for each in (x, A, key)]
    forward(x, x, A, key, key, torch.ones(2, 3, 4), skip=None)
    assert all(torch.equal(a, b) for a, b in zip((x, A, key), before, strict=True))


@pytest.mark.parametrize("name", ["x", "dt", "B", "C"])
def test_tokens_that_lie_in_the_state_are_read_as_they_were(name: str) -> None:
    memory = torch.rand(2, 3, 4)
    given = {"x": torch.rand(2, 3), "dt": torch.rand(2, 3), "B": torch.rand(2, 4), "C": torch.rand(2, 4)}
    given[name] = memory[..., 1] if name in ("x", "dt") else memory[:, 1]
    apart, state, A = {n: x.clone() for n, x in given.items()}, memory.clone(), -torch.rand(3, 4)
    expected = forward(**apart, A=A, state=state, skip=torch.ones(3))
    torch.testing.assert_close(forward(**given, A=A, state=memory, skip=torch.ones(3)), expected)
    torch.testing.assert_close(memory, state)


def test_autocast_rounds_nothing() -> None:
    x, key, A = torch.rand(2, 3), torch.rand(2, 4), -torch.rand(3, 4)
    state, again = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    expected = forward(x, x, A, key, key, again, skip=None)
    with torch.autocast("cpu", torch.bfloat16):
        found = forward(x, x, A, key, key, state, skip=None)
    assert torch.equal(found, expected) and torch.equal(state, again)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.ones(1, 2, 3)}, "x has 3 dimensions"),
        ({"C": torch.ones(2, 3)}, "C has shape"),
        ({"state": torch.ones(2, 3, 4).double()}, "state is float64; expected float32"),
        ({"A": torch.ones(3, 4, requires_grad=True)}, "it has no gradients"),
    ],
)
def test_what_does_not_fit_is_named(change: dict, said: str) -> None:
    x, key = torch.ones(2, 3), torch.ones(2, 4)
    good = {"x": x, "dt": x, "A": -torch.ones(3, 4), "B": key, "C": key, "state": torch.ones(2, 3, 4), "skip": None}
    with pytest.raises((ValueError, TypeError), match=f"^selective_scan_step: {said}"):
        forward(**good | change)
