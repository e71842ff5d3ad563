"""The public functions: attend many tokens, step one token."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from foci.core.library import Runner
from foci.ops.decay import step
from foci.ops.decay.call import Bonus, Decay, Key, Offsets, Out, Query, State, Value, bind
from foci.ops.decay.spec import SPEC

_run = Runner(SPEC)


def linear_attention(
    q: Query,
    k: Key,
    v: Value,
    *,
    log_decay: Decay | None = None,
    bonus: Bonus | None = None,
    scale: float | None = None,
    state: State | None = None,
    offsets: Offsets | None = None,
    causal: bool = True,
    return_state: bool = False,
    backend: str | None = None,
) -> tuple[Out, State | None]:
    """Linear attention with decay: (out, final state or None).

        S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T           S is K x V; S_0 = state or 0
        o_t = scale * S_t^T q_t                            bonus u: o_t = scale * (S_{t-1} + Diag(u) k_t v_t^T)^T q_t

    Head h of H value heads reads query and key head h // (H/G). Differentiable in q, k, v, log_decay, bonus and state,
    and through the final state. float64, float32, bfloat16 and float16; states are float32 (float64 for float64).
    Any strides; time and memory grow linearly with T.

    q, k [B,T,G,K], v [B,T,H,V]: one dtype, H a multiple of G, V may differ from K.
    log_decay: g <= 0 in natural log, by its rank: [H] per head (RetNet), [B,T,H] per token (Mamba-2, simple GLA) or
    [B,T,H,K] per channel (GLA, HGRN-2, RWKV-6); -inf forgets. bonus [H,K] (RWKV-6).
    scale: K**-0.5 by default; any that float32 holds, 0 and below too, whatever the dtype.
    state [N,H,K,V]: what comes before the first token. offsets [N+1]: documents end to end in a batch of 1.
    Offsets on the CPU are checked; those on a GPU are not, as reading them would synchronise.
    causal=False: every token sees all others, o_t = scale * (S_0 + sum_s k_s v_s^T)^T q_t, without decay (Sana).
    return_state: give the state after the last token, else None in its place.
    backend: a name that must run the call; None lets foci choose.
    The normaliser of classic linear attention is one more column of ones in v.

    Raises ShapeError, ValueError or TypeError for arguments that do not fit, Unsupported when the named backend cannot.
    Papers: Katharopoulos et al. 2020 (arXiv 2006.16236); GLA (2312.06635); Mamba-2 (2405.21060); RWKV-6 (2404.05892).
    """
    rest = {
        "log_decay": log_decay, "bonus": bonus, "state": state, "offsets": offsets, "scale": scale, "causal": causal,
        "return_state": return_state,
    }  # fmt: skip
    out, final = _run.given(bind, (q, k, v), rest, backend)
    return out, final if return_state else None


def linear_attention_step(
    q: Float[Tensor, "B G K"],
    k: Float[Tensor, "B G K"],
    v: Float[Tensor, "B H V"],
    state: Float[Tensor, "B H K V"] | Float[Tensor, "M H K V"],
    *,
    log_decay: Float[Tensor, " H"] | Float[Tensor, "B H"] | Float[Tensor, "B H K"] | None = None,
    bonus: Bonus | None = None,
    scale: float | None = None,
    slots: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B H V"]:
    """One token of `linear_attention` for each row: out [B,H,V]; `state` [B,H,K,V] is changed in place.

        S <- Diag(exp(g)) S + k v^T;  o = scale * S^T q    with a bonus u: o = scale * (S_before + Diag(u) k v^T)^T q

    For decoding: without gradients (raises ValueError where one is asked for; `linear_attention` has them).
    log_decay: [H], [B,H] or [B,H,K]. The state is float32 (float64 for float64 inputs). The rest as there.
    slots [B], for serving: `state` is [M,H,K,V], and row b uses and changes state[slots[b]]. A slot of -1 is a row of
    padding: its out is 0 and nothing is changed. Two rows of one call must not have the same slot: which of them is
    kept is not said. On a CPU other values raise ValueError; on a GPU, where they are not waited for, and in a compiled
    graph they are padding.
    """
    return step.forward(q, k, v, state, log_decay=log_decay, bonus=bonus, scale=scale, slots=slots)
