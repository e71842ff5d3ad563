"""Two launches of which the second begins beside the first: programmatic dependent launch, from Hopper on.

The first one's programs call `begin_next`, and the second runs where processors are free. It may read what was written
before the first launch, an ordinary one; before it reads what that one writes it waits (`wait_for_last`). At its end
its programs wait too, or the last of them alone, so that whatever comes behind the second launch comes behind both.
What the first one reads or writes must be kept until the second is launched: memory that was given back could be the
second one's.
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
def wait_for_last(BESIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Behind it all that the launch before has written is there."""
    if BESIDE:
        gdc_wait()


@triton.jit
def flagged(ptr, count, stride):  # type: ignore[no-untyped-def]
    """The largest of `count` flags."""
    found = 0
    for i in range(0, count, 64):
        at = i + tl.arange(0, 64)
        found = tl.maximum(found, tl.max(tl.load(ptr + at.to(tl.int64) * stride, mask=at < count, other=0), 0))
    return found
