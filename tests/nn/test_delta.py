"""foci.nn.delta: against transformers' own layers with the same weights, and DeltaNet token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foci.nn.delta import DeltaNet, GatedDeltaNet, KimiDeltaAttention

D, H, G, K, V, T = 24, 4, 2, 6, 5, 11


def shaken(layer: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return layer


def test_delta_net_token_by_token() -> None:
    layer = shaken(DeltaNet(D, H, num_key_heads=G, head_dim=K, value_dim=V, negative_eigenvalues=True).double())
    x = torch.randn(1, T, D).double()
    q, k, v = (
        F.silu(F.conv1d(F.pad((x @ p.weight.T).mT, (3, 0)), c.weight, groups=c.weight.shape[0])).mT[0]
        for p, c in (
            (layer.q_proj, layer.q_conv1d), (layer.k_proj, layer.k_conv1d), (layer.v_proj, layer.v_conv1d),
        )
    )  # fmt: skip
    q, k = (F.normalize(y.unflatten(-1, (G, K)), dim=-1) for y in (q, k))
    beta = 2 * torch.sigmoid(x[0] @ layer.b_proj.weight.T)
    rows = []
    for h in range(H):
        state, kh, qh, vh = torch.zeros(K, V).double(), k[:, h // 2], q[:, h // 2], v.unflatten(-1, (H, V))[:, h]
        out = []
        for t in range(T):
            state = state + beta[t, h] * torch.outer(kh[t], vh[t] - state.T @ kh[t])
            out.append(state.T @ qh[t] * K**-0.5)
        rows.append(F.rms_norm(torch.stack(out), (V,), layer.o_norm.weight, 1e-6))
    right = torch.cat(rows, -1) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x)[0], right, rtol=1e-4, atol=1e-5)  # l2norm adds 1e-6 to the square


def test_gated_delta_net_is_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = theirs.Qwen3NextConfig(
        hidden_size=D, linear_num_value_heads=H, linear_num_key_heads=G, linear_key_head_dim=K, linear_value_head_dim=V,
        num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    peer = shaken(theirs.Qwen3NextGatedDeltaNet(config, 0))
    layer = GatedDeltaNet(D, H, num_key_heads=G, head_dim=K, value_dim=V)
    qkvz, ba = peer.in_proj_qkvz.weight.view(G, -1, D), peer.in_proj_ba.weight.view(G, -1, D)
    parts = qkvz.split([K, K, H // G * V, H // G * V], 1)
    names = [f"{name}_proj.weight" for name in "qkvg"]
    state = {name: part.reshape(-1, D) for name, part in zip(names, parts, strict=True)}
    state |= {f"{n}_proj.weight": part.reshape(-1, D) for n, part in zip("ba", ba.split(H // G, 1), strict=True)}
    convolutions = peer.conv1d.weight.split([G * K, G * K, H * V])
    state |= {f"{n}_conv1d.weight": part for n, part in zip("qkv", convolutions, strict=True)}
    state |= {"A_log": peer.A_log, "dt_bias": peer.dt_bias, "o_norm.weight": peer.norm.weight}
    layer.load_state_dict({**state, "o_proj.weight": peer.out_proj.weight})
    x = torch.randn(2, T, D)
    torch.testing.assert_close(layer(x), peer(x), rtol=1e-4, atol=1e-5)


def test_kimi_delta_attention_is_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = theirs.KimiLinearConfig(
        hidden_size=D, linear_num_heads=H, linear_head_dim=K, rms_norm_eps=1e-6, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    peer = shaken(theirs.KimiLinearDeltaAttention(config, 0))
    layer = KimiDeltaAttention(D, H, head_dim=K)
    gate = peer.forget_gate
    state = {f"{name}_proj.weight": getattr(peer, f"{name}_proj").weight for name in "qkvbo"}
    state |= {f"{n}_conv1d.weight": part for n, part in zip("qkv", peer.conv1d.weight.chunk(3), strict=True)}
    state |= {"f_proj.0.weight": gate.f_a_proj.weight, "f_proj.1.weight": gate.f_b_proj.weight}
    state |= {"A_log": gate.A_log.flatten(), "dt_bias": gate.dt_bias.flatten(), "o_norm.weight": peer.o_norm.weight}
    state |= {"g_proj.0.weight": peer.g_a_proj.weight, "g_proj.1.weight": peer.g_b_proj.weight}
    layer.load_state_dict({**state, "g_proj.1.bias": torch.zeros(H * K)})
    x = torch.randn(2, T, D)
    torch.testing.assert_close(layer(x), peer(x), rtol=1e-4, atol=1e-5)


def test_decays_begin_between_what_mamba_2_has() -> None:
    layer = GatedDeltaNet(D, 64, head_dim=2)
    rate, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert rate.min() >= 1 and rate.max() <= 16
    assert dt.min() * 1.001 >= 0.001 and dt.max() <= 0.1001
