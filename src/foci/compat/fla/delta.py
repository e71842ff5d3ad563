"""fla.ops on delta_rule: delta_rule, gated_delta_rule (gdn), kda and gdn2."""

from __future__ import annotations

from torch import Tensor

from foci.compat.fla.arguments import (
    Decay,
    Gate,
    Pair,
    Row,
    Run,
    Value,
    gated,
    hold,
    ones,
    refuse,
    tuning,
    unit,
    written,
)
from foci.core.shapes import Signature


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Pair:
    """DeltaNet: S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T and o_t = scale S_t^T q_t.

    q, k [B,T,H,K], v [B,T,H,V], beta [B,T,H], initial_state [N,H,K,V] -> (o [B,T,H,V], final state or None).
    use_qk_l2norm_in_kernel: q and k over sqrt(sum of squares + 1e-6). float32 too, which FLA's refuses.
    Paper: Yang et al. 2024 (arXiv 2406.06484).
    """
    tuning(chunk_size=chunk_size, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    return fused_recurrent_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def fused_chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Pair:
    """`chunk_delta_rule`, under the name that FLA has dropped."""
    return chunk_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu
    )


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_delta_rule`; without beta it is 1."""
    q, k = unit(use_qk_l2norm_in_kernel, q, k)
    return Run(scale, initial_state, output_final_state, cu_seqlens).delta(q, k, v, ones(v) if beta is None else beta)


def chunk_gated_delta_rule(
    q: Row,
    k: Row,
    v: Value,
    g: Gate,
    beta: Gate,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
) -> Pair:
    """Gated DeltaNet, the gated delta rule.

        S' = exp(g_t) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t

    q, k [B,T,H,K], v [B,T,HV,V] (HV a multiple of H), g and beta [B,T,HV], g in natural log; initial_state [N,HV,K,V],
    or [N,HV,V,K] with state_v_first -> (o [B,T,HV,V], final state or None).
    use_gate_in_kernel: g is raw, and -exp(A_log) softplus(g + dt_bias) is meant, A_log and dt_bias [HV].
    use_beta_sigmoid_in_kernel: sigmoid(beta) is meant, twice that with allow_neg_eigval.
    Unsupported: chunk_indices, cp_context. Paper: Yang et al. 2024 (arXiv 2412.06464).
    """
    refuse("chunk_gated_delta_rule", {"chunk_indices": chunk_indices, "cp_context": cp_context})
    tuning(chunk_size=chunk_size, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    return fused_recurrent_gated_delta_rule(
        q, k, v, g, None, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Row,
    k: Row,
    v: Value,
    g: Gate | None = None,
    gk: Decay | None = None,
    gv: Value | None = None,
    beta: Gate | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_gated_delta_rule` with three decays, each of which may be absent.

        S' = Diag(exp(g_t + gk_t)) S_{t-1} Diag(exp(gv_t))

    g [B,T,HV], gk [B,T,HV,K], gv [B,T,HV,V]; without beta it is 1. With gv every column is a head: V times the work.
    """
    hold(_GATED, {"q": q, "k": k, "v": v, "g": g, "gk": gk, "gv": gv, "beta": beta})
    q, k = unit(use_qk_l2norm_in_kernel, q, k)
    beta = written(v, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    g = gated(g, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias)
    log_decay = g if gk is None else gk if g is None else g[..., None] + gk
    run = Run(scale, initial_state, output_final_state, cu_seqlens, state_v_first=state_v_first)
    return run.delta(q, k, v, beta, log_decay, value_decay=gv)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def chunk_kda(
    q: Row,
    k: Row,
    v: Value,
    g: Decay,
    beta: Gate,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
) -> Pair:
    """Kimi Delta Attention, a decay for every channel.

        S' = Diag(exp(g_t)) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t

    As `chunk_gated_delta_rule` with g [B,T,HV,K]. use_gate_in_kernel: g is raw, -exp(A_log) softplus(g + dt_bias) is
    meant, A_log [HV], dt_bias [HV K]; with lower_bound it is lower_bound sigmoid(exp(A_log) (g + dt_bias)), without
    A_log too. safe_gate promises g in [-5, 0), disable_recompute trades memory for time: neither changes the result.
    Unsupported: return_intermediate_states, cp_context, use_graph, max_num_seqs.
    Paper: Kimi Team 2025 (arXiv 2510.26692).
    """
    unusable = {"cp_context": cp_context, "use_graph": use_graph, "max_num_seqs": max_num_seqs}
    refuse("chunk_kda", unusable | {"return_intermediate_states": return_intermediate_states})
    tuning(
        chunk_size=chunk_size, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, safe_gate=safe_gate,
        disable_recompute=disable_recompute,
    )  # fmt: skip
    hold(_KDA, {"q": q, "k": k, "v": v, "g": g, "beta": beta})
    q, k = unit(use_qk_l2norm_in_kernel, q, k)
    beta = written(v, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    log_decay = gated(
        g, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        safe_gate=safe_gate,
    )  # fmt: skip
    run = Run(scale, initial_state, output_final_state, cu_seqlens, state_v_first=state_v_first)
    return run.delta(q, k, v, beta, log_decay)


def fused_recurrent_kda(
    q: Row,
    k: Row,
    v: Value,
    g: Decay,
    beta: Gate,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_kda`: in foci the two names are one computation."""
    return chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound=lower_bound, state_v_first=state_v_first,
        cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip


def chunk_gdn2(
    q: Row,
    k: Row,
    v: Value,
    g: Decay,
    b: Decay,
    w: Value,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: object | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
) -> Pair:
    """Gated DeltaNet-2: channels of their own for what is erased and for what is written.

        S' = Diag(exp(g_t)) S_{t-1};  S_t = S' + k_t (w_t * v_t - S'^T (b_t * k_t))^T;  o_t = scale S_t^T q_t

    q, k [B,T,H,K], v [B,T,HV,V], g and b [B,T,HV,K], w [B,T,HV,V]; g and the other arguments as in `chunk_kda`.
    Unsupported: return_intermediate_states, cp_context.
    """
    unusable = {"cp_context": cp_context, "return_intermediate_states": return_intermediate_states}
    refuse("chunk_gdn2", unusable)
    tuning(
        chunk_size=chunk_size, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, safe_gate=safe_gate,
        disable_recompute=disable_recompute,
    )  # fmt: skip
    hold(_GDN2, {"q": q, "k": k, "v": v, "g": g, "b": b, "w": w})
    q, k = unit(use_qk_l2norm_in_kernel, q, k)
    log_decay = gated(
        g, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        safe_gate=safe_gate,
    )  # fmt: skip
    if b.shape[2] != k.shape[2]:  # what is erased differs between the value heads of one key
        q, k = (x.repeat_interleave(b.shape[2] // x.shape[2], dim=2) for x in (q, k))
    run = Run(scale, initial_state, output_final_state, cu_seqlens, state_v_first=state_v_first)
    return run.delta(q, k, (w * v).to(v.dtype), ones(v), log_decay, erase=b * k)


def fused_recurrent_gdn2(
    q: Row,
    k: Row,
    v: Value,
    g: Decay,
    b: Decay,
    w: Value,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_gdn2`: in foci the two names are one computation."""
    return chunk_gdn2(
        q, k, v, g, b, w, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        cu_seqlens, lower_bound=lower_bound, state_v_first=state_v_first, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip


_GATED, _KDA, _GDN2 = (
    Signature(function, "fla") for function in (fused_recurrent_gated_delta_rule, chunk_kda, chunk_gdn2)
)
