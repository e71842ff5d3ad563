"""bind: what fits is taken as it is, what does not is named with its value."""

from __future__ import annotations

import pytest
import torch

from foci.ops.scan.call import bind

X = torch.ones(2, 3, 4)


def test_sizes_and_accumulators() -> None:
    assert bind(X, X).sizes == (2, 3, 4, 2)
    assert bind(X[:1], X[:1], offsets=torch.tensor([0, 1, 1, 3])).sizes == (1, 3, 4, 3)
    assert [bind(X, X, return_state=want).ends for want in (True, False)] == [2, 0] and bind(X, X).ends == 2
    assert bind(X.bfloat16(), X).accumulator == torch.float32
    assert bind(X.double(), X).accumulator == torch.float64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": X[0]}, "x has 2 dimensions"),
        ({"log_decay": X[..., :1]}, "log_decay has shape .* D=4"),
        ({"x": X.int()}, "x must be a floating tensor, got int32"),
        ({"state": torch.ones(2, 4).long()}, "state must be a floating tensor, got int64"),
        ({"state": torch.ones(3, 4)}, "state has 3 rows; expected 2"),
        ({"log_decay": X.to("meta")}, "log_decay is on meta; expected cpu"),
        ({"log_decay": None}, "log_decay must be a tensor"),
        ({"offsets": torch.tensor([0, 3])}, "offsets need a batch of 1"),
        ({"return_state": 1}, "return_state must be True or False, got 1"),
    ],
)
def test_what_does_not_fit_is_named(change: dict, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^scan: {said}"):
        bind(**{"x": X, "log_decay": X} | change)
