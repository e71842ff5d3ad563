"""Laws that the gallery does not reach: each passes what is right and can fail."""

from __future__ import annotations

from dataclasses import replace

import torch

from foci.check.exam import Exam
from foci.check.laws import NotTested
from foci.check.laws_graph import LAWS
from foci.core.spec import Case, Probes
from foci.ops.masks import Mask
from foci.ops.softmax import spec as softmax
from foci.ops.softmax.api import attention_with_lse
from foci.ops.softmax.conventions import adapt
from tests.check import toy

CPU = torch.device("cpu")


def ask(law: str, candidate, spec=softmax.SPEC, dtypes=(torch.float32,)) -> list[str]:
    """The sentences of one law."""
    exam = Exam(spec, candidate, CPU, dtypes)
    (chosen,) = [each for each in LAWS if each.name == law]
    findings = list(chosen.ask(exam))
    assert findings
    return [finding.sentence for finding in findings if finding.sentence]


def ours(change=lambda out, lse: (out, lse), drop=(), seen=lambda mask: mask):
    """Our own attention with its results or its mask changed."""

    def attend(q, k, v, *, mask: Mask | None = None, bias=None, softcap=None, sink=None, scale=None, dropout=0.0):
        rest = {"bias": bias, "softcap": softcap, "sink": sink, "scale": scale, "dropout": dropout}
        kept = {name: value for name, value in rest.items() if name not in drop}
        return change(*attention_with_lse(q, k, v, mask=seen(mask), **kept))

    return adapt(attend)


def test_causality_of_gradients() -> None:
    class Leaks(torch.autograd.Function):
        """The identity, whose gradient counts the whole sequence."""

        @staticmethod
        def forward(ctx, x, other):
            ctx.save_for_backward(other)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (1 + 0.1 * ctx.saved_tensors[0].mean()), None

    def attend(q, k, v, *, is_causal=False):
        out, _ = attention_with_lse(q, k, v, mask=softmax_causal() if is_causal else None)
        return Leaks.apply(out, k.detach())

    told = ask("causality", adapt(attend))
    assert told and all("leak into dq, dk, dv of the prefix" in sentence for sentence in told)


def softmax_causal() -> Mask:
    from foci.ops.masks import Causal

    return Causal()


def test_extreme_gates() -> None:
    assert ask("extreme gates", toy.candidate(), toy.SPEC) == []

    def clamped(x, gate):
        return toy.reference(x, gate.clamp(max=10.0))

    told = ask("extreme gates", toy.candidate(clamped), toy.SPEC)
    assert told and "extreme gates" in told[0]


def test_a_toy_operator_keeps_every_law_it_has_probes_for() -> None:
    spec = replace(toy.SPEC, probes=replace(toy.SPEC.probes, future=toy.future))
    only_out = toy.candidate(lambda x, gate: toy.reference(x, gate)[:1], outputs=("out",))
    exam = Exam(spec, only_out, CPU, (torch.float32,))
    silent = set()
    for law in LAWS:
        try:
            assert [f for f in law.ask(exam) if f.sentence] == [], law.name
        except NotTested:
            silent.add(law.name)
    assert silent == {
        "logarithm", "gradients through the logarithm", "cut and merge", "packed = separate", "custom ops"
    }  # fmt: skip


def test_without_probes_laws_say_so() -> None:
    exam = Exam(replace(toy.SPEC, probes=Probes(), merge=None), toy.candidate(), CPU, (torch.float32,))
    silent = set()
    for law in LAWS:
        try:
            list(law.ask(exam))
        except NotTested:
            silent.add(law.name)
    assert silent >= {"cut and merge", "packed = separate", "batch slot", "causality", "any length", "bad input"}


def test_a_refused_case_is_no_finding_but_is_kept() -> None:
    def refuses(case: Case) -> list[str]:
        return ["it has no wish to"] if case.name == "one row" else []

    exam = Exam(toy.SPEC, toy.candidate(refuses=refuses), CPU, (torch.float32,))
    (forward,) = [law for law in LAWS if law.name == "forward"]
    assert {finding.case for finding in forward.ask(exam)} == {"plain, float32", "extreme, float32"}
    assert exam.refused == {"one row": "it has no wish to"}
