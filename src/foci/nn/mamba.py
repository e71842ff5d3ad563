"""The layer of Mamba-2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from foci.nn.parts import GatedRMSNorm, ShortConvolution, sizes
from foci.nn.recurrent import Recurrent, Tokens, begin_gates, gate_parameters, selective_decay
from foci.ops.layer_parts import gate, weigh


class Mamba2(Recurrent):
    """Mamba-2: linear attention with one decay per head and token, tied to the step dt that scales the input.

        z, (x, B, C), dt = W x;  (x, B, C) = conv(x, B, C);  dt = softplus(dt + dt_bias)
        h_t = exp(-exp(A_log) dt) h_{t-1} + B dt x^T;  y = out_proj(RMSNorm(merge(C h + D x) * silu(z)))

    In the paper's words: num_heads, num_key_heads = its groups (of B and C, default 1), head_dim = its state size K
    (default 128), value_dim = its head dimension V (default 64).  hidden [B,T,D]; C, B [B,T,G,K], x, z [B,T,H,V],
    dt [B,T,H]; state [B,H,K,V]. State, as in transformers: in_proj.weight [2 H V + 2 G K + H, D] (z, x, B, C, dt),
    conv1d.weight [H V + 2 G K, 1, conv_size], conv1d.bias, dt_bias, A_log, D [H], norm.weight [H V], out_proj.weight.
    Paper: Dao and Gu 2024 (arXiv 2405.21060).
    """

    output = "out_proj"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_heads: int = 1,
        head_dim: int = 128,
        value_dim: int = 64,
        conv_size: int = 4,
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # None would be the base's default, not the paper's.
        sizes("Mamba2", {"num_key_heads": num_key_heads, "head_dim": head_dim, "value_dim": value_dim})
        super().__init__(hidden_size, num_heads, num_key_heads, head_dim, value_dim, layer_index, backend)
        sizes("Mamba2", {"conv_size": conv_size})
        values, keys = num_heads * value_dim, num_key_heads * head_dim
        self.sizes = [values, values + 2 * keys, num_heads]
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes), bias=False, device=device, dtype=dtype)
        self.conv1d = ShortConvolution(values + 2 * keys, conv_size, bias=True, device=device, dtype=dtype)
        self.A_log, self.dt_bias = gate_parameters(num_heads, num_heads, device, dtype)
        self.D = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()
        self.norm = GatedRMSNorm(values, groups=num_key_heads, gate_first=True, device=device, dtype=dtype)
        self.out_proj = nn.Linear(values, hidden_size, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialise this layer's own parameters: gates, and D = 1. Submodules have their own reset_parameters."""
        begin_gates(self.A_log, self.dt_bias)
        nn.init.ones_(self.D)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        z, xBC, dt = self.in_proj(x).split(self.sizes, -1)
        keys = self.num_key_heads * self.head_dim
        x, B, C = tokens.convolve("conv1d", self.conv1d, xBC).split([self.sizes[0], keys, keys], -1)
        v = weigh(x, gate(dt, self.dt_bias)).unflatten(-1, (self.num_heads, self.value_dim))
        B, C = (y.unflatten(-1, (self.num_key_heads, self.head_dim)) for y in (B, C))
        log_decay = selective_decay(self.A_log, dt, self.dt_bias)
        out = tokens.linear_attention(C, B, v, log_decay=log_decay, scale=1.0)
        return self.norm(out.flatten(2) + weigh(x, self.D), z)
