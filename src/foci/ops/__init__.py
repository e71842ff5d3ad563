"""SPECS: the one list of operators."""

from __future__ import annotations

from foci.ops.softmax.spec import SPEC as SOFTMAX

SPECS = {SOFTMAX.name: SOFTMAX}
