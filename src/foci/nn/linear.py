"""Layers around linear attention: LinearAttention, retention, GLA and its simple form, HGRN2, gated slot attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from foci.core.spec import accumulator
from foci.nn.parts import FEATURE_MAPS, GatedRMSNorm, RMSNorm, choice, rotary, sizes
from foci.nn.recurrent import Recurrent, Tokens, low_rank
from foci.ops.arguments import number
from foci.ops.layer_parts import gate


class LinearAttention(Recurrent):
    """Linear attention with a feature map and, unless normalise=False, the normaliser that makes it an average.

        y = o_proj(merge(phi(q) S / (phi(q) z + 1e-10)))    S = sum phi(k) v^T;  z = sum phi(k)

    hidden [B,T,D]; q, k [B,T,G,K], v [B,T,H,V]; state [B,H,K',V+1], K' channels of phi. G = num_key_heads (default H)
    divides H = num_heads. K = head_dim (default D/H), V = value_dim (default K). feature_map: "elu" (elu + 1), "relu",
    "softmax" (over channels), "taylor" (exp to second order, K' = 1 + K + K^2), or "identity", whose products may be
    negative and so take no normaliser. The normalised average of float16 is computed in float32, as its sums grow with
    T. State: {q,k,v,o}_proj.weight.
    Paper: Katharopoulos et al. 2020 (arXiv 2006.16236).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        feature_map: str = "elu",
        normalise: bool = True,
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_key_heads, head_dim, value_dim, layer_index, backend)
        choice("LinearAttention", "feature_map", feature_map, FEATURE_MAPS)
        if normalise and feature_map == "identity":
            raise ValueError(
                "LinearAttention: normalise is True with feature_map 'identity', whose sums may vanish; expected False"
            )
        self.feature_map, self.normalise = feature_map, normalise
        self._make_qkv(device, dtype)
        self.o_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        phi = FEATURE_MAPS[self.feature_map]
        q, k, v = self._qkv(x, tokens)
        if not self.normalise:
            return tokens.linear_attention(phi(q), phi(k), v)
        if v.dtype != torch.float16:
            return _average(phi(q), phi(k), v, tokens)
        device = "cpu" if x.is_meta else x.device.type  # autocast knows no meta
        with torch.autocast(device, enabled=False):  # in float32: float16 ends at 65504, a long sum does not
            return _average(phi(q.float()), phi(k.float()), v.float(), tokens).to(v.dtype)


class MultiScaleRetention(Recurrent):
    """Retention (RetNet): rotary positions, and a fixed decay for each head, from short memories to long.

        y = o_proj(merge(RMSNorm(retention(rot(q), rot(k), v)) * silu(W_g x)))    decay of head h: 1 - 2^(-5-h)

    hidden [B,T,D]; q, k [B,T,G,K], v, gate [B,T,H,V]; state [B,H,K,V]. K = head_dim (default D/H, even), V = value_dim
    (default K), G = num_key_heads (default H). State: {q,k,v,g}_proj.weight, o_norm.weight [V], o_proj.weight.
    Paper: Sun et al. 2023 (arXiv 2307.08621).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_key_heads, head_dim, value_dim, layer_index, backend)
        if self.head_dim % 2:
            raise ValueError(f"MultiScaleRetention: head_dim is {self.head_dim}; expected an even number, for rotary")
        self._make_qkv(device, dtype)
        self.g_proj = nn.Linear(hidden_size, num_heads * self.value_dim, bias=False, device=device, dtype=dtype)
        self.o_norm = GatedRMSNorm(self.value_dim, device=device, dtype=dtype)
        self.o_proj = nn.Linear(num_heads * self.value_dim, hidden_size, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = self._qkv(x, tokens)
        positions = tokens.positions()
        head = torch.arange(self.num_heads, device=x.device, dtype=accumulator(x.dtype))
        log_decay = torch.log1p(-torch.exp2(-5 - head))
        out = tokens.linear_attention(rotary(q, positions), rotary(k, positions), v, log_decay=log_decay)
        return self.o_norm(out, self.g_proj(x).view_as(out))


class SimpleGatedLinearAttention(Recurrent):
    """Gated linear attention with one decay per head and token, which makes it fast.

        g = log sigmoid(W_gk x + b) / 16;  y = o_proj(merge(RMSNorm(linear_attention(q, k, v, g)) * silu(W_g x)))

    hidden [B,T,D]; q, k [B,T,G,K], v, gate [B,T,H,V], g [B,T,H]; state [B,H,K,V]. K = head_dim (default D/H), V =
    value_dim (default K), G = num_key_heads (default H). State: {q,k,v,g}_proj.weight, gk_proj.weight [H, D],
    gk_proj.bias, o_norm.weight [V], o_proj.weight. Papers: GLA (arXiv 2312.06635), Mamba-2 (2405.21060).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_key_heads, head_dim, value_dim, layer_index, backend)
        values = num_heads * self.value_dim
        self._make_qkv(device, dtype)
        self.gk_proj: nn.Module = nn.Linear(hidden_size, num_heads, device=device, dtype=dtype)
        self.g_proj = nn.Linear(hidden_size, values, bias=False, device=device, dtype=dtype)
        self.o_norm = GatedRMSNorm(self.value_dim, device=device, dtype=dtype)
        self.o_proj = nn.Linear(values, hidden_size, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = self._qkv(x, tokens)
        out = tokens.linear_attention(q, k, v, log_decay=self._log_decay(x))
        return self.o_norm(out, self.g_proj(x).view_as(out))

    def _log_decay(self, x: Tensor) -> Tensor:
        return _log_sigmoid(self.gk_proj(x), 1 / 16)


class GatedLinearAttention(SimpleGatedLinearAttention):
    """Gated linear attention: a decay for every channel of the key.

        g = log sigmoid(W_2 W_1 x + b) / 16;  y = o_proj(merge(RMSNorm(linear_attention(q, k, v, g)) * silu(W_g x)))

    hidden [B,T,D]; q, k [B,T,G,K], v, gate [B,T,H,V], g [B,T,H,K]; state [B,H,K,V]. K = head_dim (default D/H), V =
    value_dim (default K), G = num_key_heads (default H). State: {q,k,v,g}_proj.weight, gk_proj.0.weight [gate_rank, D],
    gk_proj.1.weight [H K, gate_rank], gk_proj.1.bias, o_norm.weight [V], o_proj.weight.
    Paper: Yang et al. 2023 (arXiv 2312.06635).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        gate_rank: int = 16,
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size, num_heads, num_key_heads=num_key_heads, head_dim=head_dim, value_dim=value_dim,
            layer_index=layer_index, backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        sizes("GatedLinearAttention", {"gate_rank": gate_rank})
        keys = num_heads * self.head_dim
        self.gk_proj = low_rank(hidden_size, gate_rank, keys, bias=True, device=device, dtype=dtype)

    def _log_decay(self, x: Tensor) -> Tensor:
        return super()._log_decay(x).unflatten(-1, (self.num_heads, self.head_dim))


class HGRN2(Recurrent):
    """HGRN2: a gated recurrence whose key is what the gate forgets.

        f = lower_bound + (1 - lower_bound) sigmoid(W_f x);  y = o_proj(RMSNorm(merge(linear_attention(
        silu(W_q x), 1 - f, W_i x, log_decay=log f))))

    hidden [B,T,D]; q, f [B,T,H,K], i [B,T,H,V]; state [B,H,K,V]. K = head_dim (default D/H), V = value_dim (default K).
    lower_bound in [0, 1): deeper layers take a larger one, to remember longer.
    State: {q,f,i}_proj.weight, o_norm.weight [H V], o_proj.weight. Paper: Qin et al. 2024 (arXiv 2404.07904).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        lower_bound: float = 0.0,
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_heads, None, head_dim, value_dim, layer_index, backend)
        lower_bound = number("HGRN2", "lower_bound", lower_bound)
        if not 0 <= lower_bound < 1:
            raise ValueError(f"HGRN2: lower_bound is {lower_bound}; expected a number in [0, 1)")
        self.lower_bound = lower_bound
        keys, values = num_heads * self.head_dim, num_heads * self.value_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False, device=device, dtype=dtype)
        self.f_proj = nn.Linear(hidden_size, keys, bias=False, device=device, dtype=dtype)
        self.i_proj = nn.Linear(hidden_size, values, bias=False, device=device, dtype=dtype)
        self.o_norm = RMSNorm(values, device=device, dtype=dtype)
        self.o_proj = nn.Linear(values, hidden_size, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        low, f = self.lower_bound, self._heads("f_proj", self.f_proj(x), self.head_dim)
        log_decay = _log_sigmoid(f)
        if low:
            log_decay = torch.logaddexp(log_decay + math.log1p(-low), log_decay.new_tensor(math.log(low)))
        forgets = (1 - low) * torch.sigmoid(-f)  # 1 - f without its cancellation
        q = self._heads("q_proj", F.silu(self.q_proj(x)), self.head_dim)
        i = self._heads("i_proj", self.i_proj(x), self.value_dim)
        self._check_share(f, i, "i_proj")
        out = tokens.linear_attention(q, forgets, i, log_decay=log_decay)
        return self.o_norm(out.flatten(2))


class GatedSlotAttention(Recurrent):
    """Gated slot attention: a softmax over M slots, each of which forgets at its own pace and takes what it forgot.

        f = log sigmoid(W_f x) / 8;  s = 1 - exp(f);  K_t = Diag(exp f) K_{t-1} + s k^T;  V_t likewise with v
        y = o_proj(RMSNorm(silu(merge(V_t^T softmax(K_t q)))))              q, k, v = silu(W x)

    hidden [B,T,D]; q, k [B,T,G,K], v [B,T,H,V], f [B,T,H,M], M = num_slots; states [B,H M,K,1] and [B,H,M,V]. K =
    head_dim (default D/H), V = value_dim (default K), G = num_key_heads (default H). K_t decays along what the operator
    takes for values, so its slots are heads with values of one channel: M times the work of the second pass.
    State: {q,k,v}_proj.weight, f_proj.weight [H M, D], o_norm.weight [H V], o_proj.weight.
    Paper: Zhang et al. 2024 (arXiv 2409.07146).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        num_slots: int = 64,
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_key_heads, head_dim, value_dim, layer_index, backend)
        sizes("GatedSlotAttention", {"num_slots": num_slots})
        self.num_slots, values = num_slots, num_heads * self.value_dim
        self._make_qkv(device, dtype)
        self.f_proj = nn.Linear(hidden_size, num_heads * num_slots, bias=False, device=device, dtype=dtype)
        self.o_norm = RMSNorm(values, device=device, dtype=dtype)
        self.o_proj = nn.Linear(values, hidden_size, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        q, k, v = (F.silu(y) for y in self._qkv(x, tokens))
        log_decay = _log_sigmoid(self.f_proj(x), 1 / 8)
        takes = -torch.expm1(log_decay).to(v.dtype)
        scores = tokens.linear_attention(q, k, takes[..., None], log_decay=log_decay, scale=1.0, name="keys")
        slots = (self.num_heads, self.num_slots)
        weights = scores.view(*scores.shape[:2], *slots).softmax(-1)
        takes, log_decay = takes.unflatten(-1, slots), log_decay.unflatten(-1, slots)
        out = tokens.linear_attention(weights, takes, v, log_decay=log_decay, scale=1.0, name="values")
        return self.o_norm(F.silu(out.flatten(2)))


def _average(q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
    """The normalised average: the output over the normaliser, which is computed as one more column of v."""
    both = tokens.linear_attention(q, k, F.pad(v, (0, 1), value=1.0)).to(accumulator(v.dtype))
    return (both[..., :-1] / (both[..., -1:] + 1e-10)).to(v.dtype)


def _log_sigmoid(x: Tensor, scale: float = 1.0) -> Tensor:
    """scale * log sigmoid(x) in float32 (float64 for float64): half precision cannot represent decays near 1."""
    return gate(x, rate=-scale, inverted=True)
