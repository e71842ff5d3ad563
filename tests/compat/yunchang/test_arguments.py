"""Kernels by yunchang's names: exact ones are foci's choice, those that approximate are refused."""

from __future__ import annotations

import pytest
import torch

import foci
from foci.compat.yunchang.arguments import AttnType, Options, attend, check_kernel
from foci.core.errors import Unsupported


def test_names_are_the_peer_s() -> None:
    assert [each.value for each in AttnType] == [
        "aiter", "fa", "fa3", "flashinfer", "torch_math", "torch_flash", "torch_efficient", "torch_cudnn", "sage_auto",
        "sage_fp16", "sage_fp16_triton", "sage_fp8", "sage_fp8_sm90", "sparse_sage", "npu",
    ]  # fmt: skip
    assert AttnType.from_string("fa3") is AttnType.FA3
    with pytest.raises(ValueError, match="flash"):
        AttnType.from_string("flash")


@pytest.mark.parametrize("kind", AttnType)
def test_what_approximates_is_refused(kind: AttnType) -> None:
    if "sage" in kind.value:
        with pytest.raises(Unsupported, match="exact attention"):
            check_kernel(kind, None)
    else:
        check_kernel(kind, None)


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(TypeError, match="attn_type must be an AttnType, got 'fa'"):
        check_kernel("fa", None)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="attn_processor is Linear"):
        check_kernel(AttnType.FA, torch.nn.Linear(1, 1))


def test_in_one_process_all_options_are_those_of_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, 2, 4, dtype=torch.float64) for _ in range(3))
    slopes = torch.rand(2, 2, dtype=torch.float64)
    options = Options(0.0, 0.4, True, (3, 0), 2.0, False)
    out, lse = attend(lambda op: op, (q, k, v, slopes), options, lse=True)
    place = torch.arange(5)
    bias = -slopes[..., None, None] * (place[:, None] - place).abs()
    expected = foci.attention_with_lse(
        q, k, v, mask=foci.Causal() & foci.Window(3, None), bias=bias, softcap=2.0, scale=0.4
    )
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1].transpose(1, 2))
    assert len(attend(lambda op: op, (q, k, v, None), options, lse=False)) == 1


def test_a_word_is_no_flag() -> None:
    q = torch.randn(1, 5, 2, 4)
    for name, options in (
        ("causal", Options(0.0, None, "False", (-1, -1), 0.0, False)),  # type: ignore[arg-type]
        ("deterministic", Options(0.0, None, False, (-1, -1), 0.0, "False")),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got 'False'"):
            attend(lambda op: op, (q, q, q, None), options, lse=False)
