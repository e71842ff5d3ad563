"""fla.ops of several delta steps a token: gated_delta_product, iplr and dplr, rwkv7, comba."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from foci.compat.fla.arguments import Pair, Run, below_zero, hold, ones, refuse, tuning, unit
from foci.core.errors import ShapeError
from foci.core.shapes import Signature

Row = Float[Tensor, "B T H K"]
Value = Float[Tensor, "B T H V"]
Gate = Float[Tensor, "B T H"]
State = Float[Tensor, "N H K V"]
Grouped = Float[Tensor, "B T G K"]  # heads of v come in groups that share one of these
StepRow = Float[Tensor, "B R G K"]  # R steps: n of each token
StepValue = Float[Tensor, "B R H V"]
StepGate = Float[Tensor, "B R H"]

# From here up exp(-log_decay) is far from overflow, so that a read before the decay can be written as one after it.
_BOUND = -20.0


class Step(NamedTuple):
    """One delta step of every token: S <- Diag(exp(log_decay)) S, then S <- S + beta k (v - S^T erase)^T."""

    k: Tensor
    v: Tensor
    beta: Tensor
    erase: Tensor
    log_decay: Tensor | None = None


def _at(x: Tensor, n: int, slot: int) -> Tensor:
    """[B,T,...] -> [B,nT,...]: x in one of n slots a token, zeros in the others."""
    return F.pad(x[:, :, None], [0, 0] * (x.dim() - 2) + [slot, n - 1 - slot]).flatten(1, 2)


def _steps(run: Run, q: Tensor, steps: list[Step]) -> Pair:
    """Several delta steps a token, in their order in both directions; read after the last."""
    run.check(q)
    n, ends = len(steps), run.offsets
    gates = [step.log_decay for step in steps]
    if any(gate is not None for gate in gates):
        like = next(gate for gate in gates if gate is not None)
        gates = [torch.zeros_like(like) if gate is None else gate for gate in gates]

    def line(parts: list[Tensor]) -> Tensor:
        return torch.stack([run.turn(part) for part in parts], 2).flatten(1, 2)

    k, v, beta, erase = (line([step[i] for step in steps]) for i in range(4))  # type: ignore[misc]
    forwards = replace(
        run,
        reverse=False,
        state_v_first=False,
        initial_state=run.layout(run.initial_state),
        cu_seqlens=None if ends is None else ends * n,
    )
    log_decay = None if gates[0] is None else line(gates)  # type: ignore[arg-type]
    out, final = forwards.delta(_at(run.turn(q), n, n - 1), k, v, beta, log_decay, erase=erase)
    return run.results(out[:, n - 1 :: n], final)


def _row(x: Tensor, value: float = 0.0) -> Tensor:
    """[..., K] -> [..., K + 1]."""
    return F.pad(x, [0, 1], value=value)


def _with_early_read(run: Run, q: Tensor, read: Tensor, v: Tensor, steps: list[Step]) -> Pair:
    """Steps on a state of K + 1 rows, the last of which holds S_{t-1}^T read, taken before anything decays.

    A read after the decay would need read / exp(log_decay), which overflows; a row more never does.
    """
    K = q.shape[-1]
    state = None if run.initial_state is None else F.pad(run.initial_state, [0, 0, 0, 1])
    wide = replace(run, initial_state=state, scale=K**-0.5 if run.scale is None else run.scale)
    last = _row(torch.zeros_like(read), 1.0)
    remember = Step(last, torch.zeros_like(v), ones(v), _row(-read, 1.0))
    out, final = _steps(wide, _row(q), [remember, *steps])
    return out, None if final is None else final[:, :, :K].contiguous()


def _dplr(
    run: Run, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor | None, bounded: bool = False
) -> Pair:
    """S_t = Diag(exp(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T: a reads what has not decayed yet."""
    one, nothing = ones(v), torch.zeros_like(k)
    if log_decay is None or bounded:
        read = -a if log_decay is None else -a * torch.exp(-log_decay)
        steps = [Step(b, torch.zeros_like(v), one, read, log_decay), Step(k, v, one, nothing)]
        return _steps(run, q, steps)
    add = Step(_row(b), torch.zeros_like(v), one, _row(nothing, -1.0), _row(log_decay))
    return _with_early_read(run, q, a, v, [add, Step(_row(k), v, one, _row(nothing))])


def chunk_gated_delta_product(
    q: Grouped,
    k: StepRow,
    v: StepValue,
    g: Gate | None,
    beta: StepGate,
    num_householder: int,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
) -> Pair:
    """Gated DeltaProduct: the state decays once a token, then takes n = num_householder delta steps.

        S <- exp(g_t) S;  S <- S + beta_j k_j (v_j - S^T k_j)^T for j = n t .. n t + n - 1;  o_t = scale S^T q_t

    q [B,T,H,K]; k [B,nT,H,K], v [B,nT,H,V], beta [B,nT,H]; g [B,T,H] in natural log, or None; initial_state [N,H,K,V]
    -> (o [B,T,H,V], final state or None). cu_seqlens counts tokens, not steps. Unsupported: cp_context.
    Paper: Siems et al. 2025 (arXiv 2502.10297).
    """
    refuse("chunk_gated_delta_product", {"cp_context": cp_context})
    tuning(cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    hold(_PRODUCT, tensors)
    n = num_householder
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"num_householder must be a whole number from 1 up, got {n!r}")
    if k.shape[1] != n * q.shape[1] or (g is not None and g.shape[1] != q.shape[1]):
        raise ShapeError(
            f"q has {q.shape[1]} tokens, k {k.shape[1]} steps, g {'no' if g is None else g.shape[1]} tokens; expected "
            f"{n} steps a token (num_householder) and as many tokens in g"
        )
    q, k = unit(use_qk_l2norm_in_kernel, q, k)
    run = Run(scale, initial_state, output_final_state, cu_seqlens)
    run.check(q)
    run = replace(run, cu_seqlens=None if cu_seqlens is None else cu_seqlens * n)
    out, final = run.delta(_at(q, n, n - 1), k, v, beta, None if g is None else _at(g, n, 0))
    return out[:, n - 1 :: n].contiguous(), final


def chunk_iplr_delta_rule(
    q: Row,
    k: Row,
    v: Value,
    a: Row,
    b: Row,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Pair:
    """Identity plus low rank: S_t = S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T and o_t = scale S_t^T q_t.

    q, k, a, b [B,T,H,K], v [B,T,H,V], initial_state [N,H,K,V] -> (o [B,T,H,V], final state or None). Two delta steps.
    """
    tuning(chunk_size=chunk_size, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    return fused_recurrent_iplr_delta_rule(q, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_iplr_delta_rule(
    q: Row,
    k: Row,
    v: Value,
    a: Row,
    b: Row,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_iplr_delta_rule`: in foci the two names are one computation."""
    hold(_IPLR, {"q": q, "k": k, "v": v, "a": a, "b": b, "initial_state": initial_state})
    return _dplr(Run(scale, initial_state, output_final_state, cu_seqlens), q, k, v, a, b, None)


def chunk_dplr_delta_rule(
    q: Row,
    k: Row,
    v: Value,
    a: Row,
    b: Row,
    gk: Row,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: object | None = None,
    lower_bound: float | None = None,
) -> Pair:
    """Diagonal plus low rank.

        S_t = Diag(exp(gk_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T;  o_t = scale S_t^T q_t

    q, k, a, b, gk [B,T,H,K], v [B,T,H,V], gk in natural log; initial_state [N,H,K,V] -> (o [B,T,H,V], final state or
    None). Three delta steps a token; two where the caller promises that gk is not below -20, by lower_bound or by
    safe_gate (gk in [-5, 0)). A broken promise overflows. Unsupported: cp_context.
    """
    refuse("chunk_dplr_delta_rule", {"cp_context": cp_context})
    tuning(
        chunk_size=chunk_size, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, safe_gate=safe_gate,
        disable_recompute=disable_recompute,
    )  # fmt: skip
    hold(_DPLR, {"q": q, "k": k, "v": v, "a": a, "b": b, "gk": gk, "initial_state": initial_state})
    below_zero("lower_bound", lower_bound)
    bounded = safe_gate or (lower_bound is not None and lower_bound >= _BOUND)
    return _dplr(Run(scale, initial_state, output_final_state, cu_seqlens), q, k, v, a, b, gk, bounded)


def fused_recurrent_dplr_delta_rule(
    q: Row,
    k: Row,
    v: Value,
    a: Row,
    b: Row,
    gk: Row,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_dplr_delta_rule`, in either direction."""
    hold(_DPLR, {"q": q, "k": k, "v": v, "a": a, "b": b, "gk": gk, "initial_state": initial_state})
    return _dplr(Run(scale, initial_state, output_final_state, cu_seqlens, reverse), q, k, v, a, b, gk)


def chunk_rwkv7(
    r: Row,
    w: Row,
    k: Row,
    v: Value,
    a: Row,
    b: Row,
    scale: float | None = 1.0,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: object | None = None,
    lower_bound: float | None = None,
) -> Pair:
    """RWKV-7: `chunk_dplr_delta_rule` with q = r, gk = w and a scale of 1. In the model a = -kk and b = kk * its a.

    lower_bound=-0.6065..., which the model's w obeys, makes it two delta steps a token instead of three.
    Paper: Peng et al. 2025 (arXiv 2503.14456).
    """
    hold(_RWKV7, {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b, "initial_state": initial_state})
    return chunk_dplr_delta_rule(
        r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, safe_gate, chunk_size,
        disable_recompute, cp_context, lower_bound,
    )  # fmt: skip


def fused_recurrent_rwkv7(
    r: Row,
    w: Row,
    k: Row,
    v: Value,
    a: Row,
    b: Row,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_rwkv7`, but the default scale is K**-0.5 and the final state is returned by default, as in FLA."""
    hold(_RWKV7, {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b, "initial_state": initial_state})
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens)


def fused_mul_recurrent_rwkv7(
    r: Row,
    w: Row,
    k: Row,
    v: Value,
    kk: Row,
    a: Row,
    scale: float | None = 1.0,
    initial_state: State | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """RWKV-7 in the model's own letters: `chunk_rwkv7` with a = -kk and b = kk * a, in either direction."""
    hold(_RWKV7_MODEL, {"r": r, "w": w, "k": k, "v": v, "kk": kk, "a": a, "initial_state": initial_state})
    return fused_recurrent_dplr_delta_rule(
        r, k, v, -kk, kk * a, w, scale, initial_state, output_final_state, reverse, cu_seqlens
    )


def chunk_comba(
    q: Grouped,
    k: Grouped,
    v: Value,
    p: Grouped | None,
    g: Gate,
    beta: Gate | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Pair:
    """Comba: S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T and o_t = scale S_t^T q_t.

    q, k, p [B,T,H,K], v [B,T,HV,V], g and beta [B,T,HV], g in natural log; without p it is k, without beta 1.
    The error is taken before the decay, as in FLA's kernels and naive_chunk_comba; naive_recurrent_comba takes it
    after. Two delta steps a token. use_qk_l2norm_in_kernel: q, k and p over sqrt(sum of squares + 1e-6).
    Paper: Hu et al. 2025 (arXiv 2506.02475).
    """
    tuning(cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    tensors = {"q": q, "k": k, "v": v, "p": p, "g": g, "beta": beta, "initial_state": initial_state}
    hold(_COMBA, tensors)
    q, k, p = unit(use_qk_l2norm_in_kernel, q, k, k if p is None else p)
    beta = ones(v) if beta is None else beta
    decay = _row(g[..., None].expand(*g.shape, k.shape[-1]))
    write = Step(_row(k), v, beta, _row(torch.zeros_like(k), 1.0), decay)
    return _with_early_read(Run(scale, initial_state, output_final_state, cu_seqlens), q, p, v, [write])


def fused_recurrent_comba(
    q: Grouped,
    k: Grouped,
    p: Grouped | None,
    v: Value,
    g: Gate,
    beta: Gate | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_comba`, with p before v."""
    return chunk_comba(
        q, k, v, p, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


_PRODUCT, _IPLR, _DPLR, _RWKV7, _RWKV7_MODEL, _COMBA = (
    Signature(function, "fla")
    for function in (
        chunk_gated_delta_product, fused_recurrent_iplr_delta_rule, chunk_dplr_delta_rule, chunk_rwkv7,
        fused_mul_recurrent_rwkv7, chunk_comba,
    )
)  # fmt: skip
