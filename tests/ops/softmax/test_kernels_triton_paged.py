"""The kernels that read keys and values from pages, against the gathered cache: by the interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import foci
from foci.ops.softmax import gpu, paged
from tests.ops.in_triton import DEVICE, DTYPES, there
from tests.ops.softmax.test_paged import cache, forgotten, truth


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_of_any_size_and_strides(dtype: torch.dtype) -> None:
    sink = torch.randn(4)
    for page, extra in ((1, {}), (7, {"window": 20}), (64, {"softcap": 2.0, "sink": sink}), (128, {"window": 70})):
        inputs = cache(page=page, M=-(-130 // page), lengths=(130, 3, 65), dtype=dtype)
        expected = truth(inputs, **extra)
        for name in ("k_pages", "v_pages"):  # heads first, as some caches lie
            inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
        inputs["table"] = inputs["table"].t().contiguous().t()
        found = foci.attention_paged(**there(inputs | extra), backend="triton")
        assert found.dtype == dtype and found.device.type == DEVICE.type
        budget = 1e-5 if dtype == torch.float32 else 2e-3 if dtype == torch.float16 else 2e-2
        torch.testing.assert_close(found.cpu().double(), expected, rtol=budget, atol=budget)


def test_one_token_of_one_key_head_whose_rows_are_split_over_programs() -> None:
    inputs = cache(T=1, page=16, H=4, G=1, M=40, lengths=(600, 0))
    found = foci.attention_paged(**there(inputs), backend="triton")
    torch.testing.assert_close(found.cpu().double(), truth(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [1, 3])
def test_pages_before_the_window_may_be_anything(T: int) -> None:
    inputs = cache(T=T, page=16, M=8, lengths=(100, 128, 2))
    expected = truth(inputs, window=20)
    forgotten(inputs, 20)
    found = foci.attention_paged(**there(inputs), window=20, backend="triton")
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_it_is_what_is_chosen() -> None:
    inputs = there(cache())
    assert torch.equal(foci.attention_paged(**inputs), foci.attention_paged(**inputs, backend="triton"))


def test_transforms_gather_the_pages_and_a_tangent_is_not_lost() -> None:
    inputs = there(cache())
    expected, turned = foci.attention_paged(**inputs), inputs | {"q": -inputs["q"]}
    both = torch.stack([inputs["q"], turned["q"]])
    found = torch.func.vmap(lambda q: foci.attention_paged(**inputs | {"q": q}))(both)
    truth_of_both = torch.stack([expected, foci.attention_paged(**turned)])
    torch.testing.assert_close(found, truth_of_both, rtol=1e-5, atol=1e-5)
    with forward_ad.dual_level():
        moved = inputs | {"q": forward_ad.make_dual(inputs["q"], torch.ones_like(inputs["q"]))}
        with pytest.raises(foci.Unsupported, match="forward-mode"):
            foci.attention_paged(**moved)
        with pytest.raises(foci.Unsupported, match="do not reach it"):
            foci.attention_paged(**moved, backend="triton")
        assert forward_ad.unpack_dual(foci.attention_paged(**moved, backend="reference")).tangent.isfinite().all()


def test_page_numbers_out_of_range_name_the_nearest_page() -> None:
    """On a GPU nobody looks at them before the kernel does: nothing may be read from elsewhere."""
    inputs = cache(T=1, page=16, M=2, lengths=(20, 32))
    inputs |= {name: inputs[name].nan_to_num(1.0) for name in ("k_pages", "v_pages")}
    last = inputs["k_pages"].shape[0] - 1
    expected = foci.attention_paged(**inputs | {"table": torch.tensor([[0, 1], [last, 0]])}, backend="reference")
    for least, most in ((-1, last + 1), (-(2**31), 2**31 - 1)):
        wrong = inputs | {"table": torch.tensor([[least, 1], [most, least]], dtype=torch.int32)}
        tensors = paged._Tensors(**there(wrong), sink=None)
        found = gpu.forward_paged(paged._bound(tensors, None, None, None), tensors.table)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
