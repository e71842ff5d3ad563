"""The reference is the equation, written here once more by hand."""

from __future__ import annotations

import pytest
import torch

from foci.ops.selective_scan.spec import SPEC
from tests.ops.recurrences import inputs_of


def test_it_is_the_equation_number_by_number() -> None:
    inputs = inputs_of(SPEC, "packed, states")
    x, dt, A, B, C, skip, state, offsets = (
        inputs[name] for name in ("x", "dt", "A", "B", "C", "skip", "state", "offsets")
    )
    out, final = SPEC.reference(**inputs)
    for document in range(len(offsets) - 1):
        for d in range(x.shape[2]):
            h = state[document, d].tolist()
            for t in range(offsets[document], offsets[document + 1]):
                step, new = dt[0, t, d].item(), x[0, t, d].item()
                for k, rate in enumerate(A[d].tolist()):
                    h[k] = torch.e ** (step * rate) * h[k] + step * new * B[0, t, k].item()
                read = sum(a * b for a, b in zip(h, C[0, t].tolist(), strict=True))
                assert abs(out[0, t, d].item() - read - skip[d].item() * new) < 1e-11
            assert final[document, d].tolist() == pytest.approx(h, abs=1e-12)


def test_a_rate_of_minus_infinity_forgets_where_time_passes() -> None:
    A = torch.tensor([[-torch.inf]])
    ones, dt = torch.ones(1, 3, 1), torch.tensor([0.0, 0.5, 0.0])[None, :, None]
    out, _ = SPEC.reference(ones, dt, A, ones, ones, state=torch.full((1, 1, 1), 7.0))
    assert out.flatten().tolist() == [7.0, 0.5, 0.5]


def test_no_rows_no_tokens_no_channels_no_keys() -> None:
    for B, T, D, K in ((0, 3, 2, 2), (3, 0, 2, 2), (3, 2, 0, 2), (3, 2, 2, 0)):
        x, key = torch.ones(B, T, D), torch.ones(B, T, K)
        out, final = SPEC.reference(x, x, torch.ones(D, K), key, key)
        assert out.shape == x.shape and final.shape == (B, D, K)
