"""Two launches of which the second begins beside the first: programmatic dependent launch, from Hopper on.

The first one's programs call `begin_next`, and the second runs where processors are free. It may read what was written
before the first launch; before it reads what that one writes it waits (`wait_if_flagged`). At its end its programs call
`outlast`, so that whatever comes behind the second launch comes behind both.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_next(BESIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Once all programs have come here, or ended, the next launch may begin."""
    if BESIDE:
        gdc_launch_dependents()


@triton.jit
def outlast(BESIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """This launch does not end before the one before it. One program waits: all would keep others from beginning."""
    if BESIDE:  # noqa: SIM102  what is known when it is compiled
        if tl.program_id(0) == tl.num_programs(0) - 1:
            gdc_wait()


@triton.jit
def wait_if_flagged(ptr, count, stride, BESIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Behind it all that the launch before has written is there, where one of `count` flags is not 0."""
    if BESIDE:
        found = 0
        for i in range(0, count, 64):
            at = i + tl.arange(0, 64)
            found = tl.maximum(found, tl.max(tl.load(ptr + at.to(tl.int64) * stride, mask=at < count, other=0), 0))
        if found > 0:
            gdc_wait()
