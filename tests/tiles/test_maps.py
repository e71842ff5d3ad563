"""When a launch is given maps for TMA, and what these say of a tensor."""

from __future__ import annotations

import pytest
import torch

from foci.tiles import maps
from foci.tiles.maps import Tiles, tiles_of


def of(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def test_a_map_is_of_all_heads_and_rows() -> None:
    x = of(2, 3, 128, 4, 64)
    found = Tiles(2).rows(x, 64, 32)
    assert found.base is x and found.shape == [768, 256] and found.strides == [256, 1] and found.block_shape == [64, 32]
    lines = Tiles(2).lines(x, 8, 64)
    assert lines.shape == [3072, 64] and lines.strides == [64, 1] and lines.block_shape == [8, 64]
    part = of(1, 128, 12, 64)[:, :, 4:8]  # of one projection
    assert Tiles(2).rows(part, 64, 64).strides == [768, 1] and Tiles(2).rows(part, 64, 64).shape == [128, 256]
    for tma in (0, 1):
        assert Tiles(tma).rows(x, 64, 32) is x and Tiles(tma).lines(x, 8, 64) is x
    assert Tiles(2).rows(None, 64, 32) is None and Tiles(2).lines(None, 8, 64) is None


def test_maps_are_given_where_no_tile_is_cut() -> None:
    x, offsets = of(2, 128, 4, 64), torch.tensor([0, 128])
    assert tiles_of(True, True, 64, None, x, None, x) == Tiles(2)
    assert tiles_of(True, False, 64, None, x) == tiles_of(True, True, 64, offsets, x) == Tiles(1)
    assert tiles_of(False, True, 64, None, x) == Tiles(0)


@pytest.mark.parametrize(
    ("name", "x", "tma"),
    [
        ("a chunk that ends early", of(1, 100, 4, 64), 1),
        ("heads before tokens", of(2, 4, 128, 64).transpose(1, 2), 1),
        ("one head, wherever a second would be", of(2, 1, 128, 64).transpose(1, 2), 2),
        ("rows apart", of(2, 256, 4, 64)[:, :128], 1),
        ("one row of those", of(2, 256, 4, 64)[:1, :128], 2),
        ("a part of one projection", of(2, 128, 12, 64)[:, :, 4:8], 2),
        ("a part of heads", of(2, 128, 4, 128)[..., :64], 1),
    ],
)
def test_what_is_not_one_matrix_has_no_map(name: str, x: torch.Tensor, tma: int) -> None:
    assert tiles_of(True, True, 64, None, of(2, 128, 4, 64), x).tma == tma, name


@pytest.mark.parametrize(("version", "most"), [("3.6.0", 2), ("3.7.1", 1), ("3.9.0", 1)])
def test_what_is_too_much_for_a_map_has_none(version: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's sum of bytes overflows from 3.7 on. What counts is a state for each chunk, or a chunk's pairs."""
    monkeypatch.setattr(maps.triton, "__version__", version)
    for shape, by in (((1, 1 << 16, 32, 128), 2), ((1, 1 << 17, 32, 128), most), ((1, 1 << 18, 32, 64), most)):
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        assert tiles_of(True, True, 64, None, x) == Tiles(by), shape
    part = torch.empty(1, 1 << 16, 3 * 48, 128, dtype=torch.bfloat16, device="meta")[:, :, :48]  # of 2.25 GiB
    assert tiles_of(True, True, 64, None, part) == Tiles(most)
    assert maps.reaches((1 << 31) - 1) and maps.reaches(1 << 31) == (most == 2)
