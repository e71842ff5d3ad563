"""Layers around the delta rule: DeltaNet, GatedDeltaNet, KimiDeltaAttention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from foci.nn.parts import GatedRMSNorm, RMSNorm, l2norm
from foci.nn.recurrent import Recurrent, Tokens, begin_gates, gate_parameters, low_rank, selective_decay


class _Delta(Recurrent):
    """Shared by the three: keys normalised after short convolutions, and beta."""

    operator = "delta"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_heads: int | None,
        head_dim: int | None,
        value_dim: int | None,
        conv_size: int,
        negative_eigenvalues: bool,
        layer_index: int | None,
        backend: str | None,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_key_heads, head_dim, value_dim, layer_index, backend)
        self.negative_eigenvalues = negative_eigenvalues
        self._make_qkv(device, dtype, conv_size)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False, device=device, dtype=dtype)
        self.o_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=False, device=device, dtype=dtype)

    def _attend(self, x: Tensor, tokens: Tokens, log_decay: Tensor | None = None) -> Tensor:
        q, k, v = self._qkv(x, tokens)
        beta = self.b_proj(x).sigmoid()
        beta = 2 * beta if self.negative_eigenvalues else beta
        return tokens.delta_rule(l2norm(q), l2norm(k), v, beta, log_decay=log_decay)


class DeltaNet(_Delta):
    """DeltaNet: what a key held is replaced, not added to.

        q, k = l2norm(conv(W x));  v = conv(W x);  beta = sigmoid(W_b x)
        y = o_proj(merge(RMSNorm(delta_rule(q, k, v, beta))))

    hidden [B,T,D]; q, k [B,T,G,K], v [B,T,H,V], beta [B,T,H]; state [B,H,K,V]. Arguments as in GatedDeltaNet.
    State: {q,k,v}_proj.weight, {q,k,v}_conv1d.weight [channels, 1, conv_size], b_proj.weight [H, D], o_norm.weight [V],
    o_proj.weight. Paper: Yang et al. 2024 (arXiv 2406.06484).
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
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size, num_heads, num_key_heads, head_dim, value_dim, conv_size, negative_eigenvalues, layer_index,
            backend, device, dtype,
        )  # fmt: skip
        self.o_norm = RMSNorm(self.value_dim, device=device, dtype=dtype)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        return self.o_norm(self._attend(x, tokens))


class _Gated(_Delta):
    """With a decay, whose gate parameters are initialised randomly."""

    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def reset_parameters(self) -> None:
        """Initialise this layer's own parameters: the gates'. Submodules have their own reset_parameters."""
        begin_gates(self.A_log, self.dt_bias)


class GatedDeltaNet(_Gated):
    """Gated DeltaNet: the delta rule with one decay per head and token, as in Qwen3-Next and OLMo hybrid.

        q, k = l2norm(conv(W x));  v = conv(W x);  beta = sigmoid(W_b x);  g = -exp(A_log) softplus(W_a x + dt_bias)
        y = o_proj(merge(RMSNorm(delta_rule(q, k, v, beta, log_decay=g)) * silu(W_g x)))

    hidden [B,T,D]; q, k [B,T,G,K], v, gate [B,T,H,V], beta, g [B,T,H]; state [B,H,K,V]. G = num_key_heads (default H)
    divides H = num_heads. K = head_dim (default D/H), V = value_dim (default K). negative_eigenvalues: beta in (0, 2).
    State: {q,k,v}_proj.weight, {q,k,v}_conv1d.weight [channels, 1, conv_size], a_proj.weight, b_proj.weight [H, D],
    A_log, dt_bias [H], g_proj.weight [H V, D], o_norm.weight [V], o_proj.weight.
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
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size, num_heads, num_key_heads, head_dim, value_dim, conv_size, negative_eigenvalues, layer_index,
            backend, device, dtype,
        )  # fmt: skip
        H, V = num_heads, self.value_dim
        self.a_proj = nn.Linear(hidden_size, H, bias=False, device=device, dtype=dtype)
        self.A_log, self.dt_bias = gate_parameters(H, H, device, dtype)
        self.reset_parameters()
        self.g_proj = nn.Linear(hidden_size, H * V, bias=False, device=device, dtype=dtype)
        self.o_norm = GatedRMSNorm(V, device=device, dtype=dtype)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        out = self._attend(x, tokens, selective_decay(self.A_log, self.a_proj(x), self.dt_bias))
        return self.o_norm(out, self.g_proj(x).view_as(out))


class KimiDeltaAttention(_Gated):
    """Kimi Delta Attention: the delta rule with a decay for every channel of the key.

        q, k = l2norm(conv(W x));  v = conv(W x);  beta = sigmoid(W_b x)
        g = -exp(A_log) softplus(W_f2 W_f1 x + dt_bias)
        y = o_proj(merge(RMSNorm(delta_rule(q, k, v, beta, log_decay=g)) * sigmoid(W_g2 W_g1 x + b_g)))

    hidden [B,T,D]; q, k [B,T,G,K], v, gate [B,T,H,V], beta [B,T,H], g [B,T,H,K]; state [B,H,K,V]. Arguments as in
    GatedDeltaNet. State: {q,k,v}_proj.weight, {q,k,v}_conv1d.weight [channels, 1, conv_size], b_proj.weight [H, D],
    f_proj.0.weight [V, D], f_proj.1.weight [H K, V], A_log [H], dt_bias [H K], g_proj.0.weight [V, D], g_proj.1.weight
    [H V, V], g_proj.1.bias, o_norm.weight [V], o_proj.weight. Paper: Kimi Team 2025 (arXiv 2510.26692).
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
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size, num_heads, num_key_heads, head_dim, value_dim, conv_size, negative_eigenvalues, layer_index,
            backend, device, dtype,
        )  # fmt: skip
        H, K, V = num_heads, self.head_dim, self.value_dim
        self.f_proj = low_rank(hidden_size, V, H * K, bias=False, device=device, dtype=dtype)
        self.A_log, self.dt_bias = gate_parameters(H, H * K, device, dtype)
        self.reset_parameters()
        self.g_proj = low_rank(hidden_size, V, H * V, bias=True, device=device, dtype=dtype)
        self.o_norm = GatedRMSNorm(V, activation="sigmoid", device=device, dtype=dtype)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        log_decay = selective_decay(self.A_log, self.f_proj(x), self.dt_bias)
        out = self._attend(x, tokens, log_decay.unflatten(-1, (self.num_heads, self.head_dim)))
        return self.o_norm(out, self.g_proj(x).view_as(out))
