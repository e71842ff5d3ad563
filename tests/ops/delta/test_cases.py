"""The cases: named once, what they say of their keys is true, and they cover what the operator promises."""

from __future__ import annotations

import pytest
import torch

from foci.ops.delta.cases import CASES, COSINE, PROBLEMS, Delta

CPU = torch.device("cpu")


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_features_are_what_the_arguments_say(problem: Delta) -> None:
    inputs, features = problem.case.make(torch.float64, CPU, 0), problem.case.features
    keys, beta = inputs["k"], inputs["beta"]
    assert torch.allclose(keys.norm(dim=-1), torch.tensor(problem.length, dtype=torch.float64))
    cosines = torch.einsum("bthk,bshk->bhts", keys, keys)
    cosine = float(
        (cosines.sum() - cosines.diagonal(dim1=-2, dim2=-1).sum()) / (cosines.numel() - keys[..., 0].numel())
    )
    if keys.shape[1] > 60:
        wanted = {"identical keys": 1.0, "correlated keys": COSINE}
        assert cosine == pytest.approx(next((wanted[f] for f in features & wanted.keys()), 0.0), abs=0.03)
    assert ("erase" in features) == ("erase" in inputs)
    assert ("negative eigenvalues" in features) == bool((beta > 1).any()) and beta.min() >= 0 and beta.max() <= 2
    assert bool((beta == problem.beta).all()) == problem.full


def test_some_documents_without_a_state_are_longer_than_a_chunk() -> None:
    packed = [case.make(torch.float32, CPU, 0) for case in CASES if "packed" in case.features]
    assert any("state" not in inputs and inputs["offsets"].diff().max() > 64 for inputs in packed)


def test_every_argument_is_exercised() -> None:
    features = set().union(*(case.features for case in CASES))
    assert features == {
        "decay per head", "decay per token", "decay per channel", "extreme", "gqa", "value width", "state", "packed",
        "scale", "strided", "erase", "negative eigenvalues", "identical keys", "correlated keys",
    }  # fmt: skip
