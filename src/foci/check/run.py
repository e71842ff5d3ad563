"""Run the laws on the cases of a candidate and report: laws x cases -> report."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from foci.check import diagnose, isolate, laws
from foci.check.compare import Error
from foci.check.exam import Exam, FaultLocator, ReferenceTooLarge
from foci.check.laws import Finding, Law, NotTested
from foci.check.laws_graph import LAWS
from foci.core.spec import Candidate, Spec

# Half precision is bfloat16 by default: what holds with its 8 bits of mantissa holds with float16's 11.
DTYPES = (torch.float32, torch.bfloat16)
SHOWN = 4  # refused cases that a line of the report names
CASE_TIMEOUT = 120.0  # seconds without a message from the child after which a case counts as hung
OUT_OF_TIME = "the time that was given was over"


class Limits(NamedTuple):
    """Seconds without a message after which a case counts as hung; seconds in all, after which laws are left out."""

    silence: float = CASE_TIMEOUT
    within: float = math.inf


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Failure:
    """One thing that is wrong, in one sentence, and the cases that show it."""

    sentence: str
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """What one law found. `verdict` is "ok", "FAIL" or "not tested", then with a reason.

    `seconds`: how long the law ran, also if the time limit cut it short.
    """

    number: int
    law: str
    cases: int = 0
    error: Error | None = None
    failures: tuple[Failure, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return "FAIL" if self.failures else "ok" if self.cases else "not tested"


@dataclass(frozen=True)
class Report:
    """The rows of one candidate. `not_tested` lists what no row could test, with the reason.

    `asked`: the laws and cases selected, by option of `foci check`; empty if all were.
    """

    operator: str
    candidate: str
    device: str
    dtypes: tuple[str, ...]
    rows: tuple[Row, ...]
    not_tested: tuple[str, ...]
    seconds: float
    asked: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """No law failed, none was left out for lack of time, and at least one was tested."""
        return not self.failures and not self.unasked and any(row.cases for row in self.rows)

    @property
    def unasked(self) -> int:
        """How many laws were left out because the time was over."""
        return sum(row.reason.startswith(OUT_OF_TIME) for row in self.rows)

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(failure for row in self.rows for failure in row.failures)

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def to_json(self) -> str:
        facts: dict[str, Any] = asdict(self)
        for row, told in zip(facts["rows"], self.rows, strict=True):
            row["verdict"] = told.verdict
            if row["error"] and not math.isfinite(row["error"]["size"]):
                row["error"]["size"] = "inf"  # JSON has no infinity
        return json.dumps({"ok": self.ok, "torch": torch.__version__, **facts}, indent=2, ensure_ascii=False)


def examine(
    spec: Spec,
    candidate: Candidate,
    *,
    device: str = "cpu",
    dtypes: tuple[torch.dtype, ...] | None = None,
    only: Iterable[str] | None = None,
    isolated: bool = True,
    limits: Limits = DEFAULT_LIMITS,
    progress: Callable[[str], None] = lambda step: None,
    locator: FaultLocator | None = None,
    more: Sequence[Law] = (),
) -> Report:
    """Test a candidate against every law (or those named in `only`).

    `isolated`: in a child process, so that a crash or a hang becomes a finding; otherwise in this process, where a
    debugger can follow. `progress` is called with the name of each law as it starts. `locator` locates and explains
    errors in a wrong tensor. `more`: further laws, for this candidate alone.
    """
    dtypes = tuple(dtype for dtype in DTYPES if dtype in spec.dtypes) if dtypes is None else dtypes
    known = {law.name: law for law in (*LAWS, *more)}
    wanted = set(known) if only is None else set(only)
    if unknown := wanted - set(known):
        raise ValueError(f"examine: unknown law {min(unknown)!r}; expected among {list(known)}")
    chosen = [law for name, law in known.items() if name in wanted]
    start = time.perf_counter()
    exam = Exam(spec, candidate, torch.device(device), dtypes, locator=locator)
    unfit = isolate.why_unable(device) if isolated else ""
    rows, refused = (_isolated if isolated and not unfit else _here)(exam, chosen, limits, progress)
    if unfit:
        refused.append(f"crashes and hangs: {unfit}, so all ran in this process")
    return Report(
        spec.name, candidate.name, device, tuple(str(d).removeprefix("torch.") for d in dtypes), tuple(rows),
        (*candidate.not_tested, *refused), round(time.perf_counter() - start, 2),
    )  # fmt: skip


Answers = tuple[list[Row], list[str]]


def _here(exam: Exam, chosen: list[Law], limits: Limits, progress: Callable[[str], None]) -> Answers:
    rows: list[Row] = []
    ends = time.monotonic() + limits.within
    for law in chosen:
        if time.monotonic() > ends:
            break
        progress(law.name)
        rows.append(run_law(exam, law))
    return _with_laws_left_out(rows, chosen), _refusals(exam.refused)


def _with_laws_left_out(rows: list[Row], chosen: list[Law], begun: float = math.inf, step: str = "") -> list[Row]:
    """The rows, with one more for every law left out; the first of those may have `begun`, and reached case `step`."""
    left = [Row(law.number, law.name, reason=OUT_OF_TIME) for law in chosen[len(rows) :]]
    if begun < math.inf:  # so there is no row of it yet
        left[0] = replace(left[0], reason=f"{OUT_OF_TIME}, at {step!r}" if step else OUT_OF_TIME, seconds=_since(begun))
    return rows + left


def _since(begun: float) -> float:
    return round(max(0.0, time.monotonic() - begun), 2)


def _isolated(exam: Exam, chosen: list[Law], limits: Limits, progress: Callable[[str], None]) -> Answers:
    """Run the laws in a child process; if it dies, the current law has failed, and a new child runs the rest."""
    rows: list[Row] = []
    refused: dict[str, str] = {}
    ends, begun, step = time.monotonic() + limits.within, math.inf, ""
    while len(rows) < len(chosen) and time.monotonic() <= ends:
        rest, step = chosen[len(rows) :], ""

        def work(send: Callable[[Any], None], rest: list[Law] = rest) -> None:
            exam.progress = lambda case: send(("case", case))
            for law in rest:
                if "torch._dynamo" in sys.modules:
                    torch.compiler.reset()  # else a candidate that compiles internally (flex) meets the recompile limit
                send(("law", law.name))
                send(("row", run_law(exam, law), exam.refused))

        for message in isolate.stream(work, limits.silence, ends):
            if isinstance(message, isolate.Died) and time.monotonic() >= ends:
                break
            if isinstance(message, isolate.Died):
                law = chosen[len(rows)]
                sentence = f"{message.reason} at {step!r}: no exception, the whole program would be gone"
                rows.append(Row(law.number, law.name, 1, None, (Failure(sentence, (step,)),), seconds=_since(begun)))
                begun = math.inf
            elif message[0] == "law":
                progress(message[1])
                begun, step = time.monotonic(), ""
            elif message[0] == "case":
                step = message[1]
            else:
                rows.append(message[1])
                refused |= message[2]
                begun = math.inf
            if time.monotonic() > ends:
                break
    return _with_laws_left_out(rows, chosen, begun, step), _refusals(refused)


def run_law(exam: Exam, law: Law) -> Row:
    """One law of one candidate; repeated without a case whose reference does not fit in memory, keeping failures."""
    begun, findings, unasked, again = time.monotonic(), list[Finding](), "", True
    while again:
        found, unasked, again = _findings(exam, law)
        findings = _failed(findings) + found
    grouped: dict[str, list[Finding]] = {}
    for finding in _failed(findings):
        grouped.setdefault(diagnose.without_size(finding.sentence or ""), []).append(finding)
    failures = [_failure(group) for group in grouped.values()]
    failures.sort(key=lambda failure: -len(failure.cases))
    cases = len({finding.case for finding in findings})
    reason = "" if cases else unasked
    return Row(law.number, law.name, cases, laws.worst(findings), tuple(failures), reason, _since(begun))


def _failure(group: list[Finding]) -> Failure:
    """Findings whose sentences differ in no more than a size, by the worst of them, whose case comes first."""
    shown = group[0]
    if any(finding.sentence != shown.sentence for finding in group):
        shown = max(group, key=lambda finding: finding.error.share if finding.error else 0.0)
    return Failure(shown.sentence or "", tuple(dict.fromkeys([shown.case, *(finding.case for finding in group)])))


def _findings(exam: Exam, law: Law) -> tuple[list[Finding], str, bool]:
    """A law's findings, the reason if there are none, and whether to run it again because a case was dropped.

    Of a law that was interrupted only failures count: what passed so far says nothing of the rest.
    """
    found: list[Finding] = []
    try:
        for finding in law.ask(exam):  # one by one: those before an error are not lost
            found.append(finding)
    except NotTested as error:
        return _failed(found), str(error), False
    except (ReferenceTooLarge, torch.OutOfMemoryError) as error:
        room = error if isinstance(error, ReferenceTooLarge) else ReferenceTooLarge()
        return _failed(found), str(room), exam.leave_out(room)
    except Exception as error:  # what it raises where no law expects it is no reason to lose the other laws' answers
        sentence = f"it raised where the law did not expect it: {diagnose.exception(error, 'call')}"
        return [*_failed(found), Finding(law.name, None, sentence)], "", False
    return found, "no case of it applies", False


def _failed(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.sentence]


def _refusals(refused: dict[str, str]) -> list[str]:
    """Refused cases by reason."""
    by_reason: dict[str, list[str]] = {}
    for case, reason in refused.items():
        by_reason.setdefault(reason, []).append(case)
    return [f"{reason} [{_listed(cases)}]" for reason, cases in by_reason.items()]


def _listed(cases: list[str]) -> str:
    return "; ".join(cases[:SHOWN]) + (f" and {len(cases) - SHOWN} more" if len(cases) > SHOWN else "")
