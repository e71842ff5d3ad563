"""Planted faults of parallel functions are caught at a world where they show, and named; what is right passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foci.check.ranks import Fatal, Named, _fatal, farthest
from foci.core.world import Lost, Raised
from tests.check import ranks_gallery
from tests.check.conftest import make_ranks
from tests.check.ranks_gallery import GALLERY, Plant

F32 = (torch.float32,)


def told(report) -> str:
    return "\n".join(f"{row.law}: {f.sentence} {f.cases[:3]}" for row in report.rows for f in row.failures)


@pytest.mark.parametrize("plant", GALLERY, ids=lambda plant: plant.name)
def test_fault_is_caught_and_named(plant: Plant, over_ranks) -> None:
    report = over_ranks(
        plant.function, plant.world, plant.law, order=plant.order, only_cases=plant.cases, dtypes=F32, hangs=plant.hangs
    )
    assert not report.ok and report.exit_code == 1
    assert any(all(word in failure.sentence for word in plant.words) for failure in report.failures), told(report)


def test_a_rank_that_never_comes_back_is_named_and_not_those_that_wait_for_it() -> None:
    late = Raised(RuntimeError("Timed out waiting 1000ms for recv operation"), "")
    failed = {0: Lost("it gave no answer for 63 s and was stopped", died=False), 1: late}
    world: Any = SimpleNamespace(size=3, timeout=1.0)
    assert _fatal(failed, world) == "it hangs: rank 0: it gave no answer for 63 s and was stopped"
    assert _fatal({1: late}, world) == "it hangs: rank 1 waited for ranks 0, 2, which had finished, until 1 s were over"


@pytest.mark.parametrize("plant", [p for p in GALLERY if p.hidden], ids=lambda plant: plant.name)
def test_fault_is_hidden_at_fewer_ranks(plant: Plant, over_ranks) -> None:
    report = over_ranks(plant.function, plant.hidden, plant.law, only_cases=plant.cases, dtypes=F32)
    assert report.ok, told(report)


@pytest.mark.parametrize("name", ["right", "right_ulysses", "right_joint"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_right_passes(name: str, size: int, over_ranks) -> None:
    report = over_ranks(getattr(ranks_gallery, name), size)
    assert report.ok, told(report)
    assert any("lengths that the ranks do not share" in reason for reason in report.not_tested)


def test_heads_before_tokens(over_ranks) -> None:
    report = over_ranks(ranks_gallery.right_bhtd, 3, "forward", "gradients", layout="bhtd", dtypes=F32)
    assert report.ok, told(report)


def test_dropout_that_does_not_depend_on_ranks_passes(over_ranks) -> None:
    report = over_ranks(ranks_gallery.right_dropout, 3, "dropout over ranks")
    assert report.ok, told(report)


def test_what_a_rank_writes_to_its_share_is_told(over_ranks) -> None:
    report = over_ranks(ranks_gallery.writes_to_k, 2, "inputs untouched", only_cases=("plain",), dtypes=F32)
    assert "k is overwritten" in told(report)


def test_after_ranks_were_lost_twice_no_more_are_started(hasty) -> None:
    ranks = make_ranks(hasty(2), ranks_gallery.dies)
    x = torch.ones(1, 4, 2, 4)
    for _ in range(2):
        with pytest.raises(Fatal, match=r"rank 1 died: .*SIGABRT"):
            ranks(x, x, x)
    ranks.world = None  # nobody is asked again
    ranks.text = None
    with pytest.raises(Fatal, match="rank 1 died"):
        ranks(x, x, x)


def test_a_mesh_and_the_order_are_given_to_who_names_them(worlds) -> None:
    ranks = make_ranks(worlds(2), ranks_gallery.takes_mesh_and_order, order="stripe")
    x = torch.ones(1, 4, 2, 4)
    assert torch.equal(ranks(x, x, x), 3 * x)


def test_ranks_record_gradients_where_the_caller_does(worlds) -> None:
    ranks = make_ranks(worlds(2), ranks_gallery.ones_if_recorded)
    x = torch.ones(1, 4, 2, 4)
    assert torch.equal(ranks(x, x, x), x)
    with torch.no_grad():
        assert torch.equal(ranks(x, x, x), 0 * x)


def test_the_farthest_copy_is_taken() -> None:
    a, b = torch.zeros(3), torch.ones(3)
    assert farthest([a, a, a]) is a
    assert farthest([a, b, a]) is b
    assert farthest([a, b]) is b


def test_a_callable_by_name() -> None:
    assert Named("tests.check.ranks_gallery", "Ring.forward").load() is ranks_gallery.Ring.forward
