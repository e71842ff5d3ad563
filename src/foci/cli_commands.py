"""The commands of `foci`: each turns words into a call of the library, and what comes back into words or JSON."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import reduce
from operator import and_
from typing import Annotated, Any, get_args, get_type_hints

import torch
import typer
from torch import Tensor

from foci.cli_accelerate import accelerate
from foci.cli_bench import bench
from foci.cli_check import check
from foci.cli_generate import generate
from foci.cli_tune import tune
from foci.core import assembler
from foci.core.device import machine, own_version, platform
from foci.core.ledger import in_force
from foci.core.select import explain as explain_call
from foci.core.spec import Spec
from foci.core.tune import interpreting, measurement_dates, proven, table_of
from foci.ops import SPECS, masks
from foci.ops.masks import Causal, Dense, Lengths, Mask, Packed, Window

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Attention you can prove.")
app.command("accelerate")(accelerate)
app.command("bench")(bench)
app.command("check")(check)
app.command("generate")(generate)
app.command("tune")(tune)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_MOST = 2**59  # numbers of a tensor: an int64 counts their bytes
KINDS = {"veto": "refused", "normalised": "put right"}


def show(text: str, facts: dict[str, Any], as_json: bool) -> None:
    """Print either the text for people or the facts for programs."""
    typer.echo(json.dumps(facts, indent=2, ensure_ascii=False) if as_json else text)


def operator(name: str) -> Spec:
    """The Spec of that name, or a sentence with the names there are."""
    if name not in SPECS:
        raise ValueError(f"unknown operator {name!r}; expected one of {', '.join(map(repr, SPECS))}")
    return SPECS[name]


@app.command("doctor")
def doctor(as_json: Json = False) -> None:
    """This machine, each backend's availability with the reason, and the known-bad combinations in force."""
    here = machine()
    kernels = _triton(here.packages["triton"] is not None)
    devices = [torch.device("cpu"), *(torch.device("cuda", gpu.index) for gpu in here.gpus)]
    backends = [row for spec in SPECS.values() for device in devices for row in _availability(spec, device)]
    defects = [
        {"device": str(device), "kernel": d.kernel, "kind": d.kind, "what": d.what, "issue": d.issue, "url": d.url}
        for device in devices
        for d in in_force(platform(device))
    ]
    wide = 2 + max(map(len, SPECS))
    packages = ", ".join(f"{name} {version or 'absent'}" for name, version in here.packages.items())
    lines = [
        f"foci {own_version()} · {here.line}",
        f"machine   {here.computer}, Python {here.python}",
        f"packages  {packages}",
        *(f"gpu       {g.name}, sm_{''.join(map(str, g.capability))}, {g.memory / 2**30:.1f} GiB" for g in here.gpus),
        f"triton    {kernels['line']}",
        *([f"hopper    assembled by {kernels['assembler']}"] if kernels["assembler"] else []),
        "",
        f"{'operator':<{wide}}device  backend    availability",
        *(
            f"{row['operator']:<{wide}}{row['device']:<8}{row['backend']:<11}" + ("; ".join(row["reasons"]) or "ready")
            for row in backends
        ),
        "",
        "known defects of foreign kernels in force here"
        if defects
        else "no known defect of a foreign kernel is in force",
        *(f"{d['kernel']:<10}{d['device']:<8}{KINDS[d['kind']]:<11}{d['what']} ({d['issue']})" for d in defects),
    ]
    facts = {
        "foci": own_version(),
        "machine": here.as_dict(),
        "triton": kernels,
        "backends": backends,
        "defects": defects,
    }
    show("\n".join(lines), facts, as_json)


def _triton(installed: bool) -> dict[str, Any]:
    """What is true of Triton here: its version, whether its interpreter is on, which GPU has a measured table."""
    here = machine()
    if not installed:
        absent = "not installed: no kernels of our own"
        return {"version": None, "interpreter": False, "tables": {}, "assembler": "", "line": absent}
    import triton  # its interpreter is on or off from here, and backends that are asked later say so

    tables = {gpu.name: table_of(gpu.name) for gpu in here.gpus}
    dates = {name: measurement_dates(table) if table else None for name, table in tables.items()}
    of_gpus = [
        f"{name}: configurations " + (f"measured {date}" if date else "by rule, not yet measured")
        for name, date in dates.items()
    ]
    runs = "interpreter on" if interpreting() else "interpreter off"
    new = [] if proven() else ["foci's kernels have not been proven on a GPU by this version"]
    line = "; ".join([f"{triton.__version__}, {runs}", *(of_gpus or ["no GPU"]), *new])
    there = {"version": triton.__version__, "interpreter": interpreting(), "tables": dates}
    return {**there, "assembler": assembler.describe_ptxas(), "line": line}


def _availability(spec: Spec, device: torch.device) -> list[dict[str, Any]]:
    """Whether each backend can run the operator's first and plainest case on this device, and if not why.

    On a GPU the case is in bfloat16: kernels for halves alone are ready there too.
    """
    assert spec.bind is not None
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    call = spec.bind(**spec.cases[0].make(dtype, device, 0))
    return [
        {"operator": spec.name, "device": str(device), "backend": b.name, "reasons": b.reasons(call), "note": b.note}
        for b in spec.backends
    ]


@app.command("explain")
def explain(
    name: Annotated[str, typer.Argument(metavar="OPERATOR", help=", ".join(SPECS))],
    shape: Annotated[str, typer.Option(help="Sizes by letter: B1,T4096,S4096,H32,G8,K128,V128; the scans have D.")],
    mask: Annotated[
        str,
        typer.Option(
            help="causal, causal:top-left, window:L,R (window:L, or window:,R: one side open), dense, packed:0,9,20, "
            "lengths:7; & joins"
        ),
    ] = "",
    softcap: Annotated[float | None, typer.Option(help="Cap of the logits.")] = None,
    give: Annotated[
        str, typer.Option("--with", help="Optional parts, joined with commas: bias, sink, dropout, state.")
    ] = "",
    lse: Annotated[bool, typer.Option("--lse", help="Ask for the log-sum-exp, or the state, too.")] = False,
    grad: Annotated[bool, typer.Option("--grad", help="Every floating tensor needs its gradient.")] = False,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Which backend would run a call of this shape on this machine, and every other backend's reasons."""
    spec = operator(name)
    sizes = _sizes(spec, shape)
    parts = [part.strip() for part in give.split(",") if part.strip()]
    tensors = _tensors(spec, sizes, [part for part in parts if part != "dropout"], dtype, _device(device), grad)
    options: dict[str, Any] = {"mask": _mask(mask, sizes, _device(device)), "softcap": softcap}
    if "dropout" in parts:
        options["dropout"] = 0.1
    options = {option: value for option, value in options.items() if value is not None}
    assert spec.bind is not None
    assert spec.outputs is not None
    if unknown := options.keys() - inspect.signature(spec.bind).parameters.keys():
        raise ValueError(
            f"{spec.name} has no {min(unknown)}; it has {', '.join(inspect.signature(spec.bind).parameters)}"
        )
    call = spec.bind(**tensors, **options)
    if "mask" in options:
        _hold_values(mask, options["mask"], sizes)
    explanation = explain_call(spec, call)
    returned = spec.outputs(call)[: None if lse else 1]
    results = {out.name: {"shape": list(out.shape), "dtype": _word(out.dtype)} for out in returned}
    gives = ", ".join(f"{out.name} {list(out.shape)} {_word(out.dtype)}" for out in returned)
    show(f"{explanation}\nreturns  {gives}", asdict(explanation) | {"returns": results}, as_json)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {name!r}")
    if name == "cuda" and not machine().gpus:
        raise ValueError(
            "--device cuda: this machine has no CUDA device, and foci only answers for the machine it is on"
        )
    return torch.device(name)


def _letters(annotation: Any) -> list[str]:
    """The sizes of a tensor of this annotation; of several shapes, the last one's."""
    shapes = [hint.dim_str for hint in (annotation, *get_args(annotation)) if hasattr(hint, "dim_str")]
    return [letter.lstrip("#") for letter in shapes[-1].split()] if shapes else []


def _sizes(spec: Spec, text: str) -> dict[str, int]:
    """{"T": 4096, ...} from "T4096,...". Left out: B is 1, S is T, G is H, V is K, and N, of the states, is B."""
    parts = [re.fullmatch(r"([A-Z])(\d+)", part.strip()) for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"--shape must be letters with sizes, like B1,T4096,H32,G8,K128; got {text!r}")
    sizes = {part[1]: int(part[2]) for part in parts if part}
    hints = get_type_hints(spec.bind).values()
    letters = {letter for hint in hints for letter in _letters(hint)} - {"N", "M"}
    if unknown := sizes.keys() - letters:
        raise ValueError(f"--shape: unknown letter {min(unknown)!r}; expected {', '.join(sorted(letters))}")
    if len(sizes) < len(parts):
        raise ValueError(f"--shape gives a letter twice: {text!r}")
    if missing := [letter for letter in "THKD" if letter in letters - sizes.keys()]:
        raise ValueError(f"--shape must give {', '.join(missing)}; got {text!r}")
    same = {"S": "T", "G": "H", "V": "K"}
    sizes = {"B": 1} | {letter: sizes[like] for letter, like in same.items() if letter in letters} | sizes
    return sizes | {"N": sizes["B"]}


def _tensors(
    spec: Spec, sizes: dict[str, int], asked: list[str], dtype: str, device: torch.device, grad: bool
) -> dict[str, Tensor]:
    """The operator's tensors in these sizes, without their memory: required ones and the optional ones asked for."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if dtype not in {_word(known) for known in spec.dtypes}:
        raise ValueError(f"--dtype must be one of {', '.join(map(_word, spec.dtypes))}; got {dtype!r}")
    assert spec.bind is not None
    hints = get_type_hints(spec.bind)
    required = [p.name for p in inspect.signature(spec.bind).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    optional = {name: hint for name, hint in hints.items() if name in spec.differentiable and name not in required}
    if unknown := [name for name in asked if name not in optional]:
        has = [*optional, *(["dropout"] if "dropout" in hints else [])]
        raise ValueError(f"--with: {spec.name} has no optional {unknown[0]!r}; it has {', '.join(has)}")
    tensors = {}
    with FakeTensorMode():
        for name in (*required, *asked):
            shape = [sizes[letter] for letter in _letters(hints[name])]
            if math.prod(shape) > _MOST:
                raise ValueError(f"--shape: {name} {shape} is larger than any tensor; expected 2^59 numbers at most")
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device, requires_grad=grad)
    return tensors


def _mask(text: str, sizes: dict[str, int], device: torch.device) -> Mask | None:
    """A mask from its words, parts joined with `&`."""
    makers: dict[str, Callable[[str], Mask]] = {
        "causal": lambda words: Causal(words or "bottom-right"),
        "window": lambda words: Window(*_reaches(words)),
        "packed": lambda words: Packed(torch.tensor(_integers(words), device=device)),
        "lengths": lambda words: Lengths(torch.tensor(_integers(words, sizes["B"]), device=device)),
        "dense": lambda words: _dense(words, sizes["T"], device),
    }
    made = []
    for part in (part.strip() for part in text.split("&") if text.strip()):
        kind, _, words = part.partition(":")
        if not part:
            raise ValueError(f"--mask: a part of {text!r} is empty; expected masks joined with &")
        if kind not in makers:
            raise ValueError(f"--mask: unknown mask {kind!r}; expected one of {', '.join(makers)}")
        try:
            made.append(makers[kind](words))
        except ValueError as error:
            raise ValueError(f"--mask {kind}: {error}") from error
    return reduce(and_, made) if made else None


def _hold_values(text: str, mask: Mask, sizes: dict[str, int]) -> None:
    """Offsets and lengths fit the sizes: a call on a CPU refuses those that do not."""
    try:
        masks.check(masks.lower(mask), sizes["B"], sizes["T"], sizes["S"])
    except ValueError as error:
        raise ValueError(f"--mask {text}: {error}") from error


def _integers(text: str, count: int | None = None) -> list[int]:
    numbers = [int(word) for word in text.split(",") if re.fullmatch(r"\s*\d+\s*", word)]
    if len(numbers) != len(text.split(",")) or (count is not None and len(numbers) != count):
        expected = f"{count} whole numbers" if count is not None else "whole numbers"
        raise ValueError(f"expected {expected} separated by commas, got {text!r}")
    return numbers


def _reaches(text: str) -> list[int | None]:
    """Both sides of a window; the one that is left out is open."""
    sides = text.split(",")
    if len(sides) != 2 or not text.strip(" ,") or not re.fullmatch(r"\s*\d*\s*,\s*\d*\s*", text):
        raise ValueError(
            f"expected 2 whole numbers separated by commas, of which one may be left out: an open side; got {text!r}"
        )
    return [int(side) if side.strip() else None for side in sides]


def _dense(text: str, T: int, device: torch.device) -> Dense:
    if text:
        raise ValueError(f"expected nothing behind it, got {text!r}")
    return Dense(torch.ones((T, 1), dtype=torch.bool, device=device))
