"""bfloat16 in Triton's interpreter, which computes it wrongly by itself, and TF32 as a GPU has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from foci.core.tune import interpreting
from foci.ops.delta import gpu

PRODUCT = interpreter.InterpreterBuilder.create_dot


def shortened(x: Any) -> Any:
    """A product's operand; of float32 the digits that TF32 has, the others cut off."""
    if x.data.dtype != np.float32:
        return x
    return interpreter.TensorHandle((x.data.view(np.int32) & -8192).view(np.float32), x.dtype)


def _wide(x: Any) -> Any:
    """bfloat16, which the interpreter holds as 16 bits, as float32."""
    return (x.data.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 rounds to nearest, and its products are of float32; TF32 cuts. A GPU needs nothing of it."""
    if not interpreting():
        return
    builder = interpreter.InterpreterBuilder
    plain = builder.cast_impl

    def cast(self: Any, x: Any, into: Any, *_: Any) -> Any:
        given, wanted = x.dtype.scalar, into.scalar
        if given == wanted == tl.bfloat16:
            return x
        if given == tl.bfloat16:
            return interpreter.TensorHandle(_wide(x).astype(interpreter._get_np_dtype(into)), wanted)
        if wanted == tl.bfloat16:
            near = torch.from_numpy(np.ascontiguousarray(x.data, np.float32)).bfloat16()
            return interpreter.TensorHandle(near.view(torch.int16).numpy().view(np.uint16), wanted)
        return plain(self, x, into)

    def product(self: Any, a: Any, b: Any, d: Any, input_precision: Any, most: Any) -> Any:
        assert a.dtype.scalar == b.dtype.scalar
        if a.dtype.scalar == tl.bfloat16:
            a, b = (interpreter.TensorHandle(_wide(x), tl.float32) for x in (a, b))
        elif input_precision.name == "TF32":
            a, b = shortened(a), shortened(b)
        return PRODUCT(self, a, b, d, input_precision, most)

    monkeypatch.setattr(builder, "create_dot", product)
    for name in ("fp_ext", "fp_trunc", "fp_to_fp", "fp_to_si", "fp_to_ui", "si_to_fp", "ui_to_fp", "int_cast"):
        monkeypatch.setattr(builder, f"create_{name}", cast)
    monkeypatch.setattr(gpu, "unsuitable", lambda *_: [])
