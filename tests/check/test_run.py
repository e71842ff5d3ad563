"""Reports: verdicts, JSON, exit codes, and a child that dies on the way."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from foci.check import isolate
from foci.check.compare import Error
from foci.check.exam import Exam
from foci.check.laws import Finding, Findings, Law, NotTested
from foci.check.render import table
from foci.check.run import LAWS, OUT_OF_TIME, Limits, Row, _with_laws_left_out, examine, run_law
from tests.check import toy

FAST = [law.name for law in LAWS if law.number not in (1, 12)]


@pytest.mark.parametrize("isolated", [True, False])
def test_what_is_right_passes(isolated: bool) -> None:
    report = examine(toy.SPEC, toy.candidate(), only=FAST, isolated=isolated)
    assert report.ok and report.exit_code == 0 and not report.failures
    assert [row.law for row in report.rows] == FAST
    assert {row.verdict for row in report.rows} == {"ok", "not tested"}
    assert all(row.reason for row in report.rows if row.verdict == "not tested")


@pytest.mark.parametrize("isolated", [True, False])
def test_a_fault_is_named_with_its_cases(isolated: bool) -> None:
    report = examine(
        toy.SPEC, toy.candidate(lambda x, gate: (toy.reference(x, gate)[0] / 2, toy.reference(x, gate)[1])),
        only=["forward", "logarithm"], isolated=isolated,
    )  # fmt: skip
    forward, logarithm = report.rows
    assert forward.verdict == "FAIL" and logarithm.verdict == "ok" and report.exit_code == 1
    (failure,) = forward.failures
    assert failure.sentence == toy.HALVED and "plain, float32" in failure.cases
    assert forward.error is not None and not forward.error.ok


def test_nothing_tested_is_not_ok() -> None:
    report = examine(toy.SPEC, toy.candidate(refuses=lambda case: ["no"]), only=["forward"])
    assert report.rows[0].verdict == "not tested" and not report.ok and report.exit_code == 1
    assert report.not_tested == ("no [plain; one row; extreme]",)


def test_a_crash_breaks_one_law_and_the_next_is_asked() -> None:
    def crashes_on_nothing(x, gate):
        if x.shape[1] == 0:
            ctypes.string_at(0)
        return toy.reference(x, gate)

    report = examine(toy.SPEC, toy.candidate(crashes_on_nothing), only=["forward", "any length", "inputs untouched"])
    assert [row.verdict for row in report.rows] == ["ok", "FAIL", "ok"]
    assert "killed the interpreter (SIGSEGV) at 'T=0'" in report.failures[0].sentence


@pytest.mark.parametrize("isolated", [True, False])
def test_a_case_whose_truth_has_no_room_is_not_tested_and_others_are(isolated: bool) -> None:
    def scarce(x, gate):
        if x.dtype == torch.float64 and len(x) == 1 and x.shape[1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return toy.reference(x, gate)

    spec = replace(toy.SPEC, reference=scarce)
    names = ["forward", "gradients", "gradcheck", "same bits twice"]
    report = examine(spec, toy.candidate(), only=names, dtypes=(torch.float32,), isolated=isolated)
    assert report.ok and [row.verdict for row in report.rows] == ["ok"] * 4
    assert report.rows[0].cases == 2 and not any("one row" in failure.cases for failure in report.failures)
    assert report.not_tested == ("their truth takes more memory than is free [one row]",)


def test_gradients_that_have_no_room_leave_the_case_out() -> None:
    calls = []

    def scarce(x, gate):
        calls.append(x.requires_grad)
        if x.requires_grad and x.dtype == torch.float64 and len(x) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return toy.reference(x, gate)

    report = examine(
        replace(toy.SPEC, reference=scarce), toy.candidate(), only=["gradients", "forward"], isolated=False
    )
    assert report.ok and any(calls) and report.not_tested == ("their truth takes more memory than is free [one row]",)
    assert [row.reason for row in report.rows] == ["", ""]


def test_a_law_of_a_case_of_its_own_that_has_no_room_is_not_tested() -> None:
    """The compiler's: it is not asked of the operator's cases, and asked anew for ever it would never end."""

    def scarce(x, gate):
        raise torch.OutOfMemoryError("CUDA out of memory")

    spec = replace(toy.SPEC, reference=scarce)
    report = examine(spec, toy.candidate(), only=["compiled = eager", "any length"], isolated=False)
    assert not report.ok and {row.verdict for row in report.rows} == {"not tested"}
    assert "their truth takes more memory than is free" in {row.reason for row in report.rows}


def test_a_fault_that_was_found_before_there_was_no_room_stays() -> None:
    """Of the case itself, in float32: the yardstick of bfloat16 has no room."""

    def wrong(x, gate):
        out, total = toy.reference(x, gate)
        return (out * 2 if len(x) == 1 else out), total

    def scarce(x, gate):
        if x.dtype == torch.bfloat16 and len(x) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return toy.plain(x, gate)

    spec, dtypes = replace(toy.SPEC, plain=scarce), (torch.float32, torch.bfloat16)
    report = examine(spec, toy.candidate(wrong), only=["forward"], dtypes=dtypes, isolated=False)
    assert not report.ok and report.failures[0].cases == ("one row, float32",)
    assert report.not_tested == ("their truth takes more memory than is free [one row]",)


@pytest.mark.parametrize("error", [NotTested("it ends here"), torch.OutOfMemoryError("CUDA out of memory")])
def test_of_a_law_that_breaks_off_faults_alone_count(error: Exception) -> None:
    exam = Exam(toy.SPEC, toy.candidate(), torch.device("cpu"), (torch.float64,))

    def row(*findings: Finding) -> Row:
        def broken_off(exam: Exam) -> Iterator[Finding]:
            yield from findings
            raise error

        return run_law(exam, Law(2, "a law", broken_off))

    right, wrong = Finding("right", None), Finding("wrong", None, "it is wrong")
    assert row(right).verdict == "not tested"
    assert row(right, wrong).verdict == "FAIL" and row(right, wrong).failures[0].cases == ("wrong",)


def test_what_differs_in_a_size_alone_is_one_failure_by_the_worst() -> None:
    def size(number: float) -> str:
        return f"out is wrong, worst by {number} where the right size is 1; 9% of it is off"

    findings = [
        Finding("a", Error(2.0, 1.0), size(2)), Finding("b", Error(9.0, 1.0), size(9)),
        Finding("c", Error(3.0, 1.0), size(3)), Finding("d", None, size(3).replace("out", "lse")),
    ]  # fmt: skip
    exam = Exam(toy.SPEC, toy.candidate(), torch.device("cpu"), (torch.float32,))
    row = run_law(exam, Law(2, "a law", lambda exam: iter(findings)))
    told = [(failure.sentence, failure.cases) for failure in row.failures]
    assert told == [(size(9), ("b", "a", "c")), (size(3).replace("out", "lse"), ("d",))]


def test_a_law_that_has_no_room_for_what_it_computes_itself_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("foci.check.exam.compare", scarce)
    report = examine(toy.SPEC, toy.candidate(), only=["forward", "same bits twice"], isolated=False)
    assert [row.verdict for row in report.rows] == ["not tested", "ok"]
    assert report.rows[0].reason == "their truth takes more memory than is free"


def test_a_loss_that_has_no_room_is_no_fault_of_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Exam, "_cotangents", scarce)
    report = examine(toy.SPEC, toy.candidate(), only=["gradients"], isolated=False)
    assert not report.failures and report.rows[0].verdict == "not tested"


def test_memory_that_the_candidate_lacks_is_a_fault_of_its_own() -> None:
    def scarce(x, gate):
        raise torch.OutOfMemoryError("CUDA out of memory")

    report = examine(toy.SPEC, toy.candidate(scarce), only=["forward"], isolated=False)
    assert "forward raised OutOfMemoryError" in report.failures[0].sentence


def test_json_is_the_report() -> None:
    report = examine(toy.SPEC, toy.candidate(), only=["forward"])
    facts = json.loads(report.to_json())
    assert facts["ok"] and facts["operator"] == "toy" and facts["torch"] == torch.__version__ and facts["asked"] == {}
    assert facts["rows"][0] == {
        "number": 2, "law": "forward", "cases": 6, "failures": [], "reason": "", "verdict": "ok",
        "seconds": report.rows[0].seconds,
        "error": {"size": report.rows[0].error.size, "budget": report.rows[0].error.budget},
    }  # fmt: skip


def test_dtypes_and_progress() -> None:
    told: list[str] = []
    report = examine(toy.SPEC, toy.candidate(), only=["forward"], dtypes=(torch.float64,), progress=told.append)
    assert report.dtypes == ("float64",) and told == ["forward"]


def test_half_precision_keeps_the_laws() -> None:
    assert examine(toy.SPEC, toy.candidate(), only=FAST, dtypes=(torch.bfloat16,)).ok


def test_json_has_no_infinity() -> None:
    report = examine(toy.SPEC, toy.candidate(lambda x, gate: (x * torch.nan, gate.logsumexp(1))), only=["forward"])
    facts = json.loads(report.to_json(), parse_constant=lambda word: pytest.fail(word))
    assert facts["rows"][0]["error"]["size"] == "inf" and facts["rows"][0]["verdict"] == "FAIL"


def test_an_unknown_law_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown law 'forwards'"):
        examine(toy.SPEC, toy.candidate(), only=["forwards"])


def test_where_no_child_can_work_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr(isolate, "why_unable", lambda device: "this platform cannot fork")
    report = examine(toy.SPEC, toy.candidate(), only=["forward"])
    assert report.ok and "this platform cannot fork, so all ran in this process" in report.not_tested[-1]


def test_only_the_law_that_was_begun_says_at_which_case_it_stood() -> None:
    """One whose child died before has a row, and those behind it were at none."""
    rows = _with_laws_left_out([], LAWS[:2], time.monotonic() - 5, "plain")
    assert [row.reason for row in rows] == [f"{OUT_OF_TIME}, at 'plain'", OUT_OF_TIME] and rows[0].seconds >= 5 > rows[
        1
    ].seconds
    assert [row.reason for row in _with_laws_left_out([Row(1, "first")], LAWS[:2], step="plain")] == ["", OUT_OF_TIME]


@pytest.mark.parametrize("isolated", [True, False])
def test_past_the_time_given_laws_are_left_unasked_and_say_so(isolated: bool) -> None:
    names = ["forward", "logarithm", "any length"]

    def slow(x, gate):
        time.sleep(0.2)
        return toy.reference(x, gate)

    report = examine(toy.SPEC, toy.candidate(slow), only=names, isolated=isolated, limits=Limits(within=0.5))
    assert [row.law for row in report.rows] == names
    assert report.rows[-1].verdict == "not tested" and report.rows[-1].reason == OUT_OF_TIME and not report.failures
    assert not report.ok and f"{report.unasked} left unasked: {OUT_OF_TIME}" in table(report)


def test_the_law_whose_time_was_over_says_so_and_at_which_case() -> None:
    def slow(x, gate):
        time.sleep(1.0)
        return toy.reference(x, gate)

    names = ["forward", "any length"]
    report = examine(toy.SPEC, toy.candidate(slow), only=names, limits=Limits(within=2.5))
    cut, left = report.rows
    assert cut.reason.startswith(f"{OUT_OF_TIME}, at '") and cut.reason != f"{OUT_OF_TIME}, at ''"
    assert 1.0 < cut.seconds < 10.0
    assert left.reason == OUT_OF_TIME and left.seconds == 0.0 and report.unasked == 2


def test_a_law_says_how_long_it_was_asked() -> None:
    def slow(x, gate):
        time.sleep(0.05)
        return toy.reference(x, gate)

    (row,) = examine(toy.SPEC, toy.candidate(slow), only=["forward"]).rows
    assert row.verdict == "ok" and row.seconds >= 0.05 * row.cases


def test_what_a_law_did_not_expect_is_a_failure_of_it_alone() -> None:
    """Dynamo raises exceptions of its own out of a user's backward; the report of all other laws was lost."""

    def ask(exam: Exam) -> Findings:
        yield Finding("before", None, "something is wrong")
        raise KeyError("a kind of its own")

    for isolated in (False, True):
        report = examine(
            toy.SPEC, toy.candidate(), only=["forward", "odd"], more=[Law(16, "odd", ask)], isolated=isolated
        )
        forward, odd = report.rows
        assert forward.verdict == "ok" and [each.sentence for each in odd.failures] == [
            "something is wrong", "it raised where the law did not expect it: call raised KeyError: 'a kind of its own'"
        ]  # fmt: skip
