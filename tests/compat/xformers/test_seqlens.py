"""SeqLens: starts, sizes, order and cutting apart."""

from __future__ import annotations

import pytest
import torch

from foci.compat.xformers.seqlens import SeqLens


def test_the_three_kinds() -> None:
    packed, padded = SeqLens.packed([2, 0, 3]), SeqLens.padded([2, 0, 3], 4)
    gappy = SeqLens.gappy([1, 4, 6, 9], [2, 0, 3])
    assert packed.seqstart_py == [0, 2, 2, 5] and padded.seqstart_py == [0, 4, 8, 12]
    assert list(padded.intervals()) == [(0, 2), (4, 4), (8, 11)] and list(gappy.intervals()) == [(1, 3), (4, 4), (6, 9)]
    assert [info.full() for info in (packed, padded, gappy)] == [True, False, False]
    assert all(info.max_seqlen == 3 and info.min_seqlen == 0 for info in (packed, padded, gappy))
    assert packed.seqstart.dtype == packed.seqlen.dtype == torch.int32


def test_lengths_may_be_integers_of_other_libraries() -> None:
    assert SeqLens.packed(list(torch.tensor([2, 3]))).seqlen_py == [2, 3]  # type: ignore[arg-type]
    assert all(type(n) is int for n in SeqLens.packed(list(torch.tensor([2, 3]))).seqlen_py)  # type: ignore[arg-type]


def test_order() -> None:
    assert SeqLens.gappy([0, 3, 5], [3, 2]).in_order()
    assert not SeqLens.gappy([3, 0, 5], [2, 2]).in_order()
    assert not SeqLens.gappy([0, 3, 8], [4, 2]).in_order()


def test_split() -> None:
    info, x = SeqLens.packed([2, 2, 3]), torch.arange(7)[None]
    assert [part.tolist() for part in info.split(x)] == [[[0, 1]], [[2, 3]], [[4, 5, 6]]]
    assert [part.tolist() for part in info.split(x, [2, 1])] == [[[0, 1], [2, 3]], [[4, 5, 6]]]
    with pytest.raises(ValueError, match=r"expected \[1, 7"):
        info.split(x[:, :6])
    with pytest.raises(ValueError, match="room between"):
        SeqLens.padded([1, 2], 3).split(x)


def test_no_blocks_at_all() -> None:
    info = SeqLens.packed([])
    assert info.seqstart_py == [0] and info.max_seqlen == -1 and info.full() and info.in_order()


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(TypeError, match="tolist"):
        SeqLens.packed(torch.tensor([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"seqlen must be ints, got \[1\.5, 2\.5\]"):  # once cut to 1 and 2
        SeqLens.packed([1.5, 2.5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"kv_padding must be ints, got \[4\.5\]"):
        SeqLens.padded([1, 2], 4.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_seqstarts has 2 entries; expected 3"):
        SeqLens.gappy([0, 1], [1, 1])
    with pytest.raises(ValueError, match="ends behind 3"):
        SeqLens.gappy([0, 2, 3], [1, 2])
