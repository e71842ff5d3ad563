"""One integration per library, installed per model instance, fully undoable."""

from __future__ import annotations
