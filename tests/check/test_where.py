"""Where a joined tensor is wrong, and which of the known ways made it so."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import torch
from torch import Tensor

from foci.check import orders, where
from foci.check.orders import places
from foci.check.ranks import format_ranks
from foci.check.where import Sharding

SIZE, T = 3, 12
SHARDING = Sharding(1, places("plain", T, SIZE), torch.arange(0))


def contributions() -> list[Tensor]:
    return list(torch.randn(SIZE, 2, T, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def blocks(shards: list[Tensor]) -> Tensor:
    return torch.cat(shards, 1)


def found(got: Tensor, truth: Tensor, parts: list[Tensor]) -> str:
    wrong = where._wrong(got, truth, torch.float32, SHARDING)
    return where._match(got, truth, wrong, where._travelled(parts, truth, SHARDING), torch.float32)


def test_an_accumulator_sent_the_wrong_way_and_not_sent() -> None:
    """What a ring really adds up: block r - s at step s, the accumulator one rank on after each."""
    parts, held = contributions(), places("plain", T, SIZE)
    truth = blocks([sum(p[:, held[r]] for p in parts) for r in range(SIZE)])
    for back, sentence in ((1, ""), (-1, where.WRONG_WAY), (0, where.LEFT)):
        travelling = [torch.zeros_like(parts[0][:, held[0]]) for _ in range(SIZE)]
        for step in range(SIZE):
            for rank in range(SIZE):
                travelling[rank] = travelling[rank] + parts[rank][:, held[(rank - step) % SIZE]]
            travelling = [travelling[(rank - back) % SIZE] for rank in range(SIZE)]
        assert found(blocks(travelling), truth, parts) == sentence


def test_what_others_owe_and_what_is_owed_here() -> None:
    parts, held = contributions(), places("plain", T, SIZE)
    truth = sum(parts)
    own = blocks([parts[r][:, held[r]] for r in range(SIZE)])
    assert found(own, truth, parts) == where.OWN
    assert "own queries owe is missing" in found(truth - own, truth, parts)


def test_only_what_is_wrong_is_compared() -> None:
    truth = torch.randn(2, T, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = truth.clone()
    got[:, 4:8, 2] *= 3
    wrong = where._wrong(got, truth, torch.float32, SHARDING)
    assert wrong[:, 4:8, 2].all() and int(wrong.sum()) == 2 * 4 * 5
    assert "once for every rank" in where._match(
        got, truth, wrong, where._between_ranks(truth, SHARDING), torch.float32
    )


def test_a_rounded_tensor_is_told_from_a_wrong_one() -> None:
    truth = torch.randn(2, T, 4, 5, dtype=torch.float64)
    rounded = truth.bfloat16().float()
    assert torch.equal(where._rounded(rounded, truth), rounded)
    assert torch.equal(where._rounded(truth.float(), truth), truth)
    assert torch.equal(where._rounded(2 * rounded, truth), truth)


def test_nothing_wrong_has_no_cause() -> None:
    truth = torch.randn(2, T, 4, 5)
    assert (
        where._match(truth, truth, torch.zeros_like(truth, dtype=torch.bool), iter([("x", truth)]), torch.float32) == ""
    )


def said(numbers: Iterable[int]) -> str:
    return orders.format_positions(torch.tensor(list(numbers)))


def detective(size: int = SIZE, words: int = 2) -> where.FaultLocator:
    """Of tokens in plain order over the ranks, behind words that all of them have."""
    ranks = SimpleNamespace(
        world=SimpleNamespace(size=size),
        text_tokens=lambda length: words,
        places=lambda length: places("plain", length, size),
    )
    return where.FaultLocator(ranks)  # type: ignore[arg-type]


def test_a_place_is_ranks_positions_and_heads() -> None:
    asks = detective()
    sharding = asks._sharding(14, 1)
    assert [part.tolist() for part in sharding.parts] == [[*range(a, a + 4)] for a in (2, 6, 10)] and sharding.equal
    assert sharding.shared.tolist() == [0, 1] and sharding.dim == 1
    everywhere, every = (
        slice(None),
        f"on every rank and in the text that all ranks share at positions {said(range(14))}",
    )
    for tokens, heads, expected in (
        (everywhere, everywhere, every),
        (slice(6, 10), 2, f"on {format_ranks([1])} at positions {said(range(6, 10))}, in head {said([2])} alone"),
        ([3, 11], [0, 1], f"on {format_ranks([0, 2])} at positions {said([3, 11])}, in heads {said([0, 1])} alone"),
        ([1], everywhere, f"in the text that all ranks share at positions {said([1])}"),
        (slice(2, 14), everywhere, f"on every rank at positions {said(range(2, 14))}"),
    ):
        wrong = torch.zeros(2, 14, 4, 3, dtype=torch.bool)
        for token in range(14)[tokens] if isinstance(tokens, slice) else tokens:
            wrong[1, token, heads] = True
        assert asks._place(wrong, sharding) == expected
        if heads == everywhere:
            assert (
                asks._place(wrong.any(-1), sharding) == expected
                and asks._place(wrong.any(-1).any(-1), sharding) == expected
            )
    alone = detective(1, 0)
    assert alone._place(torch.ones(1, 4, dtype=torch.bool), alone._sharding(4, 1)).startswith(
        f"on {format_ranks([0])} at"
    )


def test_one_cause_is_one_sentence_wherever_it_is_seen_next() -> None:
    asks = detective()
    first = asks._sentence("out", "here", "it is zero")
    assert first == "out is wrong here: it is zero" == asks._sentence("out", "there", "it is zero")
    assert asks._sentence("out", "here", "") == "" and "there" in asks._sentence("out", "there", "it is late")
    assert asks.with_place("dq is wrong", " here ") == "dq is wrong (here)" == asks.with_place("dq is wrong", "there")
    assert asks.with_place("dk is wrong", "") == "dk is wrong"


def test_what_is_right_elsewhere_or_but_for_a_factor() -> None:
    truth = torch.randn(2, T, 4, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    held = [truth[:, part] for part in SHARDING.parts]
    cases = {
        "it is counted once for every rank": 3 * truth,
        "it is divided by the number of ranks": truth / 3,
        "it is zero: nothing was sent back": 0 * truth,
        where.REVERSED: blocks(held[::-1]),
        where.NEXT: blocks([*held[1:], held[0]]),
        where.BEFORE: blocks([held[-1], *held[:-1]]),
    }
    for sentence, got in cases.items():
        wrong = where._wrong(got, truth, torch.float32, SHARDING)
        assert where._match(got, truth, wrong, where._between_ranks(truth, SHARDING), torch.float32) == sentence
    uneven = Sharding(1, [torch.arange(4), torch.arange(4, 6), torch.arange(6, 12)], torch.arange(0))
    assert not uneven.equal
    for sharding in (uneven, Sharding(1, [torch.arange(T)], torch.arange(0))):
        assert len(list(where._between_ranks(truth, sharding))) == 3


def test_an_accumulator_one_rotation_short_of_home() -> None:
    parts, held = contributions(), places("plain", T, SIZE)
    truth = blocks([sum(p[:, held[r]] for p in parts) for r in range(SIZE)])
    short = [sum(p[:, held[(r + 1) % SIZE]] for p in parts) for r in range(SIZE)]
    assert found(blocks(short), truth, parts) == where.EARLY


def test_text_that_every_rank_has_with_one_rank_s_share() -> None:
    parts, truth = contributions(), sum(contributions())
    sharding = Sharding(1, [part + 3 for part in places("plain", T - 3, SIZE)], torch.arange(3))
    got = truth.clone()
    got[:, :3] = parts[1][:, :3]
    stories = list(where._shares(parts, truth, sharding))
    assert [sentence for sentence, _ in stories] == [where.SHARES] * 3 and torch.equal(stories[1][1], got)
    assert not torch.equal(truth[:, :3], got[:, :3]) and list(where._shares(parts, truth, SHARDING)) == []


def test_a_story_must_agree_where_it_is_told_and_differ_from_the_truth() -> None:
    truth = torch.randn(2, T, 4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    got, wrong = 2 * truth, torch.ones(2, T, 4, 5, dtype=torch.bool)

    def told(*stories: Tensor, dtype: torch.dtype = torch.float32) -> str:
        named = ((str(place), story) for place, story in enumerate(stories))
        return where._match(got, truth, wrong, named, dtype)

    assert told(truth, got[:, 1:], got * (1 + 2e-5), got) == "3" and told(got * 1.001) == ""
    assert told(got * 1.001, dtype=torch.bfloat16) == "0" and told(got * 1.1, dtype=torch.bfloat16) == ""
    assert told(got * torch.nan, got + torch.inf) == ""
    near = truth * (1 + 1e-5)
    assert where._match(near, truth, wrong, iter([("the truth", truth)]), torch.float32) == ""
    assert where._match(got * torch.inf, truth, wrong, iter([("x", got)]), torch.float32) == ""


def test_what_is_wrong_is_more_than_its_dtype_rounds() -> None:
    truth = torch.ones(1, T, 2, 4, dtype=torch.float64)
    off = truth.clone()
    off[:, 2:4, 1] += 1e-3
    assert int(where._wrong(off, truth, torch.float32, SHARDING).sum()) == 2 * 4
    assert not where._wrong(off, truth, torch.bfloat16, SHARDING).any()
    off[:, 7] += 1.0  # beside which the others are not told
    assert where._wrong(off, truth, torch.float32, SHARDING)[0, :, 0, 0].nonzero().flatten().tolist() == [7]
    off[:, 5] = torch.nan
    assert where._wrong(off, truth, torch.float32, SHARDING)[:, 5].all()
