"""Layers round the delta rule: DeltaNet, GatedDeltaNet, KimiDeltaAttention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foci.nn.parts import GatedRMSNorm, l2norm
from foci.nn.recurrent import Recurrent, Tokens, gate_parameters, selective_decay


class GatedDeltaNet(Recurrent):
    """Gated DeltaNet: the delta rule with one decay per head and token, as in Qwen3-Next and OLMo hybrid.

        q, k = l2norm(conv(W x));  v = conv(W x);  beta = sigmoid(W_b x);  g = -exp(A_log) softplus(W_a x + dt_bias)
        y = o_proj(merge(RMSNorm(delta_rule(q, k, v, beta, log_decay=g)) * silu(W_g x)))

    hidden [B,T,D]; q, k [B,T,G,K], v, gate [B,T,H,V], beta, g [B,T,H]; state [B,H,K,V]. G = num_key_heads (default H)
    divides H = num_heads. negative_eigenvalues: beta in (0, 2), for tracking of states. conv_size 0: no convolutions.
    State: {q,k,v}_proj.weight, {q,k,v}_conv1d.weight [channels, 1, conv_size], a_proj.weight, b_proj.weight [H, D],
    A_log, dt_bias [H], g_proj.weight, o_norm.weight [V], o_proj.weight.
    Papers: Yang et al. 2024 (arXiv 2412.06464); negative eigenvalues Grazzi et al. 2024 (2411.12537).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
        negative_eigenvalues: bool = False,
        layer_index: int = 0,
        backend: str | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_key_heads, head_dim, value_dim, layer_index, backend)
        D, H, V = hidden_size, num_heads, self.value_dim
        self.negative_eigenvalues = negative_eigenvalues
        self._make_qkv(conv_size, device, dtype)
        self.a_proj = nn.Linear(D, H, bias=False, device=device, dtype=dtype)
        self.b_proj = nn.Linear(D, H, bias=False, device=device, dtype=dtype)
        self.A_log, self.dt_bias = gate_parameters(H, H, device, dtype)
        self.g_proj = nn.Linear(D, H * V, bias=False, device=device, dtype=dtype)
        self.o_norm = GatedRMSNorm(V, device=device, dtype=dtype)
        self.o_proj = nn.Linear(H * V, D, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = self._qkv(x, tokens)
        beta = self.b_proj(x).sigmoid() * (2 if self.negative_eigenvalues else 1)
        log_decay = selective_decay(self.A_log, self.a_proj(x) + self.dt_bias)
        out = tokens.delta_rule(l2norm(q), l2norm(k), v, beta, log_decay=log_decay)
        return self.o_norm(out, self.g_proj(x).view_as(out))
