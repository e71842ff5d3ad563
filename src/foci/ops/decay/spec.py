"""Equation, shapes, outputs, gradients, merge type, cases, work, backends by module name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foci.core.spec import Backend, Output, Spec
from foci.merge.affine import Affine
from foci.ops.decay import reference
from foci.ops.decay.call import NAME, Call, bind
from foci.ops.decay.cases import CASES
from foci.ops.decay.conventions import adapt
from foci.ops.decay.mistakes import MISTAKES
from foci.ops.decay.probes import PROBES


def outputs(call: Call) -> tuple[Output, ...]:
    B, T, _, H, K, V, N = call.sizes
    return Output("out", (B, T, H, V), call.v.dtype), Output("state", (N, H, K, V), call.accumulator)


def _reference(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return reference.forward(bind(*args, **kwargs))


def _plain(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = bind(*args, **kwargs)
    return reference.equation(call, call.q.dtype)


SPEC = Spec(
    name="linear",
    equation="S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t",
    paper="arXiv:2006.16236",
    reference=_reference,
    plain=_plain,
    output_names=("out", "state"),
    differentiable=("q", "k", "v", "log_decay", "bonus", "state"),
    cases=CASES,
    call=Call,
    bind=bind,
    function=NAME,
    outputs=outputs,
    backends=(
        Backend("chunked", "foci.ops.decay.chunked", note="O(T) memory"),
        Backend("reference", "foci.ops.decay.reference", note="a loop over tokens"),
    ),
    mistakes=MISTAKES,
    probes=PROBES,
    merge=Affine,
    adapt=adapt,
    recurrent=True,
)
