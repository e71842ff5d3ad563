"""Heads over ranks, and tensors cut by tokens and by heads: every share read and rejoined in one process."""

from __future__ import annotations

import pytest
import torch

from foci.parallel.heads import Route, shares

SIZES = [(8, 8, 4), (8, 2, 4), (8, 1, 3), (6, 3, 4), (7, 7, 3), (5, 1, 8), (3, 3, 8), (12, 4, 8), (6, 2, 4), (1, 1, 1)]


@pytest.mark.parametrize(("H", "G", "ranks"), SIZES)
def test_every_head_is_computed_once_and_reads_its_own_key_head(H: int, G: int, ranks: int) -> None:
    found = shares(H, G, ranks)
    assert [h for share in found for h in range(*share.heads)] == list(range(H))
    most, least = (pick(stop - start for (start, stop), _, _ in found) for pick in (max, min))
    assert most - least <= 1
    for (start, stop), keys, repeat in found:
        local = list(range(*keys)) if repeat is None else [keys[0] + place for place in repeat]
        if start == stop:
            assert local == []
            continue
        assert (stop - start) % len(local) == 0
        each = (stop - start) // len(local)
        assert [local[place // each] for place in range(stop - start)] == [h // (H // G) for h in range(start, stop)]


def test_aligned_key_heads_are_not_repeated() -> None:
    assert all(share.repeat is None for share in shares(8, 4, 2) + shares(8, 2, 4) + shares(8, 8, 3))
    assert [share.repeat for share in shares(6, 3, 2)] == [(0, 0, 1), (0, 1, 1)]


def test_channels_have_no_key_heads() -> None:
    assert [share.heads for share in shares(5, 0, 2)] == [(0, 3), (3, 5)]
    assert all(share.keys == (0, 0) for share in shares(5, 0, 2))


def routes(runs: list[tuple[int, int]], heads: int, lengths: tuple[int, ...]) -> list[Route]:
    return [Route((2, n, heads, 3), torch.float64, 1, lengths, 2, tuple(runs)) for n in lengths]


@pytest.mark.parametrize(("heads", "runs"), [(5, [(0, 2), (2, 4), (4, 5)]), (2, [(0, 1), (0, 2), (1, 2)])])
def test_there_and_back_are_each_others_transpose(heads: int, runs: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    lengths = (3, 0, 2)
    x = torch.randn(2, 5, heads, 3, dtype=torch.float64)
    held = routes(runs, heads, lengths)
    mine = x.split(lengths, 1)
    sent = [route.split_by_heads(part) for route, part in zip(held, mine, strict=True)]
    there = [held[r].join_tokens([sent[p][r] for p in range(3)]) for r in range(3)]
    for rank, (start, stop) in enumerate(runs):
        assert torch.equal(there[rank], x[:, :, start:stop])
        assert there[rank].shape == held[rank].shape_by_heads(rank)
        assert all(sent[p][rank].shape == held[p].message_shape(p, rank) for p in range(3))

    y = [torch.randn_like(part) for part in there]
    given = [held[r].split_by_tokens(y[r]) for r in range(3)]
    back = [held[p].join_heads([given[r][p] for r in range(3)]) for p in range(3)]
    # <y, A x> = <A' y, x>: what comes back is the gradient of what went.
    forward = sum((a * b).sum() for a, b in zip(y, there, strict=True))
    backward = sum((a * b).sum() for a, b in zip(back, mine, strict=True))
    torch.testing.assert_close(forward, backward)


def test_what_every_rank_holds_is_cut_and_its_gradients_are_added() -> None:
    route = Route((4, 3), torch.float64, None, (), 0, ((0, 2), (2, 4)))
    x = torch.randn(4, 3, dtype=torch.float64)
    parts = route.split_by_heads(x)
    assert torch.equal(torch.cat(parts), x) and torch.equal(route.join_heads(parts), x)
    assert route.split_by_tokens(x)[0] is x and torch.equal(route.join_tokens([x, x]), 2 * x)
    same = Route((1, 3), torch.float64, None, (), None, ((0, 2), (2, 4)))
    assert torch.equal(same.join_heads([x[:1], x[1:2]]), x[:1] + x[1:2])
