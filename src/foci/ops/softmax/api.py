"""The public functions: attend many tokens, with or without the log-sum-exp."""

from __future__ import annotations

from foci.core.library import Runner
from foci.ops.masks import Mask, lower
from foci.ops.softmax.call import Bias, Key, Lse, Out, Query, Sink, Value, bound
from foci.ops.softmax.spec import SPEC

_run = Runner(SPEC)


def attention(
    q: Query,
    k: Key,
    v: Value,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sink: Sink | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> Out:
    """Softmax attention.

        z[t,s] = cap(scale * q_t . k_s) + bias[t,s]        cap(x) = c tanh(x/c) when softcap=c, else x
        lse[t] = log(sum_s exp(z[t,s]) + exp(sink_h))      a masked pair has z = -inf; no sink: no second term
        out[t] = sum_s exp(z[t,s] - lse[t]) v_s

    Head h of H query heads reads key head h // (H/G). A row that may see nothing gives out = 0. Differentiable in q, k,
    v, bias and sink. float64, float32, bfloat16 and float16; sums are kept in float32 (float64 for float64). Any
    strides.

    q [B,T,H,K], k [B,S,G,K], v [B,S,G,V]: one dtype, H a multiple of G, V may differ from K.
    mask: Causal, Window, Packed, Lengths, Dense, or several joined by `&`.
    bias: added to the logits, broadcastable to [B,H,T,S]. softcap: c, 1e-30 to 1e30. sink [H]: one more logit per head,
    without a value. scale: K**-0.5 by default; any that float32 holds, 0 and below too, whatever the dtype.
    dropout: probability of dropping a probability, from torch's generator.
    backend: a name that must run the call; None lets foci choose (`foci.explain` tells which and why).

    Raises ShapeError, ValueError or TypeError for arguments that do not fit, Unsupported when the named backend cannot.
    Papers: Vaswani et al. 2017 (arXiv 1706.03762); softcap Gemma 2 (2408.00118); sinks Xiao et al. 2023 (2309.17453).
    """
    rest = {"softcap": softcap, "scale": scale, "dropout": dropout}
    return _run.given(bound, (q, k, v, bias, sink, *lower(mask)), rest, backend, single=True)[0]


def attention_with_lse(
    q: Query,
    k: Key,
    v: Value,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sink: Sink | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> tuple[Out, Lse]:
    """`attention` and its log-sum-exp: (out [B,T,H,V], lse [B,T,H]).

    lse is in natural log, float32 (float64 for float64), -inf for a row that may see nothing, and differentiable: a
    gradient that reaches it flows on to q, k, bias and sink. `foci.Partial(out, lse)` merges such pairs over disjoint
    sets of keys. Arguments and errors are those of `attention`. Paper: Dao et al. 2022 (arXiv 2205.14135).
    """
    rest = {"softcap": softcap, "scale": scale, "dropout": dropout}
    out, lse = _run.given(bound, (q, k, v, bias, sink, *lower(mask)), rest, backend)
    return out, lse.contiguous()
