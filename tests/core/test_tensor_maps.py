"""Maps for TMA that launches are told of: known as such, made anew of another address, kept for one that is known."""

from __future__ import annotations

import functools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foci.core import tensor_maps

descriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
driver = pytest.importorskip("triton.backends.nvidia.driver")
WAY = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [8, 64], "fp4_padded": False}


def a_map() -> Any:
    return descriptor(torch.empty(16, 64, dtype=torch.bfloat16), [16, 64], [64, 1], [8, 64])


def launcher(ways: list[Any] | None, seen: list[Any]) -> Any:
    """Triton's own, of a kernel (count, map, map), around one that notes what it is given."""
    signature = {0: "i32", 1: "tensordesc<bf16[8,64]>", 2: "tensordesc<bf16[8,64]>"}
    return driver.wrap_handle_tensordesc(lambda *given: seen.append(given), signature, ways)


def test_a_map_is_known_as_one_and_nothing_else_is() -> None:
    assert tensor_maps.is_map(a_map())
    assert not any(map(tensor_maps.is_map, (None, 3, torch.empty(2), (a_map(),), SimpleNamespace(base=1))))


def test_the_launcher_beneath_is_what_tritons_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is told by this house is what Triton's would tell it, for whatever address."""
    filled: list[Any] = []

    def fill(*given: Any) -> tuple[Any, ...]:
        filled.append(given)
        return ("map", *given[:1])

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(driver.triton.runtime.driver, "_active", SimpleNamespace(utils=utils), raising=False)
    seen: list[Any] = []
    first, second = a_map(), a_map()
    compiled = SimpleNamespace(run=SimpleNamespace(launch=launcher([WAY, WAY], seen)))
    makers = tensor_maps.makers(compiled.run.launch, (3, first, second))
    expanded = [x for make, each in zip(makers, (first, second), strict=True)
                for x in (make(each.base.data_ptr()), *each.shape, *each.strides)]  # fmt: skip
    assert len(makers) == 2 and expanded[0] == ("map", first.base.data_ptr()) and expanded[1:5] == [16, 64, 64, 1]
    arguments = (3, first, second)
    head = (1, 1, 1, 0, 5, False, False, None, None, (4, 1, 99), None, None, None)
    nested = "kernel_args" in compiled.run.launch.__code__.co_varnames  # since Triton 3.7
    compiled.run.launch(*head, arguments) if nested else compiled.run.launch(*head, *arguments)
    beneath, _ = tensor_maps.c_launcher(compiled.run.launch)
    beneath(*head, [3, *expanded]) if nested else beneath(*head, 3, *expanded)
    assert seen[0] == seen[1]
    count = len(filled)
    assert makers[0](first.base.data_ptr()) == expanded[0] and len(filled) == count  # it is kept
    assert makers[0](4096) == ("map", 4096) and len(filled) == count + 1


def test_of_another_launcher_nothing_is_known() -> None:
    seen: list[Any] = []
    for launch in (print, None, functools.partial(launcher([WAY, WAY], seen)), launcher(None, seen)):
        assert tensor_maps.makers(launch, (3, a_map(), a_map())) == []
    assert tensor_maps.c_launcher(print) == (None, ())
    known = launcher([WAY, WAY], seen)
    assert tensor_maps.makers(known, (3, a_map())) == [] and tensor_maps.makers(known, (3, torch.empty(2))) == []


@pytest.mark.parametrize("ours", [True, False])
def test_of_another_backends_maps_nothing_is_known(ours: bool) -> None:
    """Since Triton 3.8 its backends share a launcher's wrapper, which holds what encodes their maps."""

    def wrap(launcher: Any, tensordesc_meta: list[Any], make_tensordesc_arg: Any) -> Any:
        def inner(*given: Any) -> Any:
            return launcher, tensordesc_meta, make_tensordesc_arg

        inner.__qualname__ = "wrap_handle_tensordesc_impl.<locals>.inner"
        return inner

    found = tensor_maps.c_launcher(wrap(print, [WAY], driver.make_tensordesc_arg if ours else print))
    assert found == ((print, [WAY]) if ours else (None, ()))


def test_no_tensor_is_kept() -> None:
    given = a_map()
    makers = tensor_maps.makers(launcher([WAY, WAY], []), (3, given, a_map()))
    there = weakref.ref(given.base)
    del given
    assert len(makers) == 2 and there() is None
