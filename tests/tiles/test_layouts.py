"""A product's sums lie as the next one's left operand: Triton is asked, as it compiles for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from foci.cli_tune_ahead import Offline, gpu
from foci.core.assembler import assembling
from foci.core.tune import TARGETS
from foci.tiles import layouts

pytestmark = pytest.mark.skipif(not hasattr(gl, "to_linear_layout"), reason="this Triton tells no layout")
OF_BYTES = gl.DotOperandLayout(0, layouts.BY_TOKEN.value, 4)


@gluon.jit
def asking_kernel(x_ptr, COLUMNS: gl.constexpr, SUMS: gl.constexpr, OPERAND: gl.constexpr):  # type: ignore[no-untyped-def]
    by_sums: gl.constexpr = gl.to_linear_layout(SUMS, [64, COLUMNS])
    by_operand: gl.constexpr = gl.to_linear_layout(OPERAND, [64, COLUMNS])
    gl.static_assert(by_sums == by_operand, "they lie otherwise")


def ask(columns: int, sums: Any, operand: Any) -> None:
    with assembling(90):
        asking_kernel.warmup(torch.float32, columns, sums, operand, grid=(1,))


@pytest.fixture(autouse=True)
def for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Offline(gpu(TARGETS["sm_90"]), 78))


@pytest.mark.parametrize(
    ("columns", "sums", "operand"),
    [
        (64, layouts.BY_TOKEN, layouts.OF_TOKENS),
        (128, layouts.BY_KEY, layouts.OF_KEYS),
        (64, layouts.BY_TOKEN, layouts.OF_KEYS),
    ],
)
def test_what_goes_from_a_product_to_the_next_moves_nothing(columns: int, sums: Any, operand: Any) -> None:
    ask(columns, sums.value, operand.value)


def test_another_operand_would_move() -> None:
    with pytest.raises(triton.CompilationError, match="they lie otherwise"):
        ask(64, layouts.BY_TOKEN.value, OF_BYTES)


def test_tiles_lie_as_triton_would_have_them() -> None:
    for shape in ([64, 64], [64, 128], [128, 128]):
        assert gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16) == layouts.OF_TILES.value
    assert gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32) == layouts.OF_SUMS.value
