"""transformers' recurrences on foci's operators: each maker returns a replacement for one of their functions.

A maker takes the backend (None: foci chooses) and their function; what it returns takes their function's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from foci.core.errors import Unsupported
from foci.core.spec import accumulator
from foci.integrations.transformers_keywords import DOCUMENTS, asked, documents, refuse
from foci.nn.parts import history, l2norm
from foci.ops.decay.api import linear_attention, linear_attention_step
from foci.ops.delta.api import delta_rule, delta_rule_step
from foci.ops.layer_parts import ACTIVATIONS, convolve
from foci.ops.selective_scan.api import selective_scan, selective_scan_step

Run = Callable[..., Any]


def offsets_of(keywords: Mapping[str, Any], where: str) -> Tensor | None:
    """The offsets of packed documents in the keywords; raises Unsupported for other keywords that are set."""
    given = asked(keywords)
    found = documents(given)
    refuse({name: value for name, value in given.items() if name not in DOCUMENTS}, where)
    return found


def learns(*tensors: Tensor | None) -> bool:
    """Whether a gradient is needed: then no state may be changed in place."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _start(state: Tensor | None, dtype: torch.dtype, *others: Tensor) -> Tensor | None:
    """The initial state: a copy if a backward will read it, since the cache is updated in place."""
    return None if state is None else state.to(dtype, copy=learns(state, *others))


def chunk_delta(backend: str | None, theirs: Run) -> Run:
    """Gated delta rule and Kimi delta attention, many tokens; what differs is the rank of g."""

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None]:
        offsets = offsets_of(keywords, "a delta rule")
        dtype, wide = query.dtype, accumulator(query.dtype)
        q, k, v, g, b = (x.to(wide) for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = l2norm(q), l2norm(k)
        S = _start(initial_state, wide, q, k, v, g, b)
        out, state = delta_rule(
            q, k, v, b, log_decay=g, state=S, offsets=offsets, return_state=output_final_state, backend=backend
        )
        return out.to(dtype), state

    return run


def step_delta(backend: str | None, theirs: Run) -> Run:
    """The same for one token after a state, which is changed in place: it is the cache's own tensor."""
    many = chunk_delta(backend, theirs)

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None]:
        wide, S, offsets = accumulator(query.dtype), initial_state, offsets_of(keywords, "a delta rule")
        one = query.shape[1] == 1 and output_final_state and offsets is None
        if S is None or not one or S.dtype != wide or learns(query, key, value, g, beta, S):
            rest = (0, S, output_final_state, use_qk_l2norm_in_kernel)
            return many(query, key, value, g, beta, *rest, cu_seqlens=offsets)
        q, k, v, g, b = (x.squeeze(1).to(wide) for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = l2norm(q), l2norm(k)
        return delta_rule_step(q, k, v, b, S, log_decay=g)[:, None].to(query.dtype), S

    return run


def _step_size(dt: Tensor, bias: Tensor | None, positive: bool) -> Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return softplus(dt) if positive else dt


def chunk_ssd(backend: str | None, theirs: Run) -> Run:
    """Mamba-2: S_t = exp(dt A) S_{t-1} + B (dt x)^T, y = S^T C + D x. Their states are ours transposed."""

    def run(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **keywords: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        offsets = offsets_of(keywords, "Mamba-2")
        wide = accumulator(hidden_states.dtype)
        dt = _step_size(dt, dt_bias, dt_softplus).clamp(*dt_limit).to(wide)
        x = hidden_states.to(wide)
        start = _start(initial_states, wide, x, dt, A, B, C)
        out, state = linear_attention(
            C.to(wide),
            B.to(wide),
            x * dt[..., None],
            log_decay=dt * A.to(wide),
            scale=1.0,
            state=None if start is None else start.transpose(-1, -2),
            offsets=offsets,
            return_state=return_final_states,
            backend=backend,
        )
        if D is not None:
            out = out + D[:, None] * x
        return out if state is None else (out, state.transpose(-1, -2))

    return run


def step_ssd(backend: str | None, theirs: Run) -> Run:
    """The same for one token; `state` [B,H,V,K] is changed in place. dt, A, D, bias repeat one value for each head."""

    def run(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **keywords: Any,
    ) -> Tensor:
        if offsets_of(keywords, "Mamba-2") is not None:
            raise Unsupported("attention of Mamba-2 cannot run this call", ["one token is not several documents"])
        wide = state.dtype
        dt = _step_size(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus).to(wide)
        v, log_decay = hidden_states.to(wide) * dt[..., None], dt * A[:, 0, 0].to(wide)
        q, k, S = C.to(wide), B.to(wide), state.transpose(-1, -2)
        if wide != accumulator(wide) or learns(q, k, v, log_decay, S):
            q, k, v, log_decay = (x[:, None].to(accumulator(wide)) for x in (q, k, v, log_decay))
            old = S.to(q.dtype, copy=True)
            y, new = linear_attention(
                q, k, v, log_decay=log_decay, scale=1.0, state=old, return_state=True, backend=backend
            )
            assert new is not None
            state.copy_(new.transpose(-1, -2))
            out = y[:, 0]
        else:
            out = linear_attention_step(q, k, v, S, log_decay=log_decay, scale=1.0)
        out = out.to(C.dtype)
        if D is not None:
            out = (out + hidden_states * D).to(out.dtype)
        return (out if z is None else out * silu(z)).to(hidden_states.dtype)

    return run


def not_fused(backend: str | None, theirs: Run) -> Run:
    """Disables their fused kernel of convolution, recurrence and projection: None means it is not available."""
    return lambda *args, **keywords: None


def short_convolution(backend: str | None, theirs: Run) -> Run:
    """Their short convolution [B,D,T] on a GPU, where torch's takes longer, and per packed document everywhere.

    Theirs refuses packed documents, or mixes them.
    """

    def run(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **keywords: Any,
    ) -> Tensor:
        offsets = documents(asked(keywords))
        if offsets is None and not hidden_states.is_cuda:
            return theirs(hidden_states, weight, bias, activation=activation)
        x, ages = hidden_states.transpose(1, 2), None
        if offsets is not None:  # x may be longer than the documents: it begins with tokens from the cache
            ends = offsets[1:].to(x.device, non_blocking=True) + (x.shape[1] - offsets[-1])
            ages = history(x, 0, offsets=pad(ends, (1, 0)), return_tail=False).ages
        ours = activation is None or activation in ACTIVATIONS
        y = convolve(x, weight[:, None], bias, activation if ours else None, ages=ages)
        if not ours:
            from transformers.activations import ACT2FN

            y = ACT2FN[activation](y)
        return y.transpose(1, 2)

    return run


def chunk_mamba(backend: str | None, theirs: Run) -> Run:
    """Mamba-1: h_t = exp(dt A) h_{t-1} + dt x B^T, y = (h C + D x) silu(z); channels before tokens there."""

    def run(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        **keywords: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        refuse(asked(keywords), "Mamba")
        wide = accumulator(hidden_states.dtype)
        dt = _step_size(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus)
        x, dt, B, C = (each.transpose(1, 2).to(wide) for each in (hidden_states, dt, B, C))
        y, state = selective_scan(x, dt, A, B, C, skip=D, return_state=return_last_state, backend=backend)
        y = y.transpose(1, 2)
        if z is not None:
            y = y * silu(z)
        return y if state is None else (y, state)

    return run


def step_mamba(backend: str | None, theirs: Run) -> Run:
    """The same for one token; `state` [B,D,K] is changed in place. If a gradient is needed, theirs runs."""

    def run(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **keywords: Any,
    ) -> Tensor:
        wide = state.dtype
        if wide != accumulator(hidden_states.dtype) or learns(hidden_states, dt, A, B, C, state):
            return theirs(
                state, hidden_states, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **keywords
            )
        refuse(asked(keywords), "Mamba")
        dt = _step_size(dt, dt_bias, dt_softplus)
        x, dt, rates, key, query = (each.to(wide) for each in (hidden_states, dt, A, B, C))
        out = selective_scan_step(x, dt, rates, key, query, state).to(C.dtype)
        if D is not None:
            out = out + hidden_states * D
        return (out if z is None else out * silu(z)).to(hidden_states.dtype)

    return run
