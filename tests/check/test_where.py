"""Where a joined tensor is wrong, and which of the known ways made it so."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.check import where
from foci.check.orders import places
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
