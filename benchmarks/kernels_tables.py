"""The measured tables in the package: for which targets they are, and which of their rows choose nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping

from foci.core import tune
from foci.core.tune import TARGETS, Config, ConfigRequest, Target


def shipped() -> list[Target]:
    """Each GPU that has a table, as a target of its name."""
    tables = [json.loads(path.read_text()) for path in sorted(tune.TABLES.glob("*.json"))]
    return [TARGETS[table["target"]]._replace(name=table["gpu"]) for table in tables]


def stale(gpu: Target, asked: Mapping[tuple[str, str], ConfigRequest]) -> list[str]:
    """What is wrong with the rows of this GPU's table, held to all that the specimens asked `configure` for.

    A row must be of a kernel and key that are asked for, or nobody would see that it outlived them, and one of the
    configurations that `foci tune` may try, whose numbers the tests hold to the equation; the rule's own says nothing.
    """
    kernels = (tune.table_of(gpu.name) or {"kernels": {}})["kernels"]
    rows = {(kernel, key): row for kernel, keys in kernels.items() for key, row in keys.items()}
    wrong = []
    for (kernel, key), row in rows.items():
        where = f"{tune.file_name(gpu.name)}.json, {kernel}[{key}]: "
        config = Config(row["blocks"], row["warps"], row["stages"])
        if (kernel, key) not in asked:
            wrong.append(f"{where}no specimen launches it (benchmarks/kernels_specimens.py)")
        elif config == asked[kernel, key].rule:
            wrong.append(f"{where}the rule chooses the same")
        elif config not in tune.candidates(asked[kernel, key]):
            wrong.append(f"{where}foci tune would not try it")
    return wrong
