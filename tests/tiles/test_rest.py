"""Zeros where no document is, by programs behind those that do something else."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.core.tune import interpreting
from foci.tiles.rest import PROGRAMS, behind, clear_rest

if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1, which `make test` sets for these", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreting() else "cuda")


@triton.jit
def behind_kernel(x_ptr, y_ptr, own_ptr, widths, offsets_ptr, N, T):  # type: ignore[no-untyped-def]
    rest = behind()
    if rest >= 0:
        clear_rest(x_ptr, None, y_ptr, None, None, None, widths, offsets_ptr, rest, N, T)
        return
    tl.store(own_ptr + tl.program_id(0), 1)


@pytest.mark.parametrize("own", [0, 3])
@pytest.mark.parametrize(
    ("offsets", "start", "stop"),
    [((0, 9, 40), 0, 40), ((0, 0), 0, 0), ((5, 5, 50), 5, 50), ((0, 900), 0, 300), ((0, 300), 0, 300)],
)
def test_tokens_of_no_document_are_zero_and_no_others(
    own: int, offsets: tuple[int, ...], start: int, stop: int
) -> None:
    T, N = 300, len(offsets) - 1
    x, y = torch.ones(T, 70, device=DEVICE), torch.ones(T, 1, dtype=torch.float16, device=DEVICE)
    there, seen = torch.tensor(offsets, device=DEVICE), torch.zeros(5, dtype=torch.int32, device=DEVICE)
    behind_kernel[(own + PROGRAMS.value,)](x, y, seen, (70, 0, 1, 0, 0, 0), there, N, T)
    assert seen.tolist() == [1] * own + [0] * (5 - own)
    for found in x, y:
        assert bool((found[start:stop] == 1).all())
        assert not found[:start].any() and not found[stop:].any()
