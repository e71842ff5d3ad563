"""EXTRACT_FUNC_DICT: yunchang's cuts where it has them, whole and once for any length, and those of shard."""

from __future__ import annotations

import pytest
import torch

from foci.compat.yunchang.orders import EXTRACT_FUNC_DICT


def cut(name: str, value: torch.Tensor, rd: int, ud: int) -> list[list[int]]:
    extract = EXTRACT_FUNC_DICT[name]
    return [extract(value, rank, rd * ud, rd, ud)[0, :, 0, 0].int().tolist() for rank in range(rd * ud)]


def tokens(T: int) -> torch.Tensor:
    return torch.arange(T, dtype=torch.float32)[None, :, None, None].expand(1, T, 2, 3)


def test_cuts_are_the_peer_s_where_it_has_them() -> None:
    # Recorded from yunchang 0.6.4 for T=16, ring 2, Ulysses 2.
    assert cut("basic", tokens(16), 2, 2) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert cut("zigzag", tokens(16), 2, 2) == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert cut("strip", tokens(16), 2, 2) == [[0, 2, 4, 6], [8, 10, 12, 14], [1, 3, 5, 7], [9, 11, 13, 15]]


@pytest.mark.parametrize("T", [1, 7, 13])
@pytest.mark.parametrize("name", EXTRACT_FUNC_DICT)
@pytest.mark.parametrize(("rd", "ud"), [(3, 2), (1, 4), (4, 1)])
def test_any_length_is_cut_whole_and_once(name: str, rd: int, ud: int, T: int) -> None:
    assert sorted(place for each in cut(name, tokens(T), rd, ud) for place in each) == list(range(T))


def test_gradients_and_packed_tensors() -> None:
    value = torch.randn(2, 8, 3, 2, 4, requires_grad=True)
    for name, extract in EXTRACT_FUNC_DICT.items():
        part = extract(value, 1, 2, 2, 1)
        assert part.shape == (2, 4, 3, 2, 4), name
        (gradient,) = torch.autograd.grad(part.sum(), value)
        assert gradient.sum() == part.numel(), name
    assert torch.equal(EXTRACT_FUNC_DICT["basic"](value, 1, 4), value[:, 2:4])  # degrees may be left open


def test_ranks_that_do_not_fit_are_refused() -> None:
    for rank, size, rd, ud in ((0, 4, 2, 1), (4, 4, 2, 2), (-1, 4, 2, 2)):
        with pytest.raises(ValueError, match="expected rd \\* ud = world_size"):
            EXTRACT_FUNC_DICT["zigzag"](tokens(8), rank, size, rd, ud)
