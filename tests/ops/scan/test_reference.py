"""The reference is the equation, written here once more by hand."""

from __future__ import annotations

import torch

from foci.ops.scan.spec import SPEC
from tests.ops.recurrences import inputs_of


def test_it_is_the_equation_number_by_number() -> None:
    inputs = inputs_of(SPEC, "packed, states")
    x, gates, state, offsets = (inputs[name] for name in ("x", "log_decay", "state", "offsets"))
    out, final = SPEC.reference(**inputs)
    for document in range(len(offsets) - 1):
        for channel in range(x.shape[2]):
            h = state[document, channel].item()
            for t in range(offsets[document], offsets[document + 1]):
                h = torch.e ** gates[0, t, channel].item() * h + x[0, t, channel].item()
                assert abs(out[0, t, channel].item() - h) < 1e-12
            assert abs(final[document, channel].item() - h) < 1e-12


def test_no_rows_and_no_tokens() -> None:
    for shape in ((0, 3, 2), (3, 0, 2), (3, 2, 0)):
        out, final = SPEC.reference(torch.ones(shape), torch.zeros(shape))
        assert out.shape == shape and final.shape == (shape[0], shape[2])
