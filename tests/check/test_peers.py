"""What docs/parallel_peers.md says of other libraries' parallel attentions is true of these versions."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from foci.check.run import Report
from tests.check import peers

FOUND = {"diffusers": "0.42.1", "torch": "2.13.0"}
F32 = (torch.float32,)


@pytest.fixture(autouse=True)
def _versions() -> None:
    for package, version in FOUND.items():
        try:
            here = importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed; the page tells of {version}")
        if here != version:
            pytest.skip(f"the page tells of {package} {version}, here is {here}")


def told(report: Report) -> dict[str, list[str]]:
    return {row.law: [failure.sentence for failure in row.failures] for row in report.rows if row.failures}


def test_diffusers_ring_is_right_over_two_ranks_and_wrong_in_its_backward_over_three(over_ranks) -> None:
    asked = {"only_cases": ("plain",), "dtypes": F32}
    assert over_ranks(peers.diffusers_ring, 2, "forward", "logarithm", "gradients", **asked).ok
    report = over_ranks(peers.diffusers_ring, 3, "forward", "logarithm", "gradients", **asked)
    why = "is wrong on every rank at positions 0..23: as if the blocks were rotated the wrong way in the backward"
    assert told(report) == {"gradients": [f"dk {why}", f"dv {why}"]}


def test_diffusers_ring_drops_the_gradient_through_its_lse(over_ranks) -> None:
    report = over_ranks(peers.diffusers_ring, 2, "gradients through the logarithm", only_cases=("plain",), dtypes=F32)
    (sentences,) = told(report).values()
    assert all("the gradient through lse is dropped" in sentence for sentence in sentences)


def test_diffusers_ring_applies_each_rank_s_own_part_of_a_mask_over_keys(over_ranks) -> None:
    asked = {"only_cases": ("plain", "padding"), "dtypes": F32}
    report = over_ranks(peers.diffusers_ring_key_mask, 3, "forward", **asked)
    (sentence,) = told(report)["forward"]
    assert "as if each rank applied its own part of the mask to every block of keys" in sentence
    assert over_ranks(peers.diffusers_ulysses_key_mask, 3, "forward", "gradients", **asked).ok


def test_diffusers_ring_as_shipped_does_not_run_on_a_cpu(over_ranks) -> None:
    report = over_ranks(peers.diffusers_ring_native, 2, "forward", only_cases=("plain",), dtypes=F32)
    assert told(report) == {"forward": ["forward raised ValueError: Native attention does not support return_lse=True"]}


def test_diffusers_ulysses_is_right_but_for_the_backward_of_keys_of_another_length(over_ranks) -> None:
    laws = ("forward", "gradients")
    assert over_ranks(peers.diffusers_ulysses, 3, *laws, only_cases=("plain", "scale"), dtypes=F32).ok
    report = over_ranks(peers.diffusers_ulysses, 3, *laws, only_cases=("cross",), dtypes=F32)
    (sentence,) = told(report)["gradients"]
    assert sentence.startswith("backward raised RuntimeError: shape '[2, 3, 8, 2, 8]' is invalid")


def test_diffusers_ulysses_ends_a_process_where_lengths_differ(over_ranks) -> None:
    report = over_ranks(peers.diffusers_ulysses, 2, "forward", only_cases=("one token more",), dtypes=F32)
    (sentence,) = told(report)["forward"]
    assert "where a length is no multiple of the ranks" in sentence and "died" in sentence


def test_diffusers_anything_is_right_at_uneven_lengths_without_a_backward(over_ranks) -> None:
    cases = ("plain", "one token more", "heads the ranks do not share")
    report = over_ranks(peers.diffusers_ulysses_anything, 3, "forward", "gradients", only_cases=cases, dtypes=F32)
    assert not told(report) and report.rows[0].cases == 2
    assert any("heads that the ranks do not share equally: it raises AssertionError" in r for r in report.not_tested)
    assert any("not implemented" in reason for reason in report.not_tested)


def test_torch_context_parallel_refuses_causal_on_a_cpu(over_ranks) -> None:
    report = over_ranks(_only_causal, 2, "forward", only_cases=("causal",), layout="bhtd", dtypes=F32)
    assert not told(report) and not report.ok
    assert any("does not have a sharding strategy registered" in reason for reason in report.not_tested)


def _only_causal(q, k, v, *, is_causal=False, mesh, order):
    """Calls that are not causal would spend minutes on the search for a strategy."""
    if not is_causal:
        raise NotImplementedError("only causal is asked")
    return peers.torch_context_parallel(q, k, v, is_causal=is_causal, mesh=mesh, order=order)


def test_every_peer_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallel_peers.md").read_text()
    for name in vars(peers):
        if name.startswith(("diffusers_", "torch_context")):
            assert f"`{name}`" in page or f"`{name} " in page, name
