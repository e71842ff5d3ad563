"""Choose a backend; on refusal list every backend's reasons; an explicit choice never falls back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foci.core.errors import Unsupported
from foci.core.spec import Backend, Spec


def choose(spec: Spec, call: Any, backend: str | None = None, single: bool = False) -> Backend:
    """The first backend of the Spec (fastest first) without a reason against the call, or the one that it `prefers`.

    With a name, that backend or Unsupported. `single`: only the first output is wanted.
    """
    if backend is None:
        if (found := _fastest(spec, call, single)) is not None:
            return found
        reasons = [f"{b.name}: {reason}" for b in spec.backends for reason in b.reasons(call)]
        raise Unsupported(f"{spec.function}: no backend can run this call", reasons)
    chosen = spec.backend(backend)
    reasons = chosen.ready().reasons(call)
    if reasons:
        others = [b.name for b in spec.backends if not b.reasons(call)]
        hint = (
            f"use backend=None to let foci choose ({others[0]} would run)" if others else "no other backend can either"
        )
        raise Unsupported(f"{spec.function}: backend {backend!r} cannot run this call", reasons, hint)
    return chosen


def _fastest(spec: Spec, call: Any, single: bool) -> Backend | None:
    for candidate in spec.backends:
        if not candidate.reasons(call):
            preferred = candidate.prefers(call, single)
            if preferred and not (other := spec.backend(preferred)).reasons(call):
                return other
            return candidate
    return None


@dataclass(frozen=True)
class Explanation:
    """Which backend would run a call, and what speaks against each other one."""

    operator: str
    chosen: str | None
    refused: dict[str, list[str]]
    also: dict[str, str]

    def __str__(self) -> str:
        lines = [f"chosen   {self.chosen or 'none: every backend refuses'}"]
        for name, reasons in self.refused.items():
            for place, reason in enumerate(reasons):
                head = "refused  " if name == next(iter(self.refused)) and place == 0 else " " * 9
                lines.append(f"{head}{name if place == 0 else '':<11}{reason}")
        if self.also:
            lines.append(
                "also ok  " + ", ".join(f"{name} ({note})" if note else name for name, note in self.also.items())
            )
        return "\n".join(lines)


def explain(spec: Spec, call: Any, backend: str | None = None) -> Explanation:
    """The Explanation of an eager call of Spec.function; `backend`: as if the caller had named it."""
    verdicts = {b.name: b.ready().reasons(call) for b in spec.backends}
    able = [name for name, reasons in verdicts.items() if not reasons]
    fastest = _fastest(spec, call, single=True) if backend is None else spec.backend(backend)
    chosen = None if fastest is None else fastest.name
    if chosen is not None and verdicts[chosen]:
        chosen = None
    return Explanation(
        operator=spec.name,
        chosen=chosen,
        refused={name: reasons for name, reasons in verdicts.items() if reasons},
        also={b.name: b.note for b in spec.backends if b.name in able and b.name != chosen},
    )
