"""Cuts the delta rule's sequences into pieces of one chunk, as many as there can be, whatever its rule says."""

from __future__ import annotations

import pytest

from foci.ops.delta import pieces
from foci.ops.gpu import CHUNK
from foci.ops.stretches import Cut, cut_into


def cut(N: int, B: int, T: int, packed: bool, *_: object) -> Cut:
    return cut_into(CHUNK, N, T, packed)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "cut", cut)
