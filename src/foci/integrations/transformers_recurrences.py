"""transformers' recurrences on foci's operators: each maker returns a replacement for one of their functions.

A maker takes how to run and their function; what it returns takes their function's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from foci.core.device import installed
from foci.core.errors import Unsupported
from foci.core.plans import on_gpu
from foci.core.spec import accumulator
from foci.integrations.transformers_keywords import DOCUMENTS, asked, documents, refuse
from foci.nn.parts import l2norm
from foci.ops.decay.api import linear_attention, linear_attention_step
from foci.ops.delta.api import delta_rule, delta_rule_step
from foci.ops.layer_parts import gate, weigh
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


class How(NamedTuple):
    """How a recurrence runs: on which backend (None: foci chooses), and whether training keeps bfloat16, on a GPU."""

    backend: str | None = None
    keep_bfloat16: bool = False

    def dtype(self, kernels: str, x: Tensor, *others: Tensor | None) -> torch.dtype:
        """That of a recurrence's tokens, of which x is one: as in transformers' code, float32 at least.

        On a GPU bfloat16 ones keep it where no gradient is needed, so that training rounds no more than transformers'
        code; else if asked to, or where `kernels` are installed, which transformers then takes and which keep it, too.
        States, gates and sums are float32 everywhere (float64 for float64).
        """
        keeps = self.keep_bfloat16 or installed(kernels) or not learns(x, *others)
        return x.dtype if keeps and x.dtype == torch.bfloat16 and on_gpu(x) else accumulator(x.dtype)


def _start(state: Tensor | None, *others: Tensor) -> Tensor | None:
    """The initial state: a copy if a backward will read it, since the cache is updated in place."""
    return None if state is None else state.to(accumulator(others[0].dtype), copy=learns(state, *others))


def chunk_delta(how: How, theirs: Run) -> Run:
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
        dtype = how.dtype("fla", query, key, value, g, beta, initial_state)
        q, k, v, b = (x.to(dtype) for x in (query, key, value, beta))
        g = g.to(accumulator(dtype))
        if use_qk_l2norm_in_kernel:
            q, k = l2norm(q), l2norm(k)
        S = _start(initial_state, q, k, v, g, b)
        out, state = delta_rule(
            q, k, v, b, log_decay=g, state=S, offsets=offsets, return_state=output_final_state, backend=how.backend
        )
        return out.to(query.dtype), state

    return run


def step_delta(how: How, theirs: Run) -> Run:
    """The same for one token after a state, which is changed in place: it is the cache's own tensor."""
    many = chunk_delta(how, theirs)

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
        dtype = how.dtype("fla", query)
        q, k, v, b = (x.squeeze(1).to(dtype) for x in (query, key, value, beta))
        if use_qk_l2norm_in_kernel:
            q, k = l2norm(q), l2norm(k)
        y = delta_rule_step(q, k, v, b, S, log_decay=g.squeeze(1).to(wide))
        return y[:, None].to(query.dtype), S

    return run


def _step_size(dt: Tensor, bias: Tensor | None, positive: bool) -> Tensor:
    if positive:
        return gate(dt, bias)
    return (dt if bias is None else dt + bias).to(accumulator(dt.dtype))


def chunk_ssd(how: How, theirs: Run) -> Run:
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
        dt = _step_size(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        dtype = how.dtype("mamba_ssm", hidden_states, dt, A, B, C, D, initial_states)
        x, k, q = (each.to(dtype) for each in (hidden_states, B, C))
        start = _start(initial_states, x, dt, A, k, q)
        flat = x.flatten(2)
        out, state = linear_attention(
            q,
            k,
            weigh(flat, dt).view_as(x),
            log_decay=dt * A.to(dt.dtype),
            scale=1.0,
            state=None if start is None else start.transpose(-1, -2),
            offsets=offsets,
            return_state=return_final_states,
            backend=how.backend,
        )
        if D is not None:
            out = out + weigh(flat, D).view_as(x)
        return out if state is None else (out, state.transpose(-1, -2))

    return run


def step_ssd(how: How, theirs: Run) -> Run:
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
        dt = _step_size(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)
        dtype = how.dtype("mamba_ssm", hidden_states, dt, A, B, C, D, state)
        x, k, q = (each.to(dtype) for each in (hidden_states, B, C))
        flat, log_decay, S = x.flatten(1), dt * A[:, 0, 0].to(dt.dtype), state.transpose(-1, -2)
        v, wide = weigh(flat, dt).view_as(x), accumulator(x.dtype)
        if state.dtype != wide or learns(q, k, v, log_decay, S):
            q, k, v, log_decay = (each[:, None] for each in (q, k, v, log_decay))
            old = S.to(wide, copy=True)
            y, new = linear_attention(
                q, k, v, log_decay=log_decay, scale=1.0, state=old, return_state=True, backend=how.backend
            )
            assert new is not None
            state.copy_(new.transpose(-1, -2))
            out = y[:, 0]
        else:
            out = linear_attention_step(q, k, v, S, log_decay=log_decay, scale=1.0)
        if D is not None:
            out = out + weigh(flat, D[:, 0]).view_as(x)
        out = out.to(hidden_states.dtype)
        return out if z is None else out * silu(z)

    return run


def not_fused(how: How, theirs: Run) -> Run:
    """Disables their fused kernel of convolution, recurrence and projection: None means it is not available."""
    return lambda *args, **keywords: None


def chunk_mamba(how: How, theirs: Run) -> Run:
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
        dt = _step_size(dt.transpose(1, 2), delta_bias, delta_softplus)
        dtype = how.dtype("mamba_ssm", hidden_states, dt, A, B, C, D)
        x, B, C = (each.transpose(1, 2).to(dtype) for each in (hidden_states, B, C))
        y, state = selective_scan(x, dt, A, B, C, skip=D, return_state=return_last_state, backend=how.backend)
        y = y.transpose(1, 2)
        if z is not None:
            y = y * silu(z)
        return y if state is None else (y, state)

    return run


def step_mamba(how: How, theirs: Run) -> Run:
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
        if wide != accumulator(hidden_states.dtype) or learns(hidden_states, dt, A, B, C, D, dt_bias, state):
            return theirs(
                state, hidden_states, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **keywords
            )
        refuse(asked(keywords), "Mamba")
        dt = _step_size(dt, dt_bias, dt_softplus)
        dtype = how.dtype("mamba_ssm", hidden_states)
        x, key, query = (each.to(dtype) for each in (hidden_states, B, C))
        y = selective_scan_step(x, dt, A, key, query, state, skip=D).to(hidden_states.dtype)
        return y if z is None else y * silu(z)

    return run
