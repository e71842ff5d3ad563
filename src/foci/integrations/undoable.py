"""Undoable: the base of handles returned by `install`; `restore()` or the end of a `with` block undoes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Undoable(ABC):
    """A change to someone else's model that can be undone exactly."""

    @abstractmethod
    def restore(self) -> None:
        """Undo the change."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
