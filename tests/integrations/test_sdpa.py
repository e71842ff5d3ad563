"""foci.integrations.sdpa: torch's scaled_dot_product_attention, argument for argument."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foci.core.errors import ShapeError
from foci.integrations.sdpa import sdpa, sdpa_bthd


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def same(arguments: dict, **changed: object) -> None:
    """Outputs and the gradients of every tensor that asks for one equal torch's."""
    arguments = {**arguments, **changed}
    wanting = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    expected, got = F.scaled_dot_product_attention(**arguments), sdpa(**arguments)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(got, wanting, weight), torch.autograd.grad(expected, wanting, weight), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.fixture
def qkv() -> dict:
    return {"query": draw(2, 4, 5, 8), "key": draw(2, 4, 7, 8), "value": draw(2, 4, 7, 6)}


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (2, 1, 1, 7), (1, 4, 5, 7), (2, 4, 5, 7), (4, 1, 7)])
@pytest.mark.parametrize("kind", ["bool", "float", "learned"])
def test_masks_of_every_shape(qkv: dict, shape: tuple[int, ...], kind: str) -> None:
    mask = torch.randn(shape)
    same(qkv, attn_mask=mask > -1 if kind == "bool" else mask.requires_grad_(kind == "learned"))


@pytest.mark.parametrize("keys", [3, 5, 7])
def test_causal_is_aligned_to_the_top_left(qkv: dict, keys: int) -> None:
    same(qkv, key=draw(2, 4, keys, 8), value=draw(2, 4, keys, 6), is_causal=True)


def test_scale_and_gqa(qkv: dict) -> None:
    same(qkv, key=draw(2, 2, 7, 8), value=draw(2, 2, 7, 6), scale=0.3, enable_gqa=True)


@pytest.mark.parametrize("lead", [(), (4,), (2, 3, 4)])
def test_any_rank(lead: tuple[int, ...]) -> None:
    same({"query": draw(*lead, 5, 8), "key": draw(*lead, 7, 8), "value": draw(*lead, 7, 6)})
    same(
        {"query": draw(*lead, 5, 8), "key": draw(*lead, 7, 8), "value": draw(*lead, 7, 6)},
        attn_mask=torch.randn(*lead, 5, 7),
    )


def test_a_row_that_sees_nothing_is_zero(qkv: dict) -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    same(qkv, attn_mask=mask)
    assert sdpa(**qkv, attn_mask=mask)[:, :, 2].eq(0).all()


def test_dropout_is_not_ignored(qkv: dict) -> None:
    plain, dropped = sdpa(**qkv), sdpa(**qkv, dropout_p=0.9)
    assert not torch.allclose(plain, dropped)


def test_fewer_heads_need_enable_gqa(qkv: dict) -> None:
    with pytest.raises(ShapeError, match=r"key has 2 heads, query has 4; expected equal without enable_gqa=True"):
        sdpa(qkv["query"], draw(2, 2, 7, 8), draw(2, 2, 7, 6))


def test_mask_and_is_causal_exclude_each_other(qkv: dict) -> None:
    with pytest.raises(ValueError, match="attn_mask and is_causal=True were both given"):
        sdpa(**qkv, attn_mask=torch.ones(5, 7, dtype=torch.bool), is_causal=True)


def test_foci_layout(qkv: dict) -> None:
    turned = {name: x.transpose(1, 2) for name, x in qkv.items()}
    torch.testing.assert_close(sdpa_bthd(**turned).transpose(1, 2), sdpa(**qkv))


def test_backend_is_the_callers(qkv: dict) -> None:
    with pytest.raises(ValueError, match="nothing"):
        sdpa(**qkv, backend="nothing")
    torch.testing.assert_close(sdpa(**qkv, backend="chunked"), sdpa(**qkv))
