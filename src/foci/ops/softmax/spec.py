"""Equation, shapes, outputs, gradients, merge type, cases, work, backends by module name."""

from __future__ import annotations

from foci.core.spec import Backend, Output, Spec, Work, equations
from foci.merge.partial import Partial
from foci.ops.pairs import pairs, without_causal
from foci.ops.softmax import reference
from foci.ops.softmax.call import Call, bind
from foci.ops.softmax.cases import CASES, LARGE, drawn
from foci.ops.softmax.conventions import adapt
from foci.ops.softmax.mistakes import MISTAKES
from foci.ops.softmax.probes import PROBES
from foci.ops.softmax.shapes import SHAPES


def outputs(call: Call) -> tuple[Output, ...]:
    B, T, _, H, _, _, V = call.sizes
    return Output("out", (B, T, H, V), call.v.dtype), Output("lse", (B, T, H), call.accumulator)


def work(call: Call) -> Work:
    """2 (K + V) operations a head for every query and key that it sees; q, k, v read and out, lse written once.

    The backward recomputes q k^T and makes dv, dp, dq and dk: 6 K + 4 V.
    """
    B, T, S, H, _, K, V = call.sizes
    size, each = call.q.element_size(), 2 * H * (K + V)
    moved = sum(x.numel() for x in (call.q, call.k, call.v)) * size + B * T * H * (V * size + 4)
    return Work(
        flops=each * pairs(call.visible, B, T, S),
        bytes=moved,
        backward=(3 * K + 2 * V) / (K + V or 1),
        counted=each * pairs(without_causal(call.visible), B, T, S),
    )


SPEC = Spec(
    name="softmax",
    equation="lse[t] = log sum_s exp z[t,s];  out[t] = sum_s exp(z[t,s] - lse[t]) v_s;  z = cap(scale q k) + bias",
    paper="arXiv:1706.03762",
    output_names=("out", "lse"),
    logs=("lse",),
    differentiable=("q", "k", "v", "bias", "sink"),
    cases=CASES,
    large=LARGE,
    drawn=drawn,
    call=Call,
    bind=bind,
    function="attention",
    outputs=outputs,
    backends=(
        Backend("aten", "foci.ops.softmax.aten", note="torch's fused kernels"),
        Backend(
            "flash",
            "foci.ops.softmax.flash",
            note="FlashAttention's own packages",
            one_of=("flash_attn", "flash_attn_interface"),
        ),
        Backend("triton", "foci.ops.softmax.gpu", note="O(T) memory", needs=("triton",)),
        Backend("chunked", "foci.ops.softmax.chunked", note="slower, takes everything, O(T) memory"),
        Backend("reference", "foci.ops.softmax.reference", note="O(T S) memory"),
    ),
    mistakes=MISTAKES,
    probes=PROBES,
    shapes=SHAPES,
    merge=Partial,
    work=work,
    adapt=adapt,
    **equations(bind, reference),
)
