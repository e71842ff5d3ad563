"""What the scripts here say of errors: one that is no number is none too few."""

from __future__ import annotations

import math


def worst(*errors: float) -> float:
    """The largest; infinite where one is no number, which `max` would pass over."""
    return max((math.inf if math.isnan(each) else each for each in errors), default=0.0)
