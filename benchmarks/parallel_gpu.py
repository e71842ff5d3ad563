"""Every wrapper over the GPUs of one machine against one process: errors of outputs and gradients, then times.

    PYTHONPATH=src python benchmarks/parallel_gpu.py [--out report.json] [--quick] [--tokens 32768]

Starts one rank for each GPU by itself. An error is the largest difference from float64 over one plus the value there; a
wrapper passes when its own is at most twice that of one process in the same dtype, plus two roundings of the dtype.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from arguments import above_0, file_to_write
from errors import worst
from torch import Tensor

import foci
from foci import Causal, Lengths, Packed, Window
from foci.core.device import machine
from foci.parallel import Group, positions, ring, ulysses, usp
from foci.parallel.handoff import handoff
from foci.parallel.operators import operator_of

B, T, H, G, K = 2, 203, 8, 4, 64


class Case(NamedTuple):
    """One call: the operator, its tensors by name, its other arguments."""

    name: str
    function: Callable[..., Any]
    make: Callable[[], dict[str, Tensor]]
    options: Mapping[str, Any] = MappingProxyType({})


def attention_inputs(heads: int = H, keys: int = H, bias: bool = False, sink: bool = False) -> dict[str, Tensor]:
    made = {"q": draw(B, T, heads, K), "k": draw(B, T, keys, K), "v": draw(B, T, keys, K)}
    made |= {"bias": draw(B, heads, T, T)} if bias else {}
    return made | ({"sink": draw(heads)} if sink else {})


def linear_inputs(decay: tuple[int, ...]) -> dict[str, Tensor]:
    return {"q": draw(B, T, H, K), "k": draw(B, T, H, K), "v": draw(B, T, H, K), "log_decay": -draw(*decay).abs() / 8}


def delta_inputs() -> dict[str, Tensor]:
    made = linear_inputs((B, T, H))
    return made | {"k": torch.nn.functional.normalize(made["k"], dim=-1), "beta": draw(B, T, H).sigmoid()}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float64)


def offsets() -> Tensor:
    return torch.tensor([0, 40, 41, 120, T], device="cuda")


def softmax_cases() -> list[Case]:
    attention, plain = foci.attention, attention_inputs
    return [
        Case("full", attention, plain),
        Case("causal", attention, plain, {"mask": Causal()}),
        Case("window", attention, plain, {"mask": Causal() & Window(31, 0)}),
        Case("padding", attention, plain, {"mask": Lengths(torch.tensor([T, 77], device="cuda"))}),
        Case("softcap, sink", attention, lambda: plain(sink=True), {"mask": Causal(), "softcap": 5.0}),
        Case("bias", attention, lambda: plain(bias=True)),
        Case("GQA", attention, lambda: plain(keys=G), {"mask": Causal()}),
        Case("uneven heads", attention, lambda: plain(heads=6, keys=3), {"mask": Causal()}),
        Case("lse", foci.attention_with_lse, plain, {"mask": Causal()}),
    ]


def recurrent_cases() -> list[Case]:
    return [
        Case("decay per token", foci.linear_attention, lambda: linear_inputs((B, T, H)), {"return_state": True}),
        Case("decay per channel", foci.linear_attention, lambda: linear_inputs((B, T, H, K))),
        Case("gated", foci.delta_rule, delta_inputs, {"return_state": True}),
        Case("scan", foci.scan, lambda: {"x": draw(B, T, K), "log_decay": -draw(B, T, K).abs() / 8}),
    ]


def packed_cases() -> list[Case]:
    """One row of several documents."""
    return [
        Case("packed", foci.attention, lambda: rows(attention_inputs()), {"mask": Packed(offsets()) & Causal()}),
        Case("packed", foci.linear_attention, lambda: rows(linear_inputs((B, T, H))), {"offsets": offsets()}),
    ]


def rows(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x[:1].contiguous() for name, x in inputs.items()}


def wrappers(case: Case, world: Any, mesh: Any) -> list[tuple[str, Callable[..., Any], Any, Any]]:
    """(name, wrapper round the operator, where its tokens are cut, in which order)."""
    operator = case.function
    found = [("ulysses", ulysses(operator, world), world, "plain")]
    if operator in (foci.attention, foci.attention_with_lse):
        found += [
            (f"ring {order}", ring(operator, world, order), world, order) for order in ("zigzag", "stripe", "plain")
        ]
        if mesh is not None:
            found.append(("usp", usp(operator, mesh), mesh, "zigzag"))
    else:
        found.append(("handoff", handoff(operator, world), world, "plain"))
    return found


def run(op: Any, function: Any, inputs: dict[str, Tensor], options: Mapping[str, Any], share: int) -> dict[str, Tensor]:
    """Outputs and gradients by name. What every rank has alike counts once among `share` ranks."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    torch.manual_seed(0)
    result = op(**leaves, **options)
    outputs = result if isinstance(result, tuple) else (result,)
    operator = operator_of(function)
    assert operator is not None
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for letters, output in zip(operator.operator.results, outputs, strict=False):
        if output is None:
            continue
        weight = torch.linspace(-1, 1, output.shape[-1], dtype=torch.float64, device="cuda")
        total = total + (output.double() * weight).sin().sum() / (1 if "T" in letters.names else share)
    total.backward()
    found = {f"output {place}": x.detach() for place, x in enumerate(outputs) if x is not None}
    return found | {f"gradient of {name}": x.grad for name, x in leaves.items() if x.grad is not None}


def part(function: Any, name: str, tensor: Tensor, places: Tensor) -> Tensor:
    """This rank's part of an argument or a result by name."""
    operator = operator_of(function)
    assert operator is not None
    if name.startswith("output"):
        letters = operator.operator.results[int(name.split()[1])]
    else:
        letters = operator.operator.letters[name.removeprefix("gradient of ")]
    if name.endswith("log_decay") and tensor.dim() == 3:
        return tensor.index_select(1, places)
    token = letters.token(tensor)
    return tensor if token is None else tensor.index_select(token, places)


def error(got: Tensor, expected: Tensor) -> float:
    return float(((got.double() - expected).abs() / (1 + expected.abs())).max()) if got.numel() else 0.0


def compare(case: Case, dtype: torch.dtype, world: Any, mesh: Any) -> list[dict[str, Any]]:
    """One record for each wrapper: the largest errors over ranks, and the tensor where the wrapper's is worst."""
    torch.manual_seed(1)
    inputs = {name: x.to(dtype) for name, x in case.make().items()}
    exact = {name: x.double() for name, x in inputs.items()}
    truth = run(case.function, case.function, exact, case.options, 1)
    single = run(case.function, case.function, inputs, case.options, 1)
    records = []
    for name, op, where, order in wrappers(case, world, mesh):
        record = {"operator": case.function.__name__, "case": case.name, "wrapper": name, "dtype": str(dtype)[6:]}
        places = positions(T, where, order).cuda()
        mine = {key: part(case.function, key, x, places) for key, x in inputs.items()}
        try:
            got = run(op, case.function, mine, case.options, dist.get_world_size())
        except Exception:
            records.append(record | {"passes": False, "raised": traceback.format_exc()})
            continue
        errors = {}
        for key in truth.keys() | got.keys():
            errors[key] = (math.inf, 0.0, 1.0)  # where only one of them gives it
            if key in truth and key in got:
                one = error(single[key], truth[key])
                expected = part(case.function, key, truth[key], places)
                errors[key] = (error(got[key], expected), one, 2 * one + 2 * torch.finfo(dtype).eps)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, errors)
        ratio, where_worst, rank = max(
            (worst(each[key][0] / each[key][2]), key, rank) for rank, each in enumerate(everyone) for key in each
        )
        found, one, _ = everyone[rank][where_worst]
        records.append(
            record | {"passes": ratio <= 1, "worst": where_worst, "rank": rank, "error": found, "one process": one}
        )
    return records


def clock(op: Callable[..., Any], leaves: list[Tensor], options: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """Medians in milliseconds, of the forward and of forward and backward, and the most memory beyond the inputs."""
    taken: dict[str, list[float]] = {"forward": [], "both": []}
    for round_ in range(rounds + 2):
        for x in leaves:
            x.grad = None
        dist.barrier()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        result = op(*leaves, **options)
        out = result[0] if isinstance(result, tuple) else result
        events[1].record()
        out.backward(torch.ones_like(out))
        events[2].record()
        torch.cuda.synchronize()
        del result, out  # else the next round would have them in memory before it begins
        if round_ >= 2:
            taken["forward"].append(events[0].elapsed_time(events[1]))
            taken["both"].append(events[0].elapsed_time(events[2]))
    peak = torch.cuda.max_memory_allocated() - before
    return {name: statistics.median(times) for name, times in taken.items()} | {"peak MB": peak / 1e6}


def times(tokens: int, world: Any, mesh: Any, rounds: int) -> list[dict[str, Any]]:
    """Causal attention in bfloat16, and gated linear attention: one GPU with everything, then every wrapper."""
    records = []
    for function, heads, options in (
        (foci.attention, 16, {"mask": Causal()}),
        (foci.attention, 16, {}),
        (foci.linear_attention, 16, {}),
    ):
        case = Case("", function, dict, options)
        group = Group.of(world)
        ways: list[tuple[str, Any, Any, Any]] = [("one GPU", function, None, None), *wrappers(case, group, mesh)]
        for name, op, where, order in ways:
            mine = tokens if where is None else len(positions(tokens, where, order))
            leaves = [torch.randn(1, mine, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
            sent = group.traffic.bytes
            found = clock(op, [x.requires_grad_() for x in leaves], options, rounds)
            found["sent MB"] = (group.traffic.bytes - sent) / (rounds + 2) / 1e6 if where is group else float("nan")
            label = f"{function.__name__}{' causal' if options else ''}"
            records.append({"operator": label, "wrapper": name, "tokens": tokens, **found})
    return records


def rank_main(rank: int, size: int, port: int, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    where = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=120)
    dist.init_process_group(options.backend, init_method=where, rank=rank, world_size=size, timeout=limit)
    mesh = None
    if size % 2 == 0 and size > 2:
        mesh = dist.init_device_mesh("cuda", (2, size // 2), mesh_dim_names=("ulysses", "ring"))
    records = []
    cases = [*softmax_cases(), *recurrent_cases(), *packed_cases()]
    for case in cases[:2] if options.quick else cases:
        for dtype in (torch.float32, torch.bfloat16):
            found = compare(case, dtype, dist.group.WORLD, mesh)
            records += found
            if rank == 0:
                for each in found:
                    print(line(each), flush=True)
    timed = times(options.tokens, dist.group.WORLD, mesh, 3 if options.quick else 7)
    if rank == 0:
        for each in timed:
            values = ", ".join(
                f"{key} {each[key]:.2f}" for key in ("forward", "both", "peak MB", "sent MB") if key in each
            )
            print(f"{each['operator']:<24}{each['wrapper']:<14}{each['tokens']} tokens: {values}", flush=True)
        failed = [each for each in records if not each["passes"]]
        print(f"\n{len(records)} comparisons over {size} GPUs ({options.backend}), {len(failed)} beyond their budget")
        if options.out:
            report = {"machine": machine().as_dict(), "backend": options.backend, "errors": records, "times": timed}
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    if not all(each["passes"] for each in records):
        sys.exit(1)


def line(each: dict[str, Any]) -> str:
    head = f"{each['operator']:<20}{each['case']:<18}{each['wrapper']:<12}{each['dtype']:<9} "
    if "raised" in each:
        return f"FAIL {head} raised\n{each['raised']}"
    return (
        f"{'ok  ' if each['passes'] else 'FAIL'} {head} error "
        f"{each['error']:.1e} (one process {each['one process']:.1e}) in {each['worst']} on rank {each['rank']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu:gloo,cuda:nccl")
    parser.add_argument("--tokens", type=above_0, default=32768)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=file_to_write)
    options = parser.parse_args()
    size = torch.cuda.device_count()
    if size < 2:
        sys.exit(f"parallel_gpu: needs two GPUs or more on this machine, found {size}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    print(machine().line)
    torch.multiprocessing.spawn(rank_main, (size, port, options), nprocs=size)


if __name__ == "__main__":
    main()
