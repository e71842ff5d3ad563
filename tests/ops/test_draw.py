"""Draw: the same for the same seed in every dtype, and what each kind of number promises."""

from __future__ import annotations

import pytest
import torch

from foci.ops.draw import EXTREMES, Draw

CPU = torch.device("cpu")
KINDS = ("normal", "unit", "uniform", "state", "gates", "extremes")


def draw(dtype: torch.dtype = torch.float64, seed: int = 0) -> Draw:
    return Draw(dtype, CPU, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_a_tensor_and_a_dtype_rounds_it(kind: str) -> None:
    exact = getattr(draw(), kind)(3, 40, 5)
    assert torch.equal(exact, getattr(draw(), kind)(3, 40, 5))
    assert not torch.equal(exact, getattr(draw(seed=1), kind)(3, 40, 5))
    rounded = getattr(draw(torch.bfloat16), kind)(3, 40, 5)
    assert rounded.dtype == (torch.bfloat16 if kind in ("normal", "unit", "uniform") else torch.float32)
    assert torch.equal(rounded, exact.to(rounded.dtype))


@pytest.mark.parametrize("kind", [*KINDS, "boolean"])
def test_a_programs_default_device_changes_no_number(kind: str) -> None:
    numbers = getattr(draw(), kind)(3, 5)
    with torch.device("meta"):
        assert torch.equal(getattr(draw(), kind)(3, 5), numbers)


def test_kinds() -> None:
    assert torch.allclose(draw().unit(7, 5).norm(dim=-1), torch.ones(7, dtype=torch.float64))
    uniform = draw().uniform(1000, most=2.0)
    assert 0 <= uniform.min() < 0.1 and 1.9 < uniform.max() < 2
    gates = draw().gates(1000)
    assert gates.max() < 0 and -0.05 < gates.median() < -0.01 and gates.min() < -1
    assert sorted(draw().extremes(5).tolist()) == sorted(EXTREMES) and draw().extremes(0, 3).shape == (0, 3)
    assert sorted(draw().extremes(4, 5).flatten().tolist()) == sorted(4 * EXTREMES)
    assert draw().boolean(1000).double().mean() == pytest.approx(0.67, abs=0.05)
    assert draw().integers(0, 3).dtype == torch.int32
