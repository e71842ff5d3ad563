"""The plan: each site's backend and the reason, the model it is valid for, and the measurements behind it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foci.accelerate.calls import SOFTMAX, Call, Signature, letters, mask_text, run_on_backend, signature, spec_of
from foci.accelerate.sites import Site
from foci.bench.measure import clock
from foci.core.errors import Unsupported
from foci.core.select import explain
from foci.ops import SPECS

SCHEMA = 1
# The backend that is the oracle of the proof and never planned.
REFERENCE = "reference"
_CLEARLY = 0.85
_LITERALLY = {False: "it holds the whole T x S matrix", True: "it goes through the tokens one by one"}


@dataclass(frozen=True)
class Identity:
    """The model that a plan is valid for. Weights may differ: a fine-tuned model can use its base model's plan."""

    type: str
    config: dict[str, Any]
    modules: dict[str, list[list[int]]]

    @property
    def fingerprint(self) -> str:
        """A hash of all of it."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SitePlan:
    """One site's decision. `calls` has sizes, dtype, mask and count; `others` the reasons against other backends.

    `fixed`: a measurement overruled foci's own choice.
    """

    name: str
    kind: str
    caller: str
    via: str
    backend: str
    fixed: bool
    calls: list[dict[str, Any]]
    others: dict[str, list[str]]
    operator: str = SOFTMAX


@dataclass(frozen=True)
class CompilePlan:
    """Whether to compile, and the measurements. Times in seconds; None: not measured."""

    mode: str = "off"
    sentence: str = "not asked for"
    calls: int = 0
    cost: float | None = None
    call: float | None = None
    compiled_call: float | None = None
    break_even: int | None = None
    graphs: int | None = None
    breaks: int | None = None
    error: float | None = None
    budget: float | None = None
    resolutions: list[str] = field(default_factory=list)
    graphs_two_resolutions: int | None = None


@dataclass(frozen=True)
class Plan:
    """The content of plan.json. `ranks` is empty for a model in one process."""

    model: str
    identity: Identity
    device: str
    dtype: str
    sites: list[SitePlan]
    skipped: list[list[str]]
    proof: list[dict[str, Any]] = field(default_factory=list)
    timing: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    compile: CompilePlan = field(default_factory=CompilePlan)
    demo: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [site.name for site in self.sites]

    @property
    def backends(self) -> dict[str, str]:
        return {site.name: site.backend for site in self.sites}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in plan.json."""
        return {"schema": SCHEMA, "fingerprint": self.identity.fingerprint, **dataclasses.asdict(self)}

    def save(self, path: str | Path) -> Path:
        """Write plan.json atomically."""
        return write_atomically(Path(path), json.dumps(self.as_dict(), indent=2, sort_keys=False) + "\n")

    @classmethod
    def load(cls, source: Mapping[str, Any] | str | Path) -> Plan:
        """Read a plan from its file or its content; raises ValueError saying what is wrong with it.

        What is neither a path nor a mapping raises TypeError.
        """
        where, content = "plan", source
        if not isinstance(source, Mapping | str | os.PathLike):
            raise TypeError(f"plan must be a Plan, its content or the path of its file, got {source!r:.200}")
        if not isinstance(source, Mapping):
            where = f"plan {source}"
            try:
                content = json.loads(Path(source).read_text())
            except OSError as error:
                raise ValueError(f"{where} cannot be read: {error.strerror or error}") from error
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
        return cls._parse(content, where)

    @classmethod
    def _parse(cls, content: Any, where: str) -> Plan:
        if not isinstance(content, Mapping) or "schema" not in content:
            raise ValueError(f"{where} is not a plan of foci: it has no 'schema'")
        if content["schema"] != SCHEMA:
            raise ValueError(f"{where} has schema {content['schema']!r}; this foci reads schema {SCHEMA}")
        values = {name: content[name] for name in content if name not in ("schema", "fingerprint")}
        try:
            identity = Identity(**values.pop("identity"))
            sites = [SitePlan(**site) for site in values.pop("sites")]
            plan = cls(identity=identity, sites=sites, compile=CompilePlan(**values.pop("compile")), **values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{where} is damaged: {error}") from error
        for site in plan.sites:
            if site.operator not in SPECS:
                raise ValueError(
                    f"{where} gives {site.name} the operator {site.operator!r}; expected one of {[*SPECS]}"
                )
            known = [backend.name for backend in SPECS[site.operator].backends]
            if site.backend not in known:
                raise ValueError(f"{where} gives {site.name} the backend {site.backend!r}; expected one of {known}")
        if content.get("fingerprint") != plan.identity.fingerprint:
            raise ValueError(f"{where} is damaged: its fingerprint does not fit its identity")
        return plan

    def require_same_model(self, other: Identity) -> None:
        """Raise ValueError naming the first thing in which the model differs from the plan's."""
        mine = self.identity
        if mine.fingerprint == other.fingerprint:
            return
        head = f"plan was made for another model than this {other.type.rpartition('.')[2]}: "
        if mine.type != other.type:
            raise ValueError(f"{head}its class is {mine.type.rpartition('.')[2]}")
        for key in sorted(mine.config.keys() | other.config.keys()):
            if mine.config.get(key) != other.config.get(key):
                raise ValueError(
                    f"{head}config.{key} is {mine.config.get(key)!r} in the plan and {other.config.get(key)!r} here"
                )
        for name in sorted(mine.modules.keys() | other.modules.keys()):
            if mine.modules.get(name) != other.modules.get(name):
                raise ValueError(
                    f"{head}{name} has weights {mine.modules.get(name, 'none')} in the plan and "
                    f"{other.modules.get(name, 'none')} here"
                )


def identify(model: nn.Module) -> Identity:
    """The identity of a model: its class, its configuration, and the weights' shapes of its attention modules."""
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config or {})
    modules = {
        name: [list(parameter.shape) for parameter in module.parameters()]
        for name, module in model.named_modules()
        if getattr(module, "processor", None) is not None or "attention" in type(module).__name__.lower()
    }
    kept = {
        key: _plain(value) for key, value in values.items() if not key.startswith("_") and key not in _NOT_THE_MODEL
    }
    return Identity(f"{type(model).__module__}.{type(model).__qualname__}", kept, modules)


# Configuration entries that do not identify the model: the library's version, run-time options.
_NOT_THE_MODEL = {
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
}


def _plain(value: Any) -> Any:
    """The value after a JSON round trip, so that saved and live configurations compare equal."""
    return json.loads(json.dumps(value, default=str, sort_keys=True))


def choose_backend(site: Site, measured: dict[Signature, dict[str, float]]) -> SitePlan:
    """The fastest backend that can run every call of the site. `measured` caches seconds by signature for all."""
    against: dict[str, list[str]] = {}
    spec = spec_of(site.calls[0][0])
    for call, _ in site.calls:
        for name, reasons in explain(spec, call).refused.items():
            against.setdefault(name, []).extend(r for r in reasons if r not in against.get(name, []))
    able = [backend.name for backend in spec.backends if backend.name not in against]
    if not able:
        raise Unsupported(f"accelerate: {site.name}: no backend can run it", [r for rs in against.values() for r in rs])
    candidates = [name for name in able if name != REFERENCE] or able
    calls = []
    total = dict.fromkeys(candidates, 0.0)
    for call, count in site.calls:
        key = signature(call)
        if key not in measured:
            measured[key] = _seconds(call, candidates)
        times = {name: measured[key][name] for name in candidates if name in measured[key]}
        for name, seconds in times.items():
            total[name] += count * seconds
        calls.append(_describe(call, count, times))
    backend = candidates[0]
    for name in candidates[1:]:
        # The Spec lists its backends fastest first; a measurement overrules that order only beyond noise.
        if total[name] < _CLEARLY * total[backend]:
            backend = name
    for name in able:
        if name == REFERENCE and name != backend:
            against[name] = [f"{_LITERALLY[spec.recurrent]}: the oracle of the proof, not a plan"]
        elif name != backend:
            against[name] = [f"{total[name] / max(total[backend], 1e-9):.2f} x the time here"]
    fixed = any(explain(spec, call).chosen != backend for call, _ in site.calls)
    return SitePlan(site.name, site.kind, site.caller, site.via, backend, fixed, calls, against, spec.name)


def _seconds(call: Call, backends: list[str], most: int = 9, budget: float = 0.5) -> dict[str, float]:
    """Each backend's minimum over several interleaved runs: other load on the machine only adds time."""
    runs = {name: (lambda name=name: run_on_backend(call, name)) for name in backends}
    taken: dict[str, list[float]] = {name: [] for name in backends}
    with torch.no_grad():
        for run in runs.values():
            run()
        while all(len(one) < most for one in taken.values()) and (
            min(map(len, taken.values())) < 3 or sum(map(sum, taken.values())) < budget
        ):
            for name, run in runs.items():
                taken[name].append(clock(run))
    return {name: min(times) for name, times in taken.items()}


def _describe(call: Call, count: int, times: Mapping[str, float]) -> dict[str, Any]:
    return {
        "sizes": letters(call),
        "dtype": str(call[0].dtype).removeprefix("torch."),
        "mask": mask_text(call),
        "count": count,
        "milliseconds": {name: round(seconds * 1e3, 4) for name, seconds in times.items()},
    }


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a file atomically: to a temporary file in the same folder, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(name).chmod(0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path
