"""bfloat16 in Triton's interpreter, which computes it wrongly by itself, and TF32 as a GPU has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from foci.core.tune import interpreting
from foci.ops import gpu, layer_parts
from foci.ops.decay import gpu as decay
from foci.ops.delta import gpu as delta
from foci.ops.scan import gpu as scan
from foci.ops.selective_scan import gpu as selective_scan
from foci.ops.softmax import gpu as softmax

PRODUCT = interpreter.InterpreterBuilder.create_dot
BETWEEN = interpreter.InterpreterBuilder.binary_op


def shortened(x: Any) -> Any:
    """A product's operand; of float32 the digits that TF32 has, the others cut off."""
    if x.data.dtype != np.float32:
        return x
    return interpreter.TensorHandle((x.data.view(np.int32) & -8192).view(np.float32), x.dtype)


def by_three(a: Any, b: Any, d: Any, exact: Any, most: Any) -> Any:
    """A product of float32 as a GPU makes it of what came in float16 (core/tune.py: float_precision)."""
    (high, low), (above, below) = (_in_two(x) for x in (a, b))
    small = PRODUCT(None, high, below, PRODUCT(None, low, above, d, exact, most), exact, most)
    return PRODUCT(None, high, above, small, exact, most)


def _in_two(x: Any) -> Any:
    """float32 as the nearest bfloat16, and that of what it leaves: 0 where it leaves no number."""
    wide = torch.from_numpy(np.ascontiguousarray(x.data))
    high = wide.bfloat16().float()
    low = (wide - high).nan_to_num(nan=0.0).bfloat16().float()
    return tuple(interpreter.TensorHandle(part.numpy(), x.dtype) for part in (high, low))


def _half(x: Any) -> bool:
    return bool(x.dtype.scalar.name == "bf16")


def _wide(x: Any) -> Any:
    """bfloat16, which the interpreter holds as 16 bits, as float32."""
    return (x.data.astype(np.uint32) << 16).view(np.float32)


def _near(data: Any) -> Any:
    """Numbers as the nearest bfloat16."""
    near = torch.from_numpy(np.ascontiguousarray(data, np.float32)).bfloat16()
    return interpreter.TensorHandle(near.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)


def cast(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A conversion, from and to bfloat16 too."""

    def converted(self: Any, x: Any, into: Any, *more: Any) -> Any:
        given, wanted = x.dtype.scalar, into.scalar
        if given == wanted == tl.bfloat16:
            return x
        if given == tl.bfloat16:
            return interpreter.TensorHandle(_wide(x).astype(interpreter._get_np_dtype(into)), wanted)
        return _near(x.data) if wanted == tl.bfloat16 else plain(self, x, into, *more)

    return converted


def product(self: Any, a: Any, b: Any, d: Any, input_precision: Any, most: Any) -> Any:
    assert a.dtype.scalar == b.dtype.scalar
    if _half(a):
        a, b = (interpreter.TensorHandle(_wide(x), tl.float32) for x in (a, b))
    elif input_precision.name == "TF32":
        a, b = shortened(a), shortened(b)
    return PRODUCT(self, a, b, d, input_precision, most)


def between(self: Any, a: Any, b: Any, op: Callable[..., Any]) -> Any:
    """Sums, products and comparisons of two numbers: exact, then rounded once."""
    if not _half(a) and not _half(b):
        return BETWEEN(self, a, b, op)
    assert _half(a) and _half(b), op
    made = op(_wide(a), _wide(b))
    return interpreter.TensorHandle(made, tl.int1) if made.dtype == bool else _near(made)


def unmended(compute: Callable[..., Any]) -> Callable[..., Any]:
    """What is asked of no bfloat16: the interpreter would compute it of its bits."""

    def asked(self: Any, *given: Any, **options: Any) -> Any:
        for value in given[0] if given and isinstance(given[0], tuple) else given:
            handle = getattr(value, "handle", value)
            assert not isinstance(handle, interpreter.TensorHandle) or not _half(handle), (compute, "of bfloat16")
        return compute(self, *given, **options)

    return asked


def but_bfloat16(*call: Any) -> list[str]:
    """What speaks against a call on a GPU, but that the interpreter is wrong."""
    return [reason for reason in gpu.unsuitable(*call) if "bfloat16" not in reason]


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 rounds to nearest, and its products are of float32; TF32 cuts. What no kernel does with it fails."""
    builder = interpreter.InterpreterBuilder
    for name in ("fp_ext", "fp_trunc", "fp_to_fp", "fp_to_si", "fp_to_ui", "si_to_fp", "ui_to_fp", "int_cast"):
        monkeypatch.setattr(builder, f"create_{name}", cast(getattr(builder, f"create_{name}")))
    monkeypatch.setattr(builder, "create_dot", product)
    monkeypatch.setattr(builder, "binary_op", between)
    monkeypatch.setattr(builder, "get_bf16", lambda self, value: _near([value]), raising=False)
    arithmetic = ("unary_op", "create_fma", "create_clampf", "create_idiv", "create_erf", "create_rsqrt")
    sums = ((interpreter.ReduceOps, ("sum", "min_max")), (interpreter.ScanOps, ("cumsum", "cumprod")))
    for ops, names in ((builder, arithmetic), *sums):
        for name in names:
            monkeypatch.setattr(ops, name, unmended(getattr(ops, name)))
    for backend in (decay, delta, scan, selective_scan, softmax, layer_parts):
        monkeypatch.setattr(backend, "unsuitable", but_bfloat16)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 and TF32 as a GPU has them, which needs nothing for it."""
    if interpreting():
        mend(monkeypatch)
