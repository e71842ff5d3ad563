"""Layers compute with the operators they are given, and refuse padding where these do not have every token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foci import Unsupported, nn
from foci.nn.operators import ALONE


@pytest.mark.parametrize("make", [nn.GatedDeltaNet, nn.Attention, nn.MultiScaleRetention])
def test_a_layer_has_those_of_one_process_until_it_is_given_others(make) -> None:
    layer, other = make(16, 2), make(16, 2)
    assert layer.operators is ALONE
    calls = []

    def counted(name: str):
        def run(*args, **options):
            calls.append(name)
            return getattr(ALONE, name)(*args, **options)

        return run

    names = ("attention", "linear_attention", "delta_rule")
    layer.operators = replace(ALONE, **{name: counted(name) for name in names})
    x = torch.randn(1, 5, 16)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), other(x))
    assert len(calls) == 1 and other.operators is ALONE


@pytest.mark.parametrize("make", [nn.GatedDeltaNet, nn.Attention])
def test_padding_is_refused_where_a_row_is_on_several_ranks(make) -> None:
    layer = make(16, 2)
    layer.operators = replace(ALONE, whole=False)
    with pytest.raises(Unsupported, match="mask, where the sequence is split over ranks"):
        layer(torch.randn(1, 5, 16), mask=torch.ones(1, 5, dtype=torch.bool))


def test_positions_count_from_the_first_token_of_all() -> None:
    layer = nn.Attention(16, 2)
    x = torch.randn(1, 5, 16)
    seen = []
    layer.operators = replace(
        ALONE, span=lambda T: (3, 3 + T), attention=lambda q, k, v, **rest: seen.append(q) or torch.zeros_like(v)
    )
    layer(torch.cat([x[:, 3:]], 1))
    layer.operators = replace(ALONE, attention=layer.operators.attention)
    layer(x)
    torch.testing.assert_close(seen[0], seen[1][:, 3:])
