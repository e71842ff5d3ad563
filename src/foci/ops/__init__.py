"""SPECS: the one list of operators."""

from __future__ import annotations

from foci.ops.decay.spec import SPEC as LINEAR
from foci.ops.delta.spec import SPEC as DELTA
from foci.ops.scan.spec import SPEC as SCAN
from foci.ops.selective_scan.spec import SPEC as SELECTIVE_SCAN
from foci.ops.softmax.spec import SPEC as SOFTMAX

SPECS = {spec.name: spec for spec in (SOFTMAX, LINEAR, DELTA, SCAN, SELECTIVE_SCAN)}
