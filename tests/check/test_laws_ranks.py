"""Dropout over ranks: pieces that drop alike are found, whichever they are."""

from __future__ import annotations

import torch

from foci.check import laws_ranks
from foci.check.orders import places

T, SIZE = 8, 2
HELD = places("plain", T, SIZE)


def drawn() -> torch.Tensor:
    return torch.rand(1, T, 2, T, generator=torch.Generator().manual_seed(0)) < 0.5


def test_independent_pieces_are_no_repetition() -> None:
    assert laws_ranks._repeated(drawn(), HELD, HELD) is None


def test_heads_ranks_and_blocks_that_drop_alike() -> None:
    heads, ranks, blocks = drawn(), drawn(), drawn()
    heads[:, :, 1] = heads[:, :, 0]
    assert "head 1 drops what another head drops" in (laws_ranks._repeated(heads, HELD, HELD) or "")
    ranks[:, 4:] = ranks[:, :4]
    assert "ranks 0 and 1 drop alike" in (laws_ranks._repeated(ranks, HELD, HELD) or "")
    blocks[:, 4:, :, 4:] = blocks[:, :4, :, :4]
    assert "rank 1 drops of rank 1's keys what rank 0 drops of rank 0's" in (
        laws_ranks._repeated(blocks, HELD, HELD) or ""
    )
