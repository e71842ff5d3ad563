"""The table of docs/kernels.md, a kernel in a line, and how two tables differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foci.core.tune import TARGETS

Row = dict[str, Any]
Spills = dict[tuple[str, str, str], str]  # reasons by operator, kernel and target
BEGIN, END = "<!-- by benchmarks/kernels.py --write -->", "<!-- end -->"
NAMES = ("operator", "variant", "direction", "kernel", "target")
COMPARED = ("registers", "spills", "serial", "stack", "shared", "tensor", "warps", "launches", "meta", "error")
# By how much the compiler differs from itself, as it orders by addresses, which each process has others of: of 466
# kernels, each compiled four times, three had up to 4 registers more or less, and all else was the same.
SWAY = {"registers": 4}


def table(path: Path) -> tuple[str, list[Row]]:
    """The Triton that a kept table is of, and its rows; none where there is no file."""
    if not path.exists():
        return "none", []
    try:
        head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
        return head["triton"], rows
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no table of benchmarks/kernels.py: {error}") from error


def said(row: Row) -> str:
    """registers, what it spills, KiB of shared memory, its matrix and copy instructions"""
    if "error" in row:
        return row["error"].splitlines()[0]
    spilled = f", **spills {row['spills']} B**" if row["spills"] else ""
    spilled += ", serial" if row.get("serial") else ""
    # An mma beside a wgmma is a small product of the same kernel; the main ones say what it runs on.
    kinds = list(row["instructions"])
    return f"{row['registers']}{spilled}, {row['shared'] / 1024:.0f} K, {' '.join(kinds) or 'no product'}"


def sentence(row: Row) -> str:
    """One kernel in a line of the terminal."""
    config = " ".join(f"{name}={value}" for name, value in row["meta"].items())
    names = f"{row['target']:<7}{row['operator']}, {row['variant']}, {row['direction']}: {row['kernel']}"
    scratch = f", {row['stack']} B of local memory" if row.get("stack") else ""
    columns = f", {row['tensor']} columns of tensor memory" if row.get("tensor") else ""
    return f"{names}\n       {said(row).replace('**', '')}{columns}{scratch}  [{config}]"


def name_of(row: Row) -> tuple[str, ...]:
    return tuple(row[key] for key in NAMES)


def named(rows: list[Row]) -> dict[tuple[Any, ...], Row]:
    """Rows by what they are of, those of one name counted."""
    places: dict[tuple[str, ...], int] = {}
    found = {}
    for row in rows:
        name = name_of(row)
        places[name] = places.get(name, -1) + 1
        found[*name, places[name]] = row
    return found


def differences(before: list[Row], after: list[Row]) -> list[str]:
    """What two tables say otherwise, kernel by kernel, beyond what two compilations of the same kernel may."""
    old, new = named(before), named(after)
    return [line for name in dict.fromkeys([*old, *new]) for line in _between(name, old.get(name), new.get(name))]


def _between(name: tuple[Any, ...], old: Row | None, new: Row | None) -> Iterator[str]:
    operator, variant, direction, kernel, target, _ = name
    where = f"{operator}, {variant}, {direction}: {kernel} on {target}"
    if old is None or new is None:
        yield f"{where}: {'is new' if old is None else 'is gone'}"
        return
    changed = [f"{key} {old.get(key)} -> {new.get(key)}" for key in COMPARED if not _alike(key, old, new)]
    kinds = [" ".join(row.get("instructions", ())) or "none" for row in (old, new)]
    changed += [f"instructions {kinds[0]} -> {kinds[1]}"] if kinds[0] != kinds[1] else []
    if changed:
        yield f"{where}: {', '.join(changed)}"


def _alike(key: str, old: Row, new: Row) -> bool:
    if key in SWAY and key in old and key in new:
        return bool(abs(old[key] - new[key]) <= SWAY[key])
    return bool(old.get(key) == new.get(key))


def page(text: str, rows: list[Row], version: str, spills: Spills, others: Mapping[str, list[Row]]) -> str:
    """The page with its tables made new between the two marks; of other Tritons what differs in short."""
    parts = [f"Triton {version}.", "", *_tables(rows), *_reasons(rows, spills), *_by_others(rows, version, others)]
    made = "\n".join(parts)
    found, count = re.subn(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{made}\n{END}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"expected one table between {BEGIN} and {END}, found {count}")
    return found


def _tables(rows: list[Row]) -> Iterator[str]:
    for operator in dict.fromkeys(row["operator"] for row in rows):
        mine = [row for row in rows if row["operator"] == operator]
        yield from (f"### {operator}", "", f"| variant | kernel | {' | '.join(TARGETS)} |")
        yield f"|---|---|{'---|' * len(TARGETS)}"
        for variant in dict.fromkeys(row["variant"] for row in mine):
            of_it = [row for row in mine if row["variant"] == variant]
            yield from _variant(variant, of_it)
        yield ""


def _variant(variant: str, rows: list[Row]) -> Iterator[str]:
    first = rows[0]["target"]
    counts = {
        direction: sum(row["launches"] for row in rows if row["direction"] == direction and row["target"] == first)
        for direction in dict.fromkeys(row["direction"] for row in rows if row["direction"] != "inference")
    }
    head = f"**{variant}**: {', '.join(f'{direction} {count}' for direction, count in counts.items())} launches"
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        cells.setdefault((row["direction"], row["kernel"]), {}).setdefault(row["target"], []).append(said(row))
    for place, ((direction, kernel), by_target) in enumerate(cells.items()):
        columns = " | ".join("; ".join(by_target.get(target, [])) for target in TARGETS)
        alone = " without gradients" if direction == "inference" else ""
        yield f"| {head if place == 0 else ''} | `{kernel}`{alone} | {columns} |"


def _reasons(rows: list[Row], spills: Spills) -> Iterator[str]:
    most: dict[tuple[str, str, str], int] = {}
    for row in rows:
        place = row["operator"], row["kernel"], row["target"]
        most[place] = max(most.get(place, 0), row.get("spills") or 0)
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for (operator, kernel, target), reason in spills.items():
        if bytes_ := most.get((operator, kernel, target)):
            reasons.setdefault((operator, kernel, reason), []).append(f"{target} ({bytes_})")
    if reasons:
        yield from ("### Known spills", "", "In brackets the most bytes of any variant above.", "")
        yield from (f"- {op}, `{k}` on {', '.join(targets)}: {why}" for (op, k, why), targets in reasons.items())
        yield ""


def _by_others(rows: list[Row], version: str, others: Mapping[str, list[Row]]) -> Iterator[str]:
    if not others:
        return
    yield from ("### By other Tritons", "", f"| Triton | kernels | not as by {version} | spill less | spill more |")
    yield "|---|---|---|---|---|"
    mine = named(rows)
    for other, theirs in others.items():
        both = ((name, mine.get(name, row), row) for name, row in named(theirs).items())
        spilled = {name: (ours.get("spills", 0), row.get("spills", 0)) for name, ours, row in both}
        less = sum(now < before for before, now in spilled.values())
        more = {name: pair for name, pair in spilled.items() if pair[1] > pair[0]}
        most = ""
        if more:
            (_, _, _, kernel, target, _), (before, now) = max(more.items(), key=lambda item: item[1][1] - item[1][0])
            most = f", `{kernel}` on {target} most: {before} -> {now} bytes"
        yield f"| {other} | {len(theirs)} | {len(differences(rows, theirs))} | {less} | {len(more)}{most} |"
    yield ""
