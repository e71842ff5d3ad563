"""How a case of the delta rule becomes the questions of the laws."""

from __future__ import annotations

from foci.core.spec import Probes

PROBES = Probes()
