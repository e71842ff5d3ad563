"""Which document a Gluon kernel's warps find for a slot, as threads on a CPU (tests/ops/in_gluon.py)."""

from __future__ import annotations

import sys

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from foci.core import tune
from foci.tiles.documents import document_of
from tests.ops.in_gluon import Gluon

pytestmark = pytest.mark.skipif(not tune.interpreting(), reason="runs as threads on a CPU")
CHUNK = 64


@gluon.jit
def _kernel(offsets_ptr, found_ptr, N, T, CHUNK: gl.constexpr):  # type: ignore[no-untyped-def]
    slot = gl.program_id(0)
    gl.store(found_ptr + slot, document_of(offsets_ptr, slot, N, T, CHUNK))


@pytest.mark.parametrize("lengths", [[130], [64, 1, 0, 200], [0, 0, 70], [1] * 45, [3, 500] * 40])
def test_every_slot_finds_the_last_document_that_is_not_past_it(lengths: list[int]) -> None:
    """Of document n slots begin at its first token // CHUNK + n."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    N, T = len(lengths), int(offsets[-1])
    slots = T // CHUNK + N
    begin = offsets[:-1] // CHUNK + torch.arange(N)
    found = torch.full((slots,), -1, dtype=torch.int32)
    Gluon(gl).run(sys.modules[__name__], _kernel, (slots,), (offsets, found, N, T), CHUNK=CHUNK)
    assert found.tolist() == [int((begin <= slot).sum()) - 1 for slot in range(slots)]
