"""Poisoned memory, and views that look like what they copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.check.memory import another_default, default_settings, poisoned, strided


def test_empty_is_nan_inside_and_the_switches_are_put_back() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with poisoned():
        assert torch.empty(4).isnan().all() and torch.empty_like(torch.ones(3)).isnan().all()
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)


def test_another_default_dtype_is_put_back() -> None:
    before = torch.get_default_dtype()
    with another_default():
        assert torch.empty(0).dtype == torch.float64
        with another_default():
            assert torch.empty(0).dtype == torch.float32
    assert torch.get_default_dtype() == before


def test_strided_views_equal_their_source_and_leave_the_rest_alone() -> None:
    x, ints = torch.randn(2, 3, 4), torch.arange(3)
    made = strided({"x": x, "ints": ints, "scale": 0.5, "vector": x[0, 0]})
    assert torch.equal(made["x"], x) and made["x"].stride(-1) == 2
    assert made["ints"] is ints and made["scale"] == 0.5 and made["vector"].is_contiguous()


def test_what_a_program_has_set_is_ordinary_inside_and_then_as_it_was() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with default_settings() as quiet:
            assert not torch.are_deterministic_algorithms_enabled()
        with default_settings() as changed:
            torch.set_default_dtype(torch.bfloat16)
            torch.set_grad_enabled(False)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert quiet == [] and len(changed) == 2
    assert "changes the default dtype from torch.float32 to torch.bfloat16" in changed[0]
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


@pytest.mark.parametrize("library", [torch.backends, torch.backends.cuda.matmul])
def test_a_precision_that_a_program_has_set_is_let_be(library: Any) -> None:
    """torch has two ways to say it, and refuses whoever asks by the other."""
    library.fp32_precision = "tf32"
    try:
        with default_settings() as quiet:
            pass
        assert quiet == [] and library.fp32_precision == "tf32"
    finally:
        library.fp32_precision = "none"
