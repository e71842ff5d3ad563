"""Laws that the gallery does not reach: each passes what is right and can fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from foci.check.exam import Exam
from foci.check.laws import NotTested, one_of
from foci.check.laws_graph import LAWS
from foci.core.spec import Case, Probes
from foci.ops.masks import Mask
from foci.ops.softmax import spec as softmax
from foci.ops.softmax.api import attention_with_lse
from foci.ops.softmax.conventions import adapt
from tests.check import toy
from tests.check.recurrences import Times

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


@pytest.mark.parametrize(("noise", "leak"), [(0.0, 0.1), (1e-5, 0.1), (1e-5, 0.0)])
def test_causality_of_gradients(noise: float, leak: float) -> None:
    """What differs from call to call by itself is no leak, and hides none."""

    class Spoiled(torch.autograd.Function):
        """The identity, whose gradient counts the whole sequence, and is rounded in another way each time."""

        @staticmethod
        def forward(ctx, x, other):
            ctx.save_for_backward(other)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (1 + noise * torch.rand_like(grad) + leak * ctx.saved_tensors[0].mean()), None

    def attend(q, k, v, *, is_causal=False):
        out, _ = attention_with_lse(q, k, v, mask=softmax_causal() if is_causal else None)
        return Spoiled.apply(out, k.detach())

    told = ask("causality", adapt(attend))
    assert bool(told) == bool(leak) and all("leak into dq, dk, dv of the prefix" in sentence for sentence in told)


def test_what_is_now_and_then_no_number_excuses_no_leak() -> None:
    turns = itertools.cycle((1.0, 1.0, torch.nan, torch.nan, torch.nan))  # a case is asked twice, and thrice more

    class Leaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, other):
            ctx.other = other
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (next(turns) + 0.1 * ctx.other.mean()), None

    def attend(q, k, v, *, is_causal=False):
        return Leaks.apply(attention_with_lse(q, k, v, mask=softmax_causal() if is_causal else None)[0], k.detach())

    assert ask("causality", adapt(attend))


def softmax_causal() -> Mask:
    from foci.ops.masks import Causal

    return Causal()


def test_extreme_gates() -> None:
    assert ask("extreme gates", toy.candidate(), toy.SPEC) == []

    def clamped(x, gate):
        return toy.reference(x, gate.clamp(max=10.0))

    told = ask("extreme gates", toy.candidate(clamped), toy.SPEC)
    assert told and "extreme gates" in told[0]


def test_lengths_are_asked_of_the_first_kind_that_is_taken() -> None:
    asked: list[str] = []

    def refuses(case: Case) -> list[str]:
        asked.append(case.name)
        return ["too much"] if case.name.startswith("much") else []

    probes = replace(
        toy.SPEC.probes, sized=lambda n: toy.case(f"much T={n}", T=n), simpler=(lambda n: toy.case(f"T={n}", T=n),)
    )
    assert ask("any length", toy.candidate(refuses=refuses), replace(toy.SPEC, probes=probes)) == []
    assert asked[:3] == ["much T=1", "T=1", "T=0"] and "T=200" in asked


def test_a_backward_that_knows_one_block_is_told_by_law_10() -> None:
    def blocked(x, gate):
        return toy.reference(Times.apply(x, 2) if x.shape[1] > 63 else x, gate)

    told = ask("any length", toy.candidate(blocked), toy.SPEC)
    assert told and all(sentence.startswith("at some lengths: dx is 2 times") for sentence in told)
    everywhere = toy.candidate(lambda x, gate: toy.reference(Times.apply(x, 2), gate))
    assert ask("any length", everywhere, toy.SPEC) == [], "law 2 tells it"


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (lambda n: n % 16, "lengths that are no multiple of its block"),
        (lambda n: n % 64, "lengths that are no multiple of its block"),
        (lambda n: n and n % 16 == 0, "T=16, 32, 64, 128"),
        (lambda n: n == 1, "T=1"),
        (lambda n: n > 16 and n % 16, "lengths that are no multiple of its block"),
        (lambda n: n > 100, "T=127, 128, 129, 200"),
        (lambda n: n > 1, "every length (see above)"),
    ],
)
def test_law_10_says_at_which_lengths(bad: Callable[[int], bool], where: str) -> None:
    def some(x, gate):
        out, total = toy.reference(x, gate)
        return out * (2 if bad(x.shape[1]) else 1), total

    assert set(ask("any length", toy.candidate(some), toy.SPEC)) == {f"out is wrong at {where}"}


def test_gradcheck_asks_of_the_forward_that_is_trained() -> None:
    def halved_in_inference(x, gate):
        out, total = toy.reference(x.double(), gate.double())
        return out * (1 if torch.is_grad_enabled() else 0.5), total

    assert ask("gradcheck", toy.candidate(halved_in_inference), toy.SPEC) == []
    other_backward = toy.candidate(lambda x, gate: toy.reference(Times.apply(x, 2), gate))
    assert ask("gradcheck", other_backward, toy.SPEC)


@pytest.mark.parametrize(("law", "logs"), [("gradients", ()), ("gradients through the logarithm", ("total",))])
def test_what_other_outputs_drown_is_asked_of_one_alone(law: str, logs: tuple[str, ...]) -> None:
    def long_ones_are_rough(x, gate):
        out, total = toy.reference(x, gate)
        return out, toy.reference(x, Times.apply(gate, 1.001))[1] if x.shape[1] == 11 else total

    cases = (toy.case("short"), *(toy.case(f"{place}", T=11, gate=4.0) for place in range(8)))
    told = ask(law, toy.candidate(long_ones_are_rough), replace(toy.SPEC, cases=cases, logs=logs))
    assert told and all("dgate" in sentence and "of a loss on total alone" in sentence for sentence in told)
    assert len(told) == sum(one_of(("out", "total"), case) == "total" for case in cases[1:]) < 8


def test_under_extreme_gates_a_wrong_forward_is_told_once() -> None:
    told = ask("extreme gates", toy.candidate(lambda x, gate: toy.reference(x, gate.clamp(max=10.0))), toy.SPEC)
    assert told and all("extreme gates" in sentence for sentence in told)


def test_outputs_too_rough_in_half_precision_leave_the_gradients_of_float32_asked() -> None:
    def rough(x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return toy.reference(x * 1.1 if x.dtype == torch.bfloat16 else x * 2 - x.detach(), gate)

    told = ask("gradients", toy.candidate(rough), toy.SPEC, (torch.float32, torch.bfloat16))
    assert told and all("dx" in sentence for sentence in told)


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
