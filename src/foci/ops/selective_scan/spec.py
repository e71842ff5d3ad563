"""Equation, shapes, outputs, gradients, merge type, cases, work, backends by module name."""

from __future__ import annotations

from foci.core.spec import Backend, Output, Spec, Work, equations
from foci.ops.selective_scan import reference
from foci.ops.selective_scan.call import NAME, Call, bind
from foci.ops.selective_scan.cases import CASES, LARGE, drawn
from foci.ops.selective_scan.conventions import adapt
from foci.ops.selective_scan.mistakes import MISTAKES
from foci.ops.selective_scan.probes import PROBES
from foci.ops.selective_scan.shapes import SHAPES


def outputs(call: Call) -> tuple[Output, ...]:
    batch, T, D, K, _ = call.sizes
    return Output("out", (batch, T, D), call.x.dtype), Output("state", (call.ends, D, K), call.accumulator)


def work(call: Call) -> Work:
    """The decay, the new term, the state and the sum over K: 6 operations and an exponential for each of B T D K."""
    batch, T, D, K, _ = call.sizes
    read = (call.x, call.dt, call.B, call.C, call.A)
    moved = sum(x.numel() * x.element_size() for x in read) + call.x.numel() * call.x.element_size()
    return Work(flops=7 * batch * T * D * K, bytes=moved)


SPEC = Spec(
    name=NAME,
    equation="h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  y_t = h_t C_t + skip x_t",
    paper="arXiv:2312.00752",
    output_names=("out", "state"),
    differentiable=("x", "dt", "A", "B", "C", "skip", "state"),
    cases=CASES,
    large=LARGE,
    drawn=drawn,
    call=Call,
    bind=bind,
    outputs=outputs,
    backends=(
        Backend("native", "foci.ops.selective_scan.native", note="O(T) memory, built on first use"),
        Backend("triton", "foci.ops.selective_scan.gpu", note="O(T) memory", needs=("triton",)),
        Backend("chunked", "foci.ops.selective_scan.chunked", note="states of 32 tokens at a time"),
        Backend("reference", "foci.ops.selective_scan.reference", note="a loop over tokens"),
    ),
    mistakes=MISTAKES,
    probes=PROBES,
    shapes=SHAPES,
    work=work,
    adapt=adapt,
    recurrent=True,
    **equations(bind, reference),
)
