"""Other people's calling conventions of softmax attention, behind the operator's argument names."""

from __future__ import annotations

adapt = None
