"""Undoable: what an install gives back; `restore()` undoes it exactly, and so does the end of a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Undoable(ABC):
    """Something that was put into a model of someone else's, and can be taken out."""

    @abstractmethod
    def restore(self) -> None:
        """The model as it was."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
