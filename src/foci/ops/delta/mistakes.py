"""Wrong equations people implement, so that the checker can name a fault."""

from __future__ import annotations

from foci.core.spec import Mistake

MISTAKES: tuple[Mistake, ...] = ()
