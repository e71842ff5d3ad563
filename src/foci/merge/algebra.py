"""fold, and inclusive/exclusive scan, over anything that has `combine` and `neutral`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, Self, TypeVar


class Mergeable(Protocol):
    """A summary of some tokens: `a.combine(b)` summarises a's tokens followed by b's; `neutral()` no tokens."""

    def combine(self, later: Self) -> Self: ...

    def neutral(self) -> Self: ...


M = TypeVar("M", bound=Mergeable)


def fold(parts: Iterable[M]) -> M:
    """All parts combined, in order; raises ValueError when there is none, TypeError for one that cannot combine."""
    if hasattr(parts, "combine") or not isinstance(parts, Iterable):  # a Partial, itself a tuple, would be two tensors
        raise TypeError(f"fold: parts is of type {type(parts).__name__}; expected several parts, as a list")
    iterator = map(_mergeable, parts)
    total = next(iterator, None)
    if total is None:
        raise ValueError("fold: parts is empty; expected at least one part to merge")
    for part in iterator:
        total = total.combine(part)
    return total


def _mergeable(part: M) -> M:
    if not hasattr(part, "combine"):
        raise TypeError(f"fold: parts holds a {type(part).__name__}; expected each a foci.Partial or foci.Affine")
    return part


def scan(parts: Sequence[M], inclusive: bool = True) -> list[M]:
    """Entry i combines parts 0..i (inclusive), or 0..i-1 (exclusive, entry 0 neutral)."""
    found: list[M] = []
    running: M | None = None
    for part in parts:
        before = part.neutral() if running is None else running
        running = part if running is None else running.combine(part)
        found.append(running if inclusive else before)
    return found
