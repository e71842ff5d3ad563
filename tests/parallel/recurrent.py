"""What the tests of handoff share: cases of an operator on ranks against one process, outputs and every gradient."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import foci
from foci.core.spec import Spec
from foci.ops.decay.spec import SPEC as LINEAR
from foci.ops.delta.spec import SPEC as DELTA
from foci.ops.scan.spec import SPEC as SCAN
from foci.ops.selective_scan.spec import SPEC as SELECTIVE
from foci.parallel.group import Group
from foci.parallel.handoff import handoff
from foci.parallel.operators import operator_of

SPECS = {spec.function: spec for spec in (LINEAR, DELTA, SCAN, SELECTIVE)}
CPU = torch.device("cpu")


def lengths_of(T: int, size: int, seed: int) -> list[int]:
    """T cut in `size` runs: evenly (0), or anywhere, where runs may be empty."""
    if seed == 0:
        return [T // size + (rank < T % size) for rank in range(size)]
    draw = random.Random(seed)
    borders = sorted(draw.randint(0, T) for _ in range(size - 1))
    return [stop - start for start, stop in zip([0, *borders], [*borders, T], strict=True)]


def parts_of(spec: Spec, inputs: dict[str, Any]) -> dict[str, int]:
    """The dimension of tokens of each argument that has one."""
    operator = operator_of(getattr(foci, spec.function))
    assert operator is not None
    bound = operator.operator.bind((), inputs)
    letters = operator.operator.letters
    given = {n: x for n, x in bound.call._asdict().items() if isinstance(x, Tensor)}
    return {n: dim for n, x in given.items() if (dim := letters[n].token(x)) is not None}


def answers(function: Any, inputs: dict[str, Any], names: list[str], weights: tuple[Tensor, Tensor]) -> list[Tensor]:
    leaves = {n: inputs[n].detach().clone().requires_grad_() for n in names}
    out, final = function(**inputs | leaves, return_state=True)
    gradients = torch.autograd.grad((out, final), list(leaves.values()), weights)
    return [out.detach(), final.detach(), *gradients]


def errors(function: str, dtype: torch.dtype, seed: int, cases: list[str] | None = None) -> dict[str, dict[str, float]]:
    """By case and tensor, how far this rank's answer is from one process's in float64."""
    spec, group = SPECS[function], Group.of(dist.group.WORLD)
    op = getattr(foci, function)
    found: dict[str, dict[str, float]] = {}
    for case in spec.cases:
        if cases is not None and case.name not in cases:
            continue
        inputs = case.make(dtype, CPU, 0)
        cut = parts_of(spec, inputs)
        first = next(iter(cut))
        lengths = lengths_of(inputs[first].shape[cut[first]], group.size, seed and seed + len(found))
        start = sum(lengths[: group.rank])

        def mine(name: str, x: Any, cut: dict[str, int] = cut, start: int = start, n: int = lengths[group.rank]) -> Any:
            return x.narrow(cut[name], start, n) if name in cut else x

        names = [n for n in spec.differentiable if isinstance(inputs.get(n), Tensor)]
        exact = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
        draw = torch.Generator().manual_seed(1)
        out, final = op(**exact, return_state=True)
        weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(dtype) for x in (out, final)]
        truth = answers(op, exact, names, (weights[0].double(), weights[1].double()))
        here = {n: mine(n, x) for n, x in inputs.items()}
        share = weights[0].narrow(1, start, lengths[group.rank])
        got = answers(handoff(op, group), here, names, (share, weights[1].to(final_type(dtype)) / group.size))
        truth[0] = truth[0].narrow(1, start, lengths[group.rank])
        truth[2:] = [mine(n, x) for n, x in zip(names, truth[2:], strict=True)]
        found[case.name] = {}
        for name, a, b in zip(["out", "final", *(f"d{n}" for n in names)], got, truth, strict=True):
            assert a.shape == b.shape, (case.name, name, a.shape, b.shape)
            found[case.name][name] = apart(a.double(), b) if dtype == torch.float64 else rough(a, b)
    return found


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return (a - b).abs().max().item() / max(b.abs().max().item(), 1e-3) if a.numel() else 0.0


def rough(a: Tensor, b: Tensor) -> float:
    """Relative RMS, as the error budget has it; of a run of a few tokens that are nearly zero, of at least 1e-3."""
    return (a.double() - b).norm().item() / max(b.norm().item(), 1e-3 * a.numel() ** 0.5) if a.numel() else 0.0


def final_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
