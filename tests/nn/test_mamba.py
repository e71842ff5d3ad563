"""foci.nn.mamba: transformers' Mamba-2 mixer, its state dict loaded as it is."""

from __future__ import annotations

import pytest
import torch

from foci.nn.mamba import Mamba2


def test_mamba_2_is_transformers_with_its_state_dict() -> None:
    theirs = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = theirs.Mamba2Config(
        hidden_size=24, num_heads=6, head_dim=8, expand=2, state_size=10, n_groups=2, num_hidden_layers=1, chunk_size=4,
        layer_norm_epsilon=1e-6,
    )  # fmt: skip
    peer = theirs.Mamba2Mixer(config, 0).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    layer = Mamba2(24, 6, num_key_heads=2, head_dim=10, value_dim=8)
    layer.load_state_dict(peer.state_dict())
    x = torch.randn(2, 11, 24)
    torch.testing.assert_close(layer(x), peer(x), rtol=1e-4, atol=1e-5)


def test_what_a_token_adds_past_the_state_is_d() -> None:
    layer = Mamba2(24, 3, head_dim=4, value_dim=8).double()
    x = torch.randn(1, 1, 24).double()
    with torch.no_grad():
        layer.dt_bias.fill_(-1e4)  # nothing is written
        assert layer(x).any()
        layer.D.zero_()
        assert not layer(x).any()


def test_a_convolution_of_no_token_is_refused_by_the_layers_name() -> None:
    with pytest.raises(ValueError, match="Mamba2: conv_size is 0; expected an integer of at least 1"):
        Mamba2(24, 3, conv_size=0)


@pytest.mark.parametrize("name", ["num_key_heads", "head_dim", "value_dim"])
def test_a_size_of_none_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"Mamba2: {name} is None; expected an integer of at least 1"):
        Mamba2(24, 3, **{name: None})
