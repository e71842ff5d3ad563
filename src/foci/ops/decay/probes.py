"""How a case of linear attention becomes the questions of the laws."""

from __future__ import annotations

from foci.core.spec import Probes

PROBES = Probes()
