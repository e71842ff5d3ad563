"""As transformers calls FLA: its own torch references, called as its models call them, and our functions agree."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foci.compat import fla as ours

MODELS = {
    "chunk_gated_delta_rule": ("qwen3_next", "torch_chunk_gated_delta_rule"),
    "fused_recurrent_gated_delta_rule": ("qwen3_next", "torch_recurrent_gated_delta_rule"),
    "chunk_kda": ("kimi_linear", "chunk_kimi_delta_attention"),
    "fused_recurrent_kda": ("kimi_linear", "recurrent_kimi_delta_attention"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_call_of_a_model(name: str) -> None:
    folder, function = MODELS[name]
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    theirs = inspect.unwrap(getattr(module, function))
    kda = "kda" in name
    B, T, H, D = 2, 70 if name.startswith("chunk") else 1, 4, 8
    q, k = (torch.randn(B, T, H if kda else H // 2, D) for _ in range(2))
    v, beta = torch.randn(B, T, H, D), torch.rand(B, T, H)
    call: dict[str, Any] = {
        "g": F.logsigmoid(torch.randn(B, T, H, D) if kda else torch.randn(B, T, H)),
        "beta": beta,
        "initial_state": torch.randn(B, H, D, D),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    assert call.keys() | {"cu_seqlens"} <= inspect.signature(getattr(ours, name)).parameters.keys()
    out, state = getattr(ours, name)(q, k, v, cu_seqlens=None, **call)
    expected, final = theirs(q, k, v, **call)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-5)
