"""The names a user meets, nothing else."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foci.core.errors import MissingExtra, ShapeError, Unsupported
from foci.core.select import Explanation
from foci.core.select import explain as _explain
from foci.merge.affine import Affine
from foci.merge.algebra import fold
from foci.merge.partial import Partial
from foci.ops import SPECS
from foci.ops.decay.api import linear_attention, linear_attention_step
from foci.ops.delta.api import delta_rule, delta_rule_step
from foci.ops.masks import Causal, Dense, Lengths, Mask, Packed, Window
from foci.ops.scan.api import scan, scan_step
from foci.ops.selective_scan.api import selective_scan, selective_scan_step
from foci.ops.softmax.api import attention, attention_with_lse
from foci.ops.softmax.paged import attention_paged

if TYPE_CHECKING:
    from foci import nn, parallel
    from foci.accelerate.apply import Applied
    from foci.accelerate.run import accelerate
else:
    from foci import accelerate  # the room, which is callable: one name for both, whoever imports it first

__version__ = "0.1.0"

__all__ = [
    "Affine", "Causal", "Dense", "Explanation", "Lengths", "Mask", "MissingExtra", "Packed", "Partial", "ShapeError",
    "Unsupported", "Window", "accelerate", "apply", "attention", "attention_paged", "attention_with_lse",
    "delta_rule", "delta_rule_step", "explain", "fold", "linear_attention", "linear_attention_step", "nn", "parallel",
    "scan", "scan_step", "selective_scan", "selective_scan_step",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """foci.nn and foci.parallel are imported when first named: operators alone do not wait for layers."""
    if name in ("nn", "parallel"):
        return importlib.import_module(f"foci.{name}")
    raise AttributeError(f"module 'foci' has no attribute {name!r}")


def __dir__() -> list[str]:
    """With foci.nn and foci.parallel before they are named, as what completes a name asks this."""
    return sorted({*globals(), *__all__})


def explain(operator: str, *args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
    """Which backend would run this call, and every other backend's reasons. Tensors may be on the meta device."""
    if operator not in SPECS:
        raise ValueError(f"explain: unknown operator {operator!r}; expected one of {', '.join(map(repr, SPECS))}")
    spec = SPECS[operator]
    assert spec.bind is not None
    signature = inspect.signature(spec.bind)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        known = ", ".join(signature.parameters)
        raise TypeError(f"explain: {spec.function} {error}; expected arguments of {known}") from None
    with torch.random.fork_rng(devices=()):  # asking draws no seed from the generator
        return _explain(spec, spec.bind(*args, **kwargs), backend)


def apply(model: Any, plan: dict[str, Any] | str | Path) -> Applied:
    """Put a plan that `foci accelerate` wrote into a model or pipeline of the same kind; `.restore()` takes it out."""
    from foci.accelerate.apply import apply as put

    return put(model, plan)
