"""Poisoned memory, and views that look like what they copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foci.check.memory import SETTINGS, another_default, ordinary, poisoned, strided


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
    torch.set_float32_matmul_precision("high")
    try:
        with ordinary() as quiet:
            assert torch.get_float32_matmul_precision() == "highest"
        with ordinary() as changed:
            torch.set_default_dtype(torch.bfloat16)
            torch.set_grad_enabled(False)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert quiet == [] and len(changed) == 2
    assert "changes the default dtype from torch.float32 to torch.bfloat16" in changed[0]
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


BY_LIBRARIES = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


@pytest.fixture
def precisions() -> Iterator[None]:
    """Of float32, as nobody has set them, before and afterwards."""
    for time in range(2):
        torch.set_float32_matmul_precision("highest")
        for library in BY_LIBRARIES:
            library.fp32_precision = "none"
        if time == 0:
            yield


@pytest.mark.parametrize("library", BY_LIBRARIES)
def test_a_precision_that_is_set_by_library_is_as_it_was(library: Any, precisions: None) -> None:
    """torch then refuses to tell its older word for all of them."""
    library.fp32_precision = "tf32"
    before = {name: read() for name, (read, _, _) in SETTINGS.items()}
    with ordinary() as quiet:
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "highest"
    assert quiet == [] and before == {name: read() for name, (read, _, _) in SETTINGS.items()}
    library.fp32_precision = "none"  # what inherits was left to inherit
    assert {read() for name, (read, _, _) in SETTINGS.items() if "precision" in name} == {"none"}


def test_a_precision_of_products_on_gpus_alone_is_not_one_of_a_cpu(precisions: None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    with ordinary():
        pass
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_a_precision_that_is_changed_by_library_is_told(precisions: None) -> None:
    with ordinary() as changed:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert len(changed) == 1
    assert "changes the precision of float32 products on GPUs from ieee to tf32 and leaves it so" in changed[0]
    assert torch.backends.cuda.matmul.fp32_precision == "none"
    with ordinary() as changed:
        torch.set_float32_matmul_precision("high")
    assert len(changed) == 2 and torch.get_float32_matmul_precision() == "highest"
