"""What the GPU backend of softmax refuses, and what it hands to its kernels."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import foci
from foci.core.tune import interpreting
from foci.ops.masks import Band
from foci.ops.softmax import gpu
from foci.ops.softmax.call import Call
from foci.ops.softmax.spec import SPEC


def bound(*shape: int, dtype: torch.dtype = torch.float32, **extra: Any) -> Call:
    B, T, S, H, K, V = shape
    sizes = ((B, T, H, K), (B, S, H, K), (B, S, H, V))
    assert SPEC.bind is not None
    call: Call = SPEC.bind(*(torch.zeros(size, dtype=dtype) for size in sizes), **extra)
    return call


def against(call: Call) -> list[str]:
    """The reasons but that there is no GPU here."""
    return [reason for reason in gpu.reasons(call) if "needs a GPU" not in reason]


def test_it_takes_everything_but_float64_wide_heads_and_nothing() -> None:
    offsets = torch.tensor([0, 2, 4])
    mask = foci.Packed(offsets) & foci.Causal() & foci.Window(3, 1) & Band(-2, None) & foci.Dense(torch.ones(4, 4) > 0)
    bias = torch.zeros(2, 1, 4)
    everything = bound(1, 4, 4, 2, 7, 512, mask=mask, bias=bias, sink=torch.zeros(2), softcap=2.0, dropout=0.1)
    assert against(everything) == []
    assert against(bound(1, 4, 4, 2, 7, 5, dtype=torch.float16)) == []
    assert against(bound(1, 4, 4, 2, 7, 5, dtype=torch.float64)) == ["float64 is not supported"]
    assert against(bound(1, 4, 4, 2, 513, 5)) == ["heads wider than 512 are not supported"]
    for empty in (bound(1, 4, 0, 2, 7, 5), bound(0, 4, 4, 2, 7, 5), bound(1, 0, 4, 2, 7, 5), bound(1, 4, 4, 2, 7, 0)):
        assert against(empty) == ["there is nothing to compute: a size is 0"]
    nobody = bound(1, 4, 4, 2, 7, 5, mask=foci.Packed(torch.tensor([0])))
    assert against(nobody) == ["there is nothing to compute: a size is 0"]


def test_without_a_gpu_it_says_so() -> None:
    found = gpu.reasons(bound(1, 4, 4, 2, 8, 8))
    assert found == ([] if interpreting() else ["it needs a GPU, the tensors are on cpu"])


def test_rows_too_long_for_32_bits_are_refused() -> None:
    call = bound(1, 1, 1, 1, 1, 1)
    long = call.k.expand(1, 1 << 30, 1, 1)
    assert against(call._replace(k=long, v=long)) == [f"rows longer than {1 << 29} tokens are not supported"]


def test_kernels_are_given_reaches_of_32_bits() -> None:
    call = gpu._prepared(bound(1, 4, 4, 2, 8, 8, mask=foci.Window(2**62, 3)))
    assert (call.left, call.right) == (1 << 29, 3)
    call = gpu._prepared(bound(1, 4, 4, 2, 8, 8, mask=Band(-(2**40), 2**40)))
    assert (call.left, call.right) == (1 << 29, 1 << 29)


def test_one_band_of_whole_rows_is_a_window_and_needs_nothing_of_the_device() -> None:
    call = gpu._prepared(bound(2, 4, 9, 2, 8, 8, mask=foci.Window(7, 9) & Band(-3, -1)))
    assert (call.left, call.right, call.band_low, call.band_high) == (7, -6, None, None)
    call = gpu._prepared(bound(2, 4, 9, 2, 8, 8, mask=Band(2, None)))
    assert (call.left, call.right) == (3, None)


def test_other_bands_are_left_to_the_kernels() -> None:
    each = Band(torch.tensor([1, 2]), 3)
    for mask in (each, foci.Lengths(torch.tensor([3, 4])) & Band(1, None)):
        call = gpu._prepared(bound(2, 4, 9, 2, 8, 8, mask=mask))
        assert call.band_low is not None and (call.left, call.right) == (None, None)


def test_offsets_and_lengths_that_nobody_has_to_wait_for_are_checked() -> None:
    for mask, said in (
        (foci.Packed(torch.tensor([0, 5])), "q_offsets ends at 5"),
        (foci.Lengths(torch.tensor([-1])), "kv_lengths.0. is -1"),
    ):
        with pytest.raises(ValueError, match=said):
            gpu.forward(bound(1, 4, 4, 2, 8, 8, mask=mask))


def test_it_is_light() -> None:
    assert "triton" not in vars(gpu) and "foci.ops.softmax.gpu" in sys.modules
