"""A with block ends in restore(), errors or not; a handle that cannot restore is none."""

from __future__ import annotations

import pytest

from foci.integrations.undoable import Undoable


class Put(Undoable):
    restored = 0

    def restore(self) -> None:
        self.restored += 1


def test_the_end_of_a_block_restores() -> None:
    with Put() as put:
        assert put.restored == 0
    assert put.restored == 1


def test_an_error_restores_and_goes_on() -> None:
    put = Put()
    with pytest.raises(KeyError, match="lost"), put:
        raise KeyError("lost")
    assert put.restored == 1


def test_what_cannot_be_undone_is_refused() -> None:
    with pytest.raises(TypeError, match="restore"):
        Undoable()  # type: ignore[abstract]
