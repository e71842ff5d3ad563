"""bind: what fits is taken as it is, what does not is named with its value."""

from __future__ import annotations

import pytest
import torch

from foci.ops.selective_scan.call import bind, rates

X, A, KEY = torch.ones(2, 3, 4), torch.ones(4, 5), torch.ones(2, 3, 5)


def test_sizes_and_accumulators() -> None:
    assert bind(X, X, A, KEY, KEY).sizes == (2, 3, 4, 5, 2)
    packed = bind(X[:1], X[:1], A, KEY[:1], KEY[:1], offsets=torch.tensor([0, 1, 1, 3]))
    assert packed.sizes == (1, 3, 4, 5, 3)
    assert [bind(X, X, A, KEY, KEY, return_state=want).ends for want in (True, False)] == [2, 0]
    assert bind(X, X, A, KEY, KEY).ends == 2  # by default all that there is
    assert bind(X.bfloat16(), X, A, KEY, KEY).accumulator == torch.float32


def test_rates_are_finite_and_still_forget() -> None:
    for dtype in (torch.float32, torch.float64):
        found = rates(torch.tensor([-torch.inf, -1.0, 0.0]), dtype)
        assert found.isfinite().all() and found[1:].tolist() == [-1.0, 0.0]
        assert (1e-6 * found).exp()[0] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": X[0]}, "x has 2 dimensions"),
        ({"dt": X[..., :1]}, "dt has shape .* D=4"),
        ({"A": A[:3]}, "A has shape .* D=4"),
        ({"B": KEY[:, :2]}, "B has shape .* T=3"),
        ({"C": KEY[..., :2]}, "C has shape .* K=5"),
        ({"skip": torch.ones(5)}, "skip has shape .* D=4"),
        ({"skip": torch.ones(4).int()}, "skip must be a floating tensor, got int32"),
        ({"state": torch.ones(2, 5, 4)}, "state has shape"),
        ({"state": torch.ones(3, 4, 5)}, "state has 3 rows; expected 2"),
        ({"offsets": torch.tensor([0, 3])}, "offsets need a batch of 1"),
        ({"return_state": None}, "return_state must be True or False, got None"),
    ],
)
def test_what_does_not_fit_is_named(change: dict, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^selective_scan: {said}"):
        bind(**{"x": X, "dt": X, "A": A, "B": KEY, "C": KEY} | change)
