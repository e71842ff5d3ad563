"""Equation, shapes, outputs, gradients, merge type, cases, work, backends by module name."""

from __future__ import annotations

from foci.core.spec import Backend, Output, Spec, Work, equations
from foci.merge.affine import Affine
from foci.ops.delta import reference
from foci.ops.delta.call import NAME, Call, bind
from foci.ops.delta.cases import CASES, LARGE, drawn
from foci.ops.delta.conventions import adapt
from foci.ops.delta.mistakes import MISTAKES
from foci.ops.delta.probes import PROBES
from foci.ops.delta.shapes import SHAPES
from foci.ops.slabs import CHUNK


def outputs(call: Call) -> tuple[Output, ...]:
    B, T, _, H, K, V, _ = call.sizes
    return Output("out", (B, T, H, V), call.v.dtype), Output("state", (call.ends, H, K, V), call.accumulator)


def work(call: Call) -> Work:
    """The products of the form in chunks, each in full, and the triangle, solved once for the values.

    Within a chunk q k^T, e k^T and A u; with its state e S, q S and k^T u. q, k, v, beta, erase and log_decay read, out
    written once.
    """
    B, T, _, H, K, V, _ = call.sizes
    read = (call.q, call.k, call.v, call.beta, call.erase, call.log_decay, call.v)
    moved = sum(x.numel() * x.element_size() for x in read if x is not None)
    return Work(flops=B * T * H * (CHUNK * (4 * K + 3 * V) + 6 * K * V), bytes=moved)


SPEC = Spec(
    name="delta",
    equation="S' = Diag(exp g_t) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T e_t)^T;  o_t = scale S_t^T q_t",
    paper="arXiv:2406.06484",
    output_names=("out", "state"),
    differentiable=("q", "k", "v", "beta", "log_decay", "erase", "state"),
    cases=CASES,
    large=LARGE,
    drawn=drawn,
    call=Call,
    bind=bind,
    function=NAME,
    outputs=outputs,
    backends=(
        Backend("native", "foci.ops.delta.native", note="O(T) memory, built on first use"),
        Backend("triton", "foci.ops.delta.gpu", note="O(T) memory", needs=("triton",)),
        Backend("chunked", "foci.ops.delta.chunked", note="O(T) memory"),
        Backend("reference", "foci.ops.delta.reference", note="a loop over tokens"),
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
