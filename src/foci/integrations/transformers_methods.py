"""transformers' recurrences that are written in a method, or stabilised by a running maximum, on foci's operators.

Makers, as in transformers_recurrences. A running maximum m scales numerator and denominator, so that exponentials stay
finite: with m computed first (a cumulative maximum) the rest is a plain linear recurrence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from foci.core.spec import accumulator
from foci.integrations.transformers_recurrences import How, Run, learns, offsets_of
from foci.ops.decay.api import linear_attention, linear_attention_step
from foci.ops.scan.api import scan


def lightning(how: How, theirs: Run) -> Run:
    """MiniMax's lightning attention, the whole forward: S_t = exp(-slope_h) S_{t-1} + k v^T, o = S^T q."""

    def run(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor]:
        offsets = offsets_of(keywords, "lightning attention")
        B, T = hidden_states.shape[:2]
        qkv = self.act_fn(self.qkv_proj(hidden_states))
        if attention_mask is not None:
            qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
        q, k, v = qkv.view(B, T, self.num_attention_heads, -1).chunk(3, dim=-1)
        past = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
        decay = -self.slope_rate[:, 0, 0].to(accumulator(v.dtype))
        if past is not None and T == 1 and offsets is None and not learns(qkv, past):
            state = past.to(decay.dtype, copy=True)  # the old one may be kept: it is returned as the weights
            out = linear_attention_step(q[:, 0], k[:, 0], v[:, 0], state, log_decay=decay, scale=1.0)[:, None]
        else:
            past = None if past is None else past.to(decay.dtype)
            out, state = linear_attention(
                q, k, v, log_decay=decay, scale=1.0, state=past, offsets=offsets, return_state=True, backend=how.backend
            )
        state = state.to(v.dtype)
        gate = torch.sigmoid(self.output_gate(hidden_states))
        out = self.out_proj(gate * self.norm(out.reshape(B, T, -1)))
        if past_key_values is not None:
            past_key_values.set_linear_cache(self.layer_idx, state)
        return out, state

    return run


def rg_lru(how: How, theirs: Run) -> Run:
    """The Real-Gated LRU of RecurrentGemma: h_t = a_t h_{t-1} + x_t, forgetting where a document begins."""

    def run(
        self: nn.Module,
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        recurrent_states: Tensor | None,
        acc_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        if hidden_states.shape[1] == 1:
            return theirs(self, hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype)
        wide = accumulator(hidden_states.dtype)
        gate = recurrent_gate.to(wide)
        log_gate = gate.clamp(min=torch.finfo(wide).tiny).log().masked_fill(reset, -torch.inf)
        h, state = scan(
            hidden_states.to(wide), log_gate, state=recurrent_states, return_state=True, backend=how.backend
        )
        assert state is not None
        return h.to(hidden_states.dtype), state

    return run


def wkv(how: How, theirs: Run) -> Run:
    """RWKV-4: o_t = (sum_s e^(k_s - (t-1-s) w) v_s + e^(u + k_t) v_t) / (the same with v = 1), over all s < t."""

    def run(
        time_decay: Tensor,
        time_first: Tensor,
        key: Tensor,
        value: Tensor,
        state: Any = None,
        return_state: bool = False,
    ) -> tuple[Tensor, Any]:
        if key.shape[1] < 2:
            return theirs(time_decay, time_first, key, value, state=state, return_state=return_state)
        wide = accumulator(key.dtype)
        k, v = key.to(wide), value.to(wide)
        w = torch.exp(time_decay.to(wide))
        zero = torch.zeros_like(k[:, 0])
        num, den, top = state or (zero, zero, zero - 1e38)
        tops = running_maximum(k.detach(), -w.detach(), top.detach())
        before, m = tops[:, :-1], tops[:, 1:]
        decay = below_zero((before - m).to(wide) - w)
        weight = torch.exp(k - m.to(wide))
        start = torch.cat([num, den], -1).to(wide)
        sums, last = scan(
            torch.cat([weight * v, weight], -1), torch.cat([decay, decay], -1),
            state=start, return_state=True, backend=how.backend,
        )  # fmt: skip
        assert last is not None
        old, mass = torch.cat([start[:, None], sums[:, :-1]], 1).chunk(2, -1)
        now = k + time_first
        largest = torch.maximum(before.to(wide), now.detach())
        past, own = torch.exp(before.to(wide) - largest), torch.exp(now - largest)
        out = (past * old + own * v) / (past * mass + own)
        if not return_state and state is None:
            return out.to(key.dtype), None
        return out.to(key.dtype), [*last.chunk(2, -1), m[:, -1].to(wide)]

    return run


def mlstm(how: How, theirs: Run) -> Run:
    """xLSTM's matrix memory, the forward of its backend: C_t = f C_{t-1} + i k v^T, n_t the same of 1.

    h = C^T q / (max(|n^T q|, e^-m) + eps), with f, i, C and n kept relative to e^m.
    """

    def run(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        igate: Tensor,
        fgate: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: str | None = None,
    ) -> Any:
        mode = self.config.mode if mode is None else mode
        states = "train" not in mode
        if not states:
            states = self.config.return_last_states if return_last_states is None else return_last_states
            padded = self.config.mode == "train_with_padding"
            if states if padded else query.shape[2] % self.config.chunk_size:
                # Let the original raise its own error.
                given = (query, key, value, igate, fgate, c_initial, n_initial, m_initial, return_last_states, mode)
                return theirs(self, *given)
        wide = accumulator(query.dtype)
        q, k, v, i, f = (x.transpose(1, 2).to(wide) for x in (query, key, value, igate, fgate))
        log_f = logsigmoid(f)
        top = i.new_zeros(i[:, 0].shape) if m_initial is None else m_initial[..., 0].to(wide)
        tops = running_maximum(i, log_f, top)
        m = tops.detach()
        decay = below_zero((m[:, :-1] - m[:, 1:]).to(wide) + log_f)
        k = k * torch.exp(i - m[:, 1:].to(wide))[..., None]
        v = pad(v, (0, 1), value=1.0)
        start = None
        if c_initial is not None and n_initial is not None:
            start = torch.cat([c_initial, n_initial[..., None]], -1).to(wide)
        if start is not None and v.shape[1] == 1 and not learns(q, k, v, decay, start):
            last: Tensor | None = start
            out = linear_attention_step(q[:, 0], k[:, 0], v[:, 0], start, log_decay=decay[:, 0])[:, None]
        else:
            out, last = linear_attention(q, k, v, log_decay=decay, state=start, return_state=True, backend=how.backend)
        assert last is not None
        # The scale cancels everywhere but at eps, which is why only there its gradient is kept.
        own = (tops - m)[:, 1:].to(wide).exp()
        floor = torch.exp(-m[:, 1:].to(wide))
        mass = torch.maximum(out[..., -1].abs(), floor) + self.config.eps * own
        h = (out[..., :-1] / mass[..., None]).transpose(1, 2).to(query.dtype)
        return (h, (last[..., :-1], last[..., -1], m[:, -1, :, None].to(wide))) if states else h

    return run


def running_maximum(k: Tensor, log_decay: Tensor, start: Tensor) -> Tensor:
    """m_0 = start, m_t = max(m_{t-1} + log_decay_t, k_t) along dimension 1: [B, T + 1, ...] in float64.

    With G the running sum of log_decay it is m_t = G_t + max(m_0, max_s (k_s - G_s)). A sum of many steps is far larger
    than what the result may be wrong by, hence float64.
    """
    G = log_decay.double().expand(k.shape).cumsum(1)
    peaks = torch.cat([start.double()[:, None], k.double() - G], 1).cummax(1).values
    return peaks + torch.cat([torch.zeros_like(G[:, :1]), G], 1)


def below_zero(log_decay: Tensor) -> Tensor:
    """Clamped to at most 0 (rounding may exceed it), with the gradient passed through."""
    return log_decay - log_decay.detach().clamp(min=0)
