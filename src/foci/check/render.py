"""A report as the table that people read."""

from __future__ import annotations

import shutil
import textwrap

from foci.check.run import OUT_OF_TIME, Report, Row

LAW, CASES, ERROR = 41, 6, 20


def table(report: Report, width: int | None = None) -> str:
    """Law, cases, worst error against its budget, verdict, and for a failure its sentence; then what was not tested.

    At the end a line for each choice of laws or cases.
    """
    width = max(80, width or shutil.get_terminal_size((120, 24)).columns)
    broken = sum(row.verdict == "FAIL" for row in report.rows)
    asked = sum(row.verdict != "not tested" for row in report.rows)
    lines = [
        f"{report.operator} · {report.candidate} · {report.device} · {', '.join(report.dtypes)}",
        "",
        f"{'law':<{LAW}}{'cases':>{CASES}}  {'worst / budget':<{ERROR}}verdict",
    ]
    for row in report.rows:
        lines += _row(row, width)
    if report.not_tested:
        lines.append("")
        for reason in report.not_tested:
            lines += _wrapped("not tested   ", reason, width)
    verdict = f"{broken} of {asked} rows broken" if broken else "nothing was tested" if not asked else "every law holds"
    if report.unasked:
        verdict = f"{broken} of {asked} rows broken, {report.unasked} left unasked: {OUT_OF_TIME}"
    told = [
        f"only the {'laws' if option == 'laws' else 'cases'} of --{option} {text} were asked"
        for option, text in report.asked.items()
    ]
    return "\n".join([*lines, "", f"{verdict} · {report.seconds:.0f} s", *told])


def _row(row: Row, width: int) -> list[str]:
    name = f"{row.number:>2} {row.law}"
    error = "" if row.error is None else f"{row.error.size:.1e} / {row.error.budget:.1e}"
    start = f"{name:<{LAW}}{row.cases or '':>{CASES}}  {error:<{ERROR}}"
    if row.verdict != "FAIL":
        tail = f"not tested: {row.reason}" if row.verdict == "not tested" else "ok"
        return _wrapped(start, tail, width)
    lines: list[str] = []
    for failure in row.failures:
        where = failure.cases[0] + (f" and {len(failure.cases) - 1} more" if len(failure.cases) > 1 else "")
        lines += _wrapped(start if not lines else " " * len(start), f"FAIL {failure.sentence} [{where}]", width)
    return lines


def _wrapped(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
