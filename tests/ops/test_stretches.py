"""Few sequences are cut so that they fill a GPU, many or short ones are not."""

from __future__ import annotations

import pytest

from foci.core.tune import TARGETS
from foci.ops.stretches import LEAST, Costs, Cut, Rule, cheapest, cut, cut_into

H200 = TARGETS["sm_90"]
RULE = Rule(128, few=4, most=16)


@pytest.mark.parametrize(("N", "T", "warps"), [(1, 511, 1), (64, 4096, 32), (1, 100, 4000), (600, 4096, 1)])
def test_short_sequences_and_many_are_walked_whole(N: int, T: int, warps: int) -> None:
    assert cut(RULE, N, N, T, False, H200, warps) == Cut(0, N, 0)


@pytest.mark.parametrize("T", [512, 513, 4096, 65536])
@pytest.mark.parametrize("warps", [1, 32, 64])
def test_few_sequences_are_cut_into_the_shortest_stretches_that_fill_the_gpu(T: int, warps: int) -> None:
    found = cut(RULE, 1, 1, T, False, H200, warps)
    assert found.programs == found.slots == -(-T // found.tokens) > 1
    busy = T * warps / H200.processors / found.tokens
    assert busy < RULE.most and (busy >= RULE.most / 2 or found.tokens == RULE.shortest)


def test_documents_have_a_slot_each_and_those_without_tokens_a_program() -> None:
    assert cut(RULE, 5, 1, 1000, True, H200, 1) == Cut(128, 1000 // 128 + 5 + 5, 1000 // 128 + 5)


def test_what_is_longer_and_busier_to_begin_with() -> None:
    """A shortest stretch and the warps that are enough, where an operator has its own."""
    long, soon = Rule(1024, few=4, most=16), RULE._replace(few=2)
    assert [cut(long, 1, 1, T, False, H200, 1).tokens for T in (4 * 1024, 4 * 1024 - 1)] == [1024, 0]
    whole, few = (cut(soon, 1, 1, 4096, False, H200, 2 * H200.processors - less).tokens for less in (0, 1))
    assert whole == 0 < few


@pytest.mark.parametrize(("joined", "T", "wanted"), [(0.0, 32768, 128), (0.5, 32768, 128), (2.0, 32768, 256)])
def test_stretches_are_longer_where_each_would_join_too_many(joined: float, T: int, wanted: int) -> None:
    """Of documents those in one that is as long as the mean."""
    rule = RULE._replace(joined=joined)
    assert cut(rule, 1, 1, T, False, H200, 1).tokens == cut(rule, 4, 1, 4 * T, True, H200, 1).tokens == wanted


def test_a_cut_of_a_given_length() -> None:
    assert cut_into(0, 3, 600, True) == Cut(0, 3, 0)
    assert cut_into(64, 3, 130, False) == Cut(64, 9, 9)
    assert cut_into(64, 3, 130, True) == Cut(64, 8, 5)


COSTS = Costs(alone=2.0, shared=3.0, mapped=1.0, joined=1.0, started=6.0)


@pytest.mark.parametrize(("N", "T", "blocks"), [(1, LEAST, 1), (1, 512, 1), (264, 4096, 1), (1, 100, 1)])
def test_walks_that_are_short_or_fill_a_gpu_are_not_cut(N: int, T: int, blocks: int) -> None:
    assert cheapest(N, N, T, False, blocks, COSTS, H200) == Cut(0, N, 0)


def test_walks_are_cut_where_that_takes_less_and_never_where_maps_take_all_of_it() -> None:
    found = [cheapest(1, 1, T, False, 2, COSTS, H200).tokens for T in (4096, 65536)]
    assert found == [256, 1024]
    assert cheapest(1, 1, 65536, False, 2, COSTS._replace(mapped=1000.0), H200).tokens == 0
    assert cheapest(4, 1, 65536, True, 2, COSTS, H200).tokens == cheapest(4, 4, 16384, False, 2, COSTS, H200).tokens > 0
