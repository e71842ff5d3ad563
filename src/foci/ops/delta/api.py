"""The public functions: attend many tokens, step one token."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from foci.core.library import Runner
from foci.ops.delta import step
from foci.ops.delta.call import Beta, Decay, Key, Offsets, Out, Query, State, Value, bind
from foci.ops.delta.spec import SPEC

_run = Runner(SPEC)


def delta_rule(
    q: Query,
    k: Key,
    v: Value,
    beta: Beta,
    *,
    log_decay: Decay | None = None,
    erase: Key | None = None,
    scale: float | None = None,
    state: State | None = None,
    offsets: Offsets | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> tuple[Out, State | None]:
    """The delta rule with decay: (out, final state or None).

        S'_t = Diag(exp(g_t)) S_{t-1}                      S is K x V; S_0 = state or 0
        S_t  = S'_t + beta_t k_t (v_t - S'_t^T e_t)^T      e_t = erase_t, by default k_t
        o_t  = scale * S_t^T q_t

    Head h of H value heads reads query and key head h // (H/G). Differentiable in q, k, v, beta, log_decay, erase and
    state, and through the final state. float64, float32, bfloat16 and float16; states are float32 (float64 for
    float64). Any strides; time and memory grow linearly with T.

    q, k [B,T,G,K], v [B,T,H,V]: one dtype, H a multiple of G, V may differ from K. Keys are taken as they are: a layer
    that wants them of length 1 normalises them, and with such keys beta in [0, 2] keeps the state bounded.
    beta [B,T,H]: how much of the error is written; above 1 the transition has negative eigenvalues.
    log_decay: g <= 0 in natural log, by its rank: [H], [B,T,H] (Gated DeltaNet) or [B,T,H,K] (Kimi Delta Attention).
    erase [B,T,G,K]: the key that is read before the write, where it is not k (Comba, Gated DeltaNet-2).
    scale: K**-0.5 by default; any that float32 holds, 0 and below too, whatever the dtype.
    state [N,H,K,V]: what comes before the first token. offsets [N+1]: documents end to end in a batch of 1, one state
    each. return_state: give the state after the last token, else None in its place. backend: a name that must run the
    call; None lets foci choose.
    Offsets on the CPU are checked; those on a GPU are not, as reading them would synchronise.

    Raises ShapeError, ValueError or TypeError for arguments that do not fit, Unsupported when the named backend cannot.
    Papers: DeltaNet (arXiv 2406.06484); Gated DeltaNet (2412.06464); Kimi Linear (2510.26692); Comba (2506.02475).
    """
    rest = {
        "log_decay": log_decay, "erase": erase, "state": state, "offsets": offsets, "scale": scale,
        "return_state": return_state,
    }  # fmt: skip
    out, final = _run.given(bind, (q, k, v, beta), rest, backend)
    return out, final if return_state else None


def delta_rule_step(
    q: Float[Tensor, "B G K"],
    k: Float[Tensor, "B G K"],
    v: Float[Tensor, "B H V"],
    beta: Float[Tensor, "B H"],
    state: Float[Tensor, "B H K V"] | Float[Tensor, "M H K V"],
    *,
    log_decay: Float[Tensor, " H"] | Float[Tensor, "B H"] | Float[Tensor, "B H K"] | None = None,
    erase: Float[Tensor, "B G K"] | None = None,
    scale: float | None = None,
    slots: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B H V"]:
    """One token of `delta_rule` for each row: out [B,H,V]; `state` [B,H,K,V] is changed in place.

        S' = Diag(exp(g)) S;  S <- S' + beta k (v - S'^T e)^T;  o = scale * S^T q

    For decoding: without gradients (raises ValueError where one is asked for; `delta_rule` has them).
    log_decay: [H], [B,H] or [B,H,K]. The state is float32 (float64 for float64 inputs). The rest as there.
    slots [B], for serving: `state` is [M,H,K,V], and row b uses and changes state[slots[b]]. A slot of -1 is a row of
    padding: its out is 0 and nothing is changed. Two rows of one call must not have the same slot: which of them is
    kept is not said. On a CPU other values raise ValueError; on a GPU, where they are not waited for, and in a compiled
    graph they are padding.
    """
    return step.forward(q, k, v, beta, state, log_decay=log_decay, erase=erase, scale=scale, slots=slots)
