"""Spec, Backend, Output: what they promise as data."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

from foci.core.spec import Backend, Output, Spec, WrongReturn, accumulator, as_outputs, run_in_process, slices_of


def spec(**changes: object) -> Spec:
    given = {
        "name": "toy", "equation": "y = x", "paper": "", "reference": lambda x: (x,), "plain": lambda x: (x,),
        "output_names": ("y",), "differentiable": ("x",), "cases": (),
    }  # fmt: skip
    return Spec(**(given | changes))  # type: ignore[arg-type]


def test_sums_are_kept_in_float32_or_better() -> None:
    assert accumulator(torch.float64) == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert accumulator(dtype) == torch.float32


def test_an_output_makes_its_fake() -> None:
    like = torch.zeros(2, dtype=torch.bfloat16, device="meta")
    fake = Output("lse", (2, 3, 4), torch.float32).empty(like)
    assert (fake.shape, fake.dtype, fake.device.type) == ((2, 3, 4), torch.float32, "meta")
    assert fake.is_contiguous()


def test_specs_and_their_parts_are_frozen() -> None:
    for value, field in ((spec(), "name"), (Backend("a", "b"), "module"), (Output("a", (), torch.float32), "shape")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, "other")


def test_a_backend_is_found_by_name_or_named_among_those_there_are() -> None:
    toy = spec(backends=(Backend("fast", "toy.fast"), Backend("slow", "toy.slow")))
    assert toy.backend("slow").module == "toy.slow"
    with pytest.raises(ValueError, match="toy: unknown backend 'quick'; expected one of 'fast', 'slow'"):
        toy.backend("quick")


def test_a_backend_without_its_package_says_so_and_is_not_imported() -> None:
    backend = Backend("ghost", "foci.no_such_module", needs=("no_such_package_of_anyone",))
    assert backend.reasons(None) == ["no_such_package_of_anyone is not installed"]
    assert "foci.no_such_module" not in sys.modules


def test_of_some_packages_one_is_enough() -> None:
    backend = Backend("either", "json", one_of=("no_such_package_of_anyone", "nor_this"))
    assert backend.missing() == backend.reasons(None) == ["no_such_package_of_anyone or nor_this is not installed"]
    assert Backend("either", "json", one_of=("no_such_package_of_anyone", "torch")).missing() == []


def test_a_backend_answers_by_its_module() -> None:
    reference = Backend("reference", "foci.ops.softmax.reference", needs=("torch",))
    assert reference.missing() == []
    assert reference.load() is sys.modules["foci.ops.softmax.reference"]
    assert reference.reasons(None) == []


def test_a_backend_is_ready_once_what_it_needs_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needed_by_a_toy.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    backend = Backend("toy", "json", needs=("needed_by_a_toy", "no_such_package_of_anyone"), one_of=("torch",))
    assert backend.missing() and "needed_by_a_toy" not in sys.modules
    assert backend.ready() is backend and "needed_by_a_toy" in sys.modules
    assert backend.reasons(None) == ["no_such_package_of_anyone is not installed"]


def test_here_calls_are_made_in_this_process() -> None:
    assert run_in_process(lambda ask: [ask(os.getpid), ask(lambda: None)]) == [os.getpid(), None]


def test_outputs_are_a_tensor_or_a_tuple_of_as_many() -> None:
    x = torch.zeros(2)
    assert as_outputs(x, ("out",)) == (x,)
    assert as_outputs([x, x], ("out", "lse")) == (x, x)
    for wrong, names in (((x,), ("out",)), (x, ("out", "lse")), ((x, None), ("out", "lse")), (None, ("out",))):
        with pytest.raises(WrongReturn, match="it returns"):
            as_outputs(wrong, names)


def test_a_place_is_one_for_all_outputs_or_one_for_each() -> None:
    first = (slice(None), slice(0, 3))
    assert slices_of(first, "out") == slices_of(first, "state") == first
    assert slices_of({"out": first}, "out") == first and slices_of({"out": first}, "state") is None
    assert slices_of((), "out") == ()
