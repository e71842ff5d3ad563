"""SPECS, the one list of operators, and FUNCTIONS, by which a user calls each for all of its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foci.ops.decay.api import linear_attention
from foci.ops.decay.spec import SPEC as LINEAR
from foci.ops.delta.api import delta_rule
from foci.ops.delta.spec import SPEC as DELTA
from foci.ops.scan.api import scan as run_scan  # its own name is the folder's
from foci.ops.scan.spec import SPEC as SCAN
from foci.ops.selective_scan.api import selective_scan as run_selective_scan  # likewise
from foci.ops.selective_scan.spec import SPEC as SELECTIVE_SCAN
from foci.ops.softmax.api import attention_with_lse
from foci.ops.softmax.spec import SPEC as SOFTMAX

SPECS = {spec.name: spec for spec in (SOFTMAX, LINEAR, DELTA, SCAN, SELECTIVE_SCAN)}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    SOFTMAX.name: attention_with_lse,
    LINEAR.name: linear_attention,
    DELTA.name: delta_rule,
    SCAN.name: run_scan,
    SELECTIVE_SCAN.name: run_selective_scan,
}
