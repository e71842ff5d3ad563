"""Equation, shapes, outputs, gradients, merge type, cases, work, backends by module name."""

from __future__ import annotations

from foci.core.spec import Backend, Output, Spec, Work, equations
from foci.ops.scan import reference
from foci.ops.scan.call import NAME, Call, bind
from foci.ops.scan.cases import CASES, LARGE, drawn
from foci.ops.scan.conventions import adapt
from foci.ops.scan.mistakes import MISTAKES
from foci.ops.scan.probes import PROBES
from foci.ops.scan.shapes import SHAPES


def outputs(call: Call) -> tuple[Output, ...]:
    B, T, D, _ = call.sizes
    return Output("out", (B, T, D), call.x.dtype), Output("state", (call.ends, D), call.accumulator)


def work(call: Call) -> Work:
    """One multiply-add a number; x and log_decay read, h written once."""
    moved = 2 * call.x.numel() * call.x.element_size() + call.log_decay.numel() * call.log_decay.element_size()
    return Work(flops=2 * call.x.numel(), bytes=moved)


SPEC = Spec(
    name="scan",
    equation="h_t = exp(g_t) h_{t-1} + x_t",
    paper="arXiv:1709.04057",
    output_names=("out", "state"),
    differentiable=("x", "log_decay", "state"),
    cases=CASES,
    large=LARGE,
    drawn=drawn,
    call=Call,
    bind=bind,
    function=NAME,
    outputs=outputs,
    backends=(
        Backend("triton", "foci.ops.scan.gpu", note="O(T) memory", needs=("triton",)),
        Backend("chunked", "foci.ops.scan.chunked", note="about 3 sqrt(T) calls of torch"),
        Backend("reference", "foci.ops.scan.reference", note="a loop over tokens"),
    ),
    mistakes=MISTAKES,
    probes=PROBES,
    shapes=SHAPES,
    work=work,
    adapt=adapt,
    recurrent=True,
    **equations(bind, reference),
)
