"""Patches: which tokens they are, and what a family of blocks is."""

from __future__ import annotations

import pytest
from torch import nn

from foci.integrations.pipefusion_stage import FAMILIES, _cuts


@pytest.mark.parametrize(("tokens", "patches"), [(16, 4), (17, 4), (3, 8), (1, 1), (5, 5)])
def test_patches_are_all_tokens_in_order_and_none_is_empty(tokens: int, patches: int) -> None:
    cuts = _cuts(tokens, patches)
    assert [token for cut in cuts for token in range(cut.start, cut.stop)] == list(range(tokens))
    sizes = [cut.stop - cut.start for cut in cuts]
    assert len(cuts) == min(tokens, patches) and max(sizes) - min(sizes) <= 1 and min(sizes) > 0


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_a_class_of_diffusers_with_these_blocks(name: str) -> None:
    import diffusers

    from foci.accelerate.zoo import load

    zoo = {
        "DiTTransformer2DModel": "digits-dit",
        "PixArtTransformer2DModel": "pixart",
        "FluxTransformer2DModel": "flux",
    }
    model = load(zoo[name]).model
    assert isinstance(model, getattr(diffusers, name))
    for blocks in FAMILIES[name].lists:
        for block in getattr(model, blocks):
            assert isinstance(block.get_submodule(FAMILIES[name].attention), nn.Module)
