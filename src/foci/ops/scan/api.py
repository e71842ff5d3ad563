"""The public functions: scan many tokens, step one token."""

from __future__ import annotations

from foci.core.library import Runner
from foci.ops.scan import step
from foci.ops.scan.call import Offsets, State, Tokens, bind
from foci.ops.scan.spec import SPEC
from foci.ops.scan.step import Token

_run = Runner(SPEC)


def scan(
    x: Tokens,
    log_decay: Tokens,
    *,
    state: State | None = None,
    offsets: Offsets | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> tuple[Tokens, State | None]:
    """The elementwise linear recurrence: (h [B,T,D], final state or None).

        h_t = exp(g_t) h_{t-1} + x_t                       h_0 = state or 0

    Differentiable in x, log_decay and state, and through the final state. float64, float32, bfloat16 and float16; sums
    are kept in float32 (float64 for float64), h has x's dtype, log_decay and state may have their own. Any strides;
    time and memory grow linearly with T.

    x, log_decay [B,T,D]: g <= 0 in natural log, -inf forgets. state [N,D]: what comes before the first token.
    offsets [N+1]: documents end to end in a batch of 1. return_state: give the state [N,D] after the last token, else
    None in its place. backend: a name that must run the call; None lets foci choose.
    Offsets on the CPU are checked; those on a GPU are not, as reading them would synchronise.

    Raises ShapeError, ValueError or TypeError for arguments that do not fit, Unsupported when the named backend cannot.
    Papers: Martin and Cundy 2018 (arXiv 1709.04057); HGRN (2311.04823): x = (1 - exp(g)) * i; minGRU (2410.01201).
    """
    rest = {"state": state, "offsets": offsets, "return_state": return_state}
    h, final = _run.given(bind, (x, log_decay), rest, backend)
    return h, final if return_state else None


def scan_step(x: Token, log_decay: Token, state: Token) -> Token:
    """One token of `scan` for each row: h [B,D] = exp(g) state + x; `state` [B,D] is changed in place to the same.

    For decoding: without gradients (raises ValueError where one is asked for; `scan` has them). The state is float32
    (float64 for float64 x), h has x's dtype.
    """
    return step.forward(x, log_decay, state)
