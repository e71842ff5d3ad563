"""Calls that nobody chose, as `foci check --drawn` draws them, in place of the specimens.

They are drawn on the CPU and handed on as tensors without memory. What they launch has to compile as well: widths,
heads and features meet there as no specimen has them.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle

import torch
from arguments import drawing
from kernels_specimens import Specimen

from foci.bench.tuning import META
from foci.cli_check import drawn
from foci.cli_tune import DTYPES
from foci.core.spec import Case
from foci.ops import SPECS


def specimens(text: str) -> list[Specimen]:
    """Of every operator so many as `text` says, with the room of a GPU, in one dtype after the other."""
    said = drawing(text)
    return [
        Specimen(spec.name, case.name, partial(_made, case), dtype)
        for spec in SPECS.values()
        if spec.drawn is not None
        for case, dtype in zip(drawn(spec, said).cases, cycle(DTYPES.values()), strict=False)
    ]


def _made(case: Case, dtype: torch.dtype) -> dict[str, object]:
    return dict(case.make(dtype, META, 0))
