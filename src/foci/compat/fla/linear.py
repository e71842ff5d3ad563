"""fla.ops on linear_attention: linear_attn, retention, lightning_attn, simple_gla, gla and rwkv6."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from foci.compat.fla.arguments import Decay, Gate, Pair, Row, Run, Value, hold, tuning
from foci.core.errors import ShapeError
from foci.core.shapes import Signature, dense
from foci.core.spec import accumulator
from foci.ops.arguments import exact_size, switch, whole

States = Tensor | tuple[Tensor, Tensor]
Constant = Float[Tensor, "H"]
Bonus = Float[Tensor, "H K"]


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: States | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States | None]:
    """Linear attention, normalised.

        S_t = S_{t-1} + k_t v_t^T;  z_t = z_{t-1} + k_t;  o_t = scale S_t^T q_t / (scale z_t . q_t + 1e-10)

    q, k [B,T,H,K], v [B,T,H,V] -> (o [B,T,H,V], final state or None). normalize=False leaves the division out. States
    are (S [N,H,K,V], z [N,1,H,K]) with normalize and S alone without; ValueError for the wrong one of the two.
    Paper: Katharopoulos et al. 2020 (arXiv 2006.16236).
    """
    return fused_recurrent_linear_attn(
        q, k, v, scale, initial_state, output_final_state, normalize=normalize, cu_seqlens=cu_seqlens
    )


def fused_chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: States | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States | None]:
    """`chunk_linear_attn`: in foci the two names are one computation."""
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: States | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, States | None]:
    """`chunk_linear_attn`, in either direction (reverse: from the last token), normalize off by default."""
    if not switch("fla", "normalize", normalize):
        if isinstance(initial_state, tuple | list):
            raise ValueError("initial_state is a pair (S, z); normalize=False expects S alone")
        return Run(scale, initial_state, output_final_state, cu_seqlens, reverse).linear(q, k, v)
    state = None
    if initial_state is not None:
        if not isinstance(initial_state, tuple | list) or len(initial_state) != 2:
            raise ValueError("initial_state is not a pair; normalize=True expects (S [N,H,K,V], z [N,1,H,K])")
        matrix, sums = (dense("fla", "initial_state", x) for x in initial_state)
        if matrix.dim() != 4 or sums.shape != (len(matrix), 1, *matrix.shape[1:3]):
            got = f"z has shape {list(sums.shape)}, S {list(matrix.shape)}"
            raise ShapeError(f"initial_state: {got}; expected [N,1,H,K] for S [N,H,K,V]")
        state = torch.cat([matrix, sums[:, 0, ..., None].to(matrix.dtype)], -1)
    # The sum of the keys is the state of one more column of ones. Half precision would round the divisor.
    wide = accumulator(v.dtype)
    run = Run(scale, state, output_final_state, cu_seqlens, reverse)
    column = v.new_ones(*v.shape[:3], 1, dtype=wide)
    out, final = run.linear(q.to(wide), k.to(wide), torch.cat([v.to(wide), column], -1))
    out = (out[..., :-1] / (out[..., -1:] + 1e-10)).to(v.dtype)
    return out, None if final is None else (final[..., :-1].contiguous(), final[..., -1][:, None].contiguous())


def _retention(q: Tensor) -> Tensor:
    """log(1 - 2^(-5 - h)) for every head h."""
    heads = torch.arange(q.shape[2], dtype=accumulator(q.dtype), device=q.device)
    return torch.log1p(-torch.exp2(-5 - heads))


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Pair:
    """RetNet's retention: S_t = (1 - 2^(-5-h)) S_{t-1} + k_t v_t^T and o_t = scale S_t^T q_t in head h.

    q, k [B,T,H,K], v [B,T,H,V], initial_state [N,H,K,V] -> (o [B,T,H,V], final state or None).
    Paper: Sun et al. 2023 (arXiv 2307.08621).
    """
    tuning(chunk_size=chunk_size)
    return fused_recurrent_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_retention`: in foci the two names are one computation."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_retention`, in either direction; with state_v_first its states are [N,H,V,K]."""
    run = Run(scale, initial_state, output_final_state, cu_seqlens, reverse, state_v_first)
    return run.linear(q, k, v, _retention(q))


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_retention` without states: (o, the scores as in `parallel_simple_gla` or None)."""
    return parallel_simple_gla(q, k, v, _retention(q).expand(q.shape[:3]), scale, output_attentions, cu_seqlens)


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Pair:
    """Lightning Attention, a constant decay for every head h of H and layer.

        S_t = exp(-8 h/H (1 - layer_idx / num_layers)) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t

    q, k [B,T,H,K], v [B,T,H,V], initial_state [N,H,K,V] -> (o [B,T,H,V], final state or None).
    Paper: Qin et al. 2024 (arXiv 2405.17381).
    """
    tuning(chunk_size=chunk_size)
    return fused_recurrent_lightning_attn(
        q, k, v, layer_idx, num_layers, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_lightning_attn`, in either direction."""
    whole("fla", "num_layers", num_layers)
    if not 0 <= whole("fla", "layer_idx", layer_idx, 0) <= num_layers:
        raise ValueError(f"layer_idx must be in 0..num_layers={num_layers}, got {layer_idx}; beyond, states would grow")
    heads = torch.arange(q.shape[2], dtype=accumulator(q.dtype), device=q.device)
    log_decay = -8 / exact_size(q.shape[2]) * (1 - layer_idx / num_layers) * heads
    return Run(scale, initial_state, output_final_state, cu_seqlens, reverse).linear(q, k, v, log_decay)


def chunk_simple_gla(
    q: Row,
    k: Row,
    v: Value,
    g: Gate | None = None,
    g_gamma: Constant | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Pair:
    """One decay a head: S_t = exp(g_t) S_{t-1} + k_t v_t^T and o_t = scale S_t^T q_t (simple GLA, Mamba-2).

    q, k [B,T,H,K], v [B,T,H,V]; g [B,T,H] or g_gamma [H] in natural log (ValueError for both; neither: no decay);
    initial_state [N,H,K,V], or [N,H,V,K] with state_v_first -> (o [B,T,H,V], final state or None).
    Paper: Dao and Gu 2024 (arXiv 2405.21060).
    """
    tuning(chunk_size=chunk_size, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    return fused_recurrent_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, False, state_v_first, cu_seqlens
    )


def fused_chunk_simple_gla(
    q: Row,
    k: Row,
    v: Value,
    g: Gate | None = None,
    g_gamma: Constant | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_simple_gla`: in foci the two names are one computation."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(
    q: Row,
    k: Row,
    v: Value,
    g: Gate | None = None,
    g_gamma: Constant | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_simple_gla`, in either direction."""
    hold(_SIMPLE, {"q": q, "k": k, "v": v, "g": g, "g_gamma": g_gamma})
    if g is not None and g_gamma is not None:
        raise ValueError("g and g_gamma were both given; expected one of them")
    run = Run(scale, initial_state, output_final_state, cu_seqlens, reverse, state_v_first)
    return run.linear(q, k, v, g_gamma if g is None else g)


def parallel_simple_gla(
    q: Row,
    k: Row,
    v: Value,
    g: Gate | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Pair:
    """`chunk_simple_gla` without states: (o, None), or (o, scores [B,H,T,T]) with output_attentions.

    scores[t,s] = scale q_t . k_s exp(g_{s+1} + ... + g_t) for s <= t, else 0: memory of T^2. Not for packed documents
    (ValueError), as in FLA.
    """
    tuning(cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    wanted = switch("fla", "output_attentions", output_attentions)
    hold(_PARALLEL, {"q": q, "k": k, "v": v, "g": g})
    run = Run(scale, None, False, cu_seqlens)
    out, _ = run.linear(q, k, v, g)
    if not wanted:
        return out, None
    if cu_seqlens is not None:
        raise ValueError("output_attentions=True and cu_seqlens were both given; expected one of them")
    T = v.shape[1]
    # What reads a one-hot value of each token is that token's score.
    one_hot = torch.eye(T, dtype=v.dtype, device=v.device)[None, :, None].expand(*v.shape[:3], T)
    return out, run.linear(q, k, one_hot, g)[0].transpose(1, 2).contiguous()


def chunk_gla(
    q: Row,
    k: Row,
    v: Value,
    g: Decay,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Pair:
    """Gated linear attention: S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T and o_t = scale S_t^T q_t.

    q, k, g [B,T,H,K], v [B,T,H,V], g in natural log; initial_state [N,H,K,V], or [N,H,V,K] with state_v_first
    -> (o [B,T,H,V], final state or None). HGRN-2 is k = 1 - exp(g). Paper: Yang et al. 2023 (arXiv 2312.06635).
    """
    tuning(cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    hold(_GLA, {"q": q, "k": k, "v": v, "g": g})
    return Run(scale, initial_state, output_final_state, cu_seqlens, False, state_v_first).linear(q, k, v, g)


def fused_chunk_gla(
    q: Row,
    k: Row,
    v: Value,
    g: Decay,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Pair:
    """`chunk_gla`, under the name that FLA has dropped. Tensors are [B,T,H,D], as in today's FLA."""
    return chunk_gla(q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu)


def fused_recurrent_gla(
    q: Row,
    k: Row,
    v: Value,
    gk: Decay | None = None,
    gv: Value | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_gla`, in either direction, with a decay of the state's rows, of its columns, both or neither.

        S_t = Diag(exp(gk_t)) S_{t-1} Diag(exp(gv_t)) + k_t v_t^T

    gk [B,T,H,K], gv [B,T,H,V]. With gv every column is a head: V times the work.
    """
    hold(_ROWS_AND_COLUMNS, {"q": q, "k": k, "v": v, "gk": gk, "gv": gv})
    run = Run(scale, initial_state, output_final_state, cu_seqlens, reverse, state_v_first)
    return run.linear(q, k, v, gk, value_decay=gv)


def chunk_rwkv6(
    r: Row,
    k: Row,
    v: Value,
    w: Decay,
    u: Bonus,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> Pair:
    """RWKV-6: o_t = scale (S_{t-1} + Diag(u) k_t v_t^T)^T r_t and S_t = Diag(exp(w_t)) S_{t-1} + k_t v_t^T.

    r, k, w [B,T,H,K], w in natural log; v [B,T,H,V], u [H,K], initial_state [N,H,K,V]
    -> (o [B,T,H,V], final state or None). Paper: Peng et al. 2024 (arXiv 2404.05892).
    """
    tuning(chunk_size=chunk_size, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    return fused_recurrent_rwkv6(r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_rwkv6(
    r: Row,
    k: Row,
    v: Value,
    w: Decay,
    u: Bonus,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Pair:
    """`chunk_rwkv6`, in either direction."""
    hold(_RWKV6, {"r": r, "k": k, "v": v, "w": w, "u": u})
    return Run(scale, initial_state, output_final_state, cu_seqlens, reverse).linear(r, k, v, w, bonus=u)


_SIMPLE, _PARALLEL, _GLA, _ROWS_AND_COLUMNS, _RWKV6 = (
    Signature(function, "fla")
    for function in (
        fused_recurrent_simple_gla, parallel_simple_gla, chunk_gla, fused_recurrent_gla, fused_recurrent_rwkv6,
    )
)  # fmt: skip
