"""The public functions: scan many tokens, step one token."""

from __future__ import annotations

from foci.core.library import Runner
from foci.ops.selective_scan import step
from foci.ops.selective_scan.call import Keys, Offsets, Rates, Skip, State, Tokens, bind
from foci.ops.selective_scan.spec import SPEC
from foci.ops.selective_scan.step import Key, Token
from foci.ops.selective_scan.step import State as Held

_run = Runner(SPEC)


def selective_scan(
    x: Tokens,
    dt: Tokens,
    A: Rates,
    B: Keys,
    C: Keys,
    *,
    skip: Skip | None = None,
    state: State | None = None,
    offsets: Offsets | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> tuple[Tokens, State | None]:
    """Mamba-1's selective scan: (y [B,T,D], final state or None).

        h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T         h is D x K; h_0 = state or 0
        y_t = h_t C_t + skip x_t

    Differentiable in all tensors and through the final state. float64, float32, bfloat16 and float16; states are
    float32 (float64 for float64), y has x's dtype, the others may have their own. Any strides; time and memory grow
    linearly with T, and [B,T,D,K] is never made.

    x, dt [B,T,D]: dt >= 0, after its bias and softplus. A [D,K] <= 0: the rates, -exp(A_log) in the models.
    B, C [B,T,K]: keys and queries that all channels share. skip [D]: D in the models.
    state [N,D,K]: what comes before the first token. offsets [N+1]: documents end to end in a batch of 1.
    Offsets on the CPU are checked; those on a GPU are not, as reading them would synchronise.
    return_state: give the state [N,D,K] after the last token, else None in its place.
    backend: a name that must run the call; None lets foci choose. The output gate of the models, y * silu(z), and
    Mamba-2, which is `linear_attention` with a decay [B,T,H], are composed.

    Raises ShapeError, ValueError or TypeError for arguments that do not fit, Unsupported when the named backend cannot.
    Paper: Gu and Dao 2023 (arXiv 2312.00752).
    """
    rest = {"skip": skip, "state": state, "offsets": offsets, "return_state": return_state}
    y, final = _run.given(bind, (x, dt, A, B, C), rest, backend)
    return y, final if return_state else None


def selective_scan_step(
    x: Token, dt: Token, A: Rates, B: Key, C: Key, state: Held, *, skip: Skip | None = None
) -> Token:
    """One token of `selective_scan` for each row: y [B,D]; `state` [B,D,K] is changed in place.

        h <- exp(dt A) h + dt x B^T;  y = h C + skip x

    For decoding: without gradients (raises ValueError where one is asked for; `selective_scan` has them). The state is
    float32 (float64 for float64 x), y has x's dtype.
    """
    return step.forward(x, dt, A, B, C, state, skip=skip)
