"""Equation, shapes, outputs, gradients, merge type, cases, work, backends by module name."""

from __future__ import annotations

from foci.core.spec import Backend, Output, Spec, Work, equations
from foci.merge.affine import Affine
from foci.ops.decay import reference
from foci.ops.decay.call import NAME, Call, bind
from foci.ops.decay.cases import CASES, LARGE, drawn
from foci.ops.decay.conventions import adapt
from foci.ops.decay.mistakes import MISTAKES
from foci.ops.decay.probes import PROBES
from foci.ops.decay.shapes import SHAPES
from foci.ops.slabs import CHUNK


def outputs(call: Call) -> tuple[Output, ...]:
    B, T, _, H, K, V, _ = call.sizes
    return Output("out", (B, T, H, V), call.v.dtype), Output("state", (call.ends, H, K, V), call.accumulator)


def work(call: Call) -> Work:
    """The products of the form in chunks, each in full: q k^T and A v within a chunk, q S and k^T v with its state.

    q, k, v and log_decay read, out written once.
    """
    B, T, _, H, K, V, _ = call.sizes
    inner = 2 * CHUNK * (K + V) if call.causal else 0
    read = (call.q, call.k, call.v) if call.log_decay is None else (call.q, call.k, call.v, call.log_decay)
    moved = sum(x.numel() * x.element_size() for x in (*read, call.v))
    return Work(flops=B * T * H * (inner + 4 * K * V), bytes=moved)


SPEC = Spec(
    name="linear",
    equation="S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t",
    paper="arXiv:2006.16236",
    output_names=("out", "state"),
    differentiable=("q", "k", "v", "log_decay", "bonus", "state"),
    cases=CASES,
    large=LARGE,
    drawn=drawn,
    call=Call,
    bind=bind,
    function=NAME,
    outputs=outputs,
    backends=(
        Backend("native", "foci.ops.decay.native", note="O(T) memory, built on first use"),
        Backend("triton", "foci.ops.decay.gpu", note="O(T) memory", needs=("triton",)),
        Backend("chunked", "foci.ops.decay.chunked", note="O(T) memory"),
        Backend("reference", "foci.ops.decay.reference", note="a loop over tokens"),
    ),
    mistakes=MISTAKES,
    probes=PROBES,
    shapes=SHAPES,
    merge=Affine,
    work=work,
    adapt=adapt,
    recurrent=True,
    causal_bitwise=True,
    **equations(bind, reference),
)
