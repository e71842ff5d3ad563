"""foci.nn.rwkv: RWKV-6's time mixing, token by token from its paper's equations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foci.nn.rwkv import RWKV6TimeMix

D, H, K, V, T = 12, 3, 4, 5, 7


def test_rwkv_6_token_by_token() -> None:
    layer = RWKV6TimeMix(D, H, head_dim=K, value_dim=V, mix_rank=3, decay_rank=2).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    x = torch.randn(T, D).double()
    before, state, right = torch.zeros(D).double(), torch.zeros(H, K, V).double(), []
    for t in range(T):
        change = before - x[t]
        inner = torch.tanh(layer.mix_down.weight @ (x[t] + change * layer.mu_x)).view(5, 3)
        r, w, k, v, g = (x[t] + change * (layer.mu[i] + inner[i] @ layer.mix_up[i]) for i in range(5))
        r, k = ((p.weight @ y).view(H, K) for p, y in ((layer.r_proj, r), (layer.k_proj, k)))
        v = (layer.v_proj.weight @ v).view(H, V)
        low = layer.w_proj[1].weight @ torch.tanh(layer.w_proj[0].weight @ w) + layer.w_proj[1].bias
        decay = torch.exp(-torch.exp(low)).view(H, K, 1)
        write = k[:, :, None] * v[:, None]
        out = torch.einsum("hk,hkv->hv", r, state + layer.bonus[:, :, None] * write)
        state = decay * state + write
        normal = F.layer_norm(out, (V,), eps=64e-5).flatten() * layer.o_norm.weight + layer.o_norm.bias
        right.append(layer.o_proj.weight @ (normal * F.silu(layer.g_proj.weight @ g)))
        before = x[t]
    torch.testing.assert_close(layer(x[None])[0], torch.stack(right))


def test_decays_begin_from_long_to_short() -> None:
    decay = torch.exp(-torch.exp(RWKV6TimeMix(64, 4).w_proj[1].bias))
    assert decay.min() < 0.75 and decay.max() > 0.99 and decay.max() < 1


@pytest.mark.parametrize("name", ["mix_rank", "decay_rank"])
def test_maps_of_no_rank_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"RWKV6TimeMix: {name} is 0; expected an integer of at least 1"):
        RWKV6TimeMix(D, H, **{name: 0})


def test_hooks_of_every_module_run() -> None:
    layer, seen = RWKV6TimeMix(16, 2), set()
    for name, module in layer.named_modules():
        module.register_forward_hook(lambda *_, name=name: seen.add(name))
    layer(torch.randn(1, 3, 16))
    assert seen == {name for name, _ in layer.named_modules()}
