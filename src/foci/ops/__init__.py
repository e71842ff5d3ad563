"""SPECS: the one list of operators."""

from __future__ import annotations

from foci.ops.decay.spec import SPEC as LINEAR
from foci.ops.delta.spec import SPEC as DELTA
from foci.ops.softmax.spec import SPEC as SOFTMAX

SPECS = {spec.name: spec for spec in (SOFTMAX, LINEAR, DELTA)}
