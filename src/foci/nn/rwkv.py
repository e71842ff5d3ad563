"""The time-mixing layer of RWKV-6."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from foci.core.spec import accumulator
from foci.nn.parts import sizes
from foci.nn.recurrent import Recurrent, Tokens


class _Decays(nn.Linear):
    """W y + b, of which a token's log_decay is -exp: b begins in [-6, -1], decays of 0.998 to 0.69."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.uniform_(self.bias, -6, -1)


class _DecayMap(nn.Sequential):
    """Two projections, tanh between them, called as one module: so hooks on it run, those of FSDP among them."""

    def forward(self, x: Tensor) -> Tensor:
        down, up = self
        mapped: Tensor = up(torch.tanh(down(x)))
        return mapped


class RWKV6TimeMix(Recurrent):
    """RWKV-6 (Finch): each input is the token mixed with the one before it, by a share that depends on both.

        d = x_{t-1} - x_t;  m = mu + up(tanh(W_down (x + d mu_x)));  x_i = x + d m_i        i = r, w, k, v, g
        r, k, v = W_i x_i;  log_decay = -exp(W_2 tanh(W_1 x_w) + b)
        y = o_proj(GroupNorm(merge(linear_attention(r, k, v, log_decay, bonus))) * silu(W_g x_g))

    hidden [B,T,D]; r, k, log_decay [B,T,H,K], v, g [B,T,H,V]; state [B,H,K,V]. K = head_dim (default D/H), V =
    value_dim (default K). mix_rank, decay_rank: how many channels the two low-rank maps go through.
    State: mu_x [D], mu [5, D], mix_down.weight [5 mix_rank, D], mix_up [5, mix_rank, D], {r,k,v,g}_proj.weight,
    w_proj.0.weight [decay_rank, D], w_proj.1.weight [H K, decay_rank], w_proj.1.bias, bonus [H, K],
    o_norm.weight, o_norm.bias [H V], o_proj.weight. Paper: Peng et al. 2024 (arXiv 2404.05892).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        mix_rank: int = 32,
        decay_rank: int = 64,
        layer_index: int | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_heads, None, head_dim, value_dim, layer_index, backend)
        sizes("RWKV6TimeMix", {"mix_rank": mix_rank, "decay_rank": decay_rank})
        D, H = hidden_size, num_heads
        keys, values = H * self.head_dim, H * self.value_dim
        self.mu_x = nn.Parameter(torch.empty(D, device=device, dtype=dtype))
        self.mu = nn.Parameter(torch.empty(5, D, device=device, dtype=dtype))
        self.mix_down = nn.Linear(D, 5 * mix_rank, bias=False, device=device, dtype=dtype)
        self.mix_up = nn.Parameter(torch.empty(5, mix_rank, D, device=device, dtype=dtype))
        self.bonus = nn.Parameter(torch.empty(H, self.head_dim, device=device, dtype=dtype))
        self.reset_parameters()
        self.r_proj = nn.Linear(D, keys, bias=False, device=device, dtype=dtype)
        self.k_proj = nn.Linear(D, keys, bias=False, device=device, dtype=dtype)
        self.v_proj = nn.Linear(D, values, bias=False, device=device, dtype=dtype)
        self.g_proj = nn.Linear(D, values, bias=False, device=device, dtype=dtype)
        down = nn.Linear(D, decay_rank, bias=False, device=device, dtype=dtype)
        self.w_proj = _DecayMap(down, _Decays(decay_rank, keys, device=device, dtype=dtype))
        self.o_norm = nn.GroupNorm(H, values, eps=64e-5, device=device, dtype=dtype)
        self.o_proj = nn.Linear(values, D, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialise this layer's own parameters: mixing shares of 0.5, nearly independent of tokens, and bonus 0."""
        nn.init.constant_(self.mu_x, 0.5)
        nn.init.constant_(self.mu, 0.5)
        nn.init.uniform_(self.mix_up, -0.01, 0.01)
        nn.init.zeros_(self.bonus)

    def mix(self, x: Tensor, tokens: Tokens) -> Tensor:
        change = tokens.previous("x", x) - x
        inner = torch.tanh(self.mix_down(x + change * self.mu_x)).unflatten(-1, (5, -1))
        share = self.mu + torch.einsum("btir,ird->btid", inner, self.mix_up)
        x_r, x_w, x_k, x_v, x_g = (x[:, :, None] + change[:, :, None] * share).unbind(2)
        r, k, v, g = self.r_proj(x_r), self.k_proj(x_k), self.v_proj(x_v), self.g_proj(x_g)
        w = self.w_proj(x_w)
        log_decay = -torch.exp(w.to(accumulator(w.dtype)))
        r, k = self._heads("r_proj", r, self.head_dim), self._heads("k_proj", k, self.head_dim)
        v, log_decay = self._heads("v_proj", v, self.value_dim), self._heads("w_proj", log_decay, self.head_dim)
        out = tokens.linear_attention(r, k, v, log_decay=log_decay, bonus=self.bonus, scale=1.0)
        normal = self.o_norm(out.flatten(0, 1).flatten(1)).view_as(g)  # each token by itself
        return normal * F.silu(g)
