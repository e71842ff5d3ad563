"""The forecast of plan_parallel against what this machine does: gloo ranks on the cores there are, split by split.

    python benchmarks/parallel_cpu.py [--worlds 2,4] [--rounds 5] [--tokens 2048] [--out FILE.json]
    torchrun --nproc-per-node 4 benchmarks/parallel_cpu.py --cuda       # the same under NCCL, a rank a GPU

Links and compute are measured first, on the same ranks; nothing is fitted to the times of the wrappers. Each line has
the forecast, the median of the slowest rank's times with its middle half, and the bytes that the busiest rank sent.
Ranks that share cores disturb each other, so the spread says how much a ratio is worth.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from arguments import above_0, file_to_write

from foci.bench.measure import clock
from foci.core.device import machine
from foci.core.world import World
from foci.parallel.forecast import Forecast, forecast, plan_parallel, time
from foci.parallel.group import Group
from foci.parallel.handoff import handoff
from foci.parallel.links import Compute, Links
from foci.parallel.measure import measure_compute, measure_links
from foci.parallel.ring import ring
from foci.parallel.split import Split, splits
from foci.parallel.ulysses import ulysses
from foci.parallel.wire_bytes import tokens
from foci.parallel.workload import Shape

SIZES = {"H": 8, "K": 64, "dtype": torch.float32}
GPU = {"H": 32, "K": 128, "G": 8, "dtype": torch.bfloat16}


def cases(count: int, cuda: bool) -> list[Shape]:
    """Two of softmax, two recurrences; forward and backward."""
    sizes: dict[str, Any] = {**(GPU if cuda else SIZES), "backward": True}
    long = count * 8  # as much work for a recurrence as for softmax
    found = [Shape(count, causal=causal, **sizes) for causal in (False, True)]
    if not cuda:
        found += [Shape(long, operator=name, **sizes) for name in ("linear_attention", "delta_rule")]
    return found


def of_interest(shape: Shape, world: int) -> list[Split]:
    """Every split, the ring's orders where they differ, one of the two ways to place the ranks of one node."""
    return [each for each in splits(shape, world) if each.inner == "ulysses"]


def measure(shape: Shape, device: str, rounds: int) -> tuple[Links, Compute]:
    group = Group.of(dist.group.WORLD)
    size = 2**26 if device == "cuda" else 2**21
    links = measure_links(group, device=device, size=size, rounds=rounds)
    probe = shape.T // group.size  # a block of the size that the ring has, and tokens as Ulysses has
    return links, measure_compute(shape, group, device=device, tokens=probe, rounds=rounds)


def run(shape: Shape, split: Split, device: str, rounds: int) -> tuple[list[float], int]:
    """Seconds of every round, the slowest rank's, and the bytes that the busiest rank sent in one."""
    mesh = split.mesh(device)
    everyone, outer, inner = (Group.of(each) for each in (dist.group.WORLD, mesh["ulysses"], mesh["ring"]))
    op: Any = shape.function.function
    if split.ring > 1:
        op = handoff(op, inner) if split.handoff else ring(op, inner, split.order)
    if split.ulysses > 1:
        op = ulysses(op, outer)
    here = tokens(shape.T, split)[inner.rank][outer.rank]
    tensors, options = shape.only(T=here).inputs(device)
    inputs = [*tensors, *(each for each in options.values() if isinstance(each, torch.Tensor))]
    for each in inputs:
        each.requires_grad_()

    def once() -> None:
        found = op(*tensors, **options)
        found = found if isinstance(found, torch.Tensor) else found[0]
        torch.autograd.grad(found, inputs, torch.ones_like(found))

    once()
    before = outer.traffic.bytes + inner.traffic.bytes
    once()
    sent = outer.traffic.bytes + inner.traffic.bytes - before
    taken = []
    for _ in range(rounds):
        everyone.agree("benchmark", {})
        taken.append(max(row[0] for row in everyone.agree("benchmark", {}, [round(clock(once) * 1e9)])) / 1e9)
    return taken, max(row[0] for row in everyone.agree("benchmark", {}, [sent]))


def report(shape: Shape, split: Split, told: Forecast, taken: list[float], sent: int) -> dict[str, Any]:
    taken = sorted(taken)
    last = len(taken) - 1
    low, high = taken[round(last * 0.25)], taken[round(last * 0.75)]
    middle = median(taken)
    counted = f"{told.sent / sent:.3f}" if sent else "1.000" if not told.sent else "nothing counted"
    print(
        f"| {shape} | {split} | {time(told.seconds)} | {time(middle)} ({time(low)} .. {time(high)}) | "
        f"{told.seconds / middle:.2f} | {counted} |",
        flush=True,
    )
    return {
        "shape": str(shape), "split": str(split), "forecast": told.seconds, "terms": told.terms, "measured": middle,
        "low": low, "high": high, "sent": sent, "sent forecast": told.sent,
    }  # fmt: skip


def head() -> None:
    print("| work | split | forecast | measured (middle half) | forecast / measured | bytes, formula / counted |")
    print("|---|---|---|---|---|---|")


def on_gpus(options: argparse.Namespace) -> list[dict[str, Any]]:
    rank = int(dist.get_rank())
    torch.cuda.set_device(rank % torch.cuda.device_count())
    size, records = dist.get_world_size(), []
    for shape in cases(options.tokens, cuda=True):
        links, compute = measure(shape, "cuda", options.rounds)
        if rank == 0:
            print(f"\n{size} ranks: {links}\n{compute}\n")
            head()
        for split in of_interest(shape, size):
            taken, sent = run(shape, split, "cuda", options.rounds)
            if rank == 0:
                records.append(report(shape, split, forecast(shape, split, links, compute), taken, sent))
        if rank == 0:
            print(f"\n{plan_parallel(shape, size, links, compute)}\n")
    return records


def on_cpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"{machine().line}\n{machine().cores} cores, a thread a rank, {options.rounds} rounds")
    records = []
    for size in options.worlds:
        with World(size, timeout=120, limit=600, preload=("foci.parallel",)) as world:
            for place, shape in enumerate(cases(options.tokens, cuda=False)):
                links, compute = world.run(measure, shape, "cpu", options.rounds)[0]
                if place == 0:
                    print(f"\n{size} ranks: {replace(links, source='')}\n")
                    head()
                for split in of_interest(shape, size):
                    taken, sent = world.run(run, shape, split, "cpu", options.rounds)[0]
                    records.append(report(shape, split, forecast(shape, split, links, compute), taken, sent))
                    records[-1]["compute"] = str(compute)
    return records


def _sizes(text: str) -> tuple[int, ...]:
    """Numbers of ranks, for argparse."""
    sizes = tuple(int(word) if word.isdecimal() else 0 for word in text.split(","))
    if min(sizes) < 2:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers of ranks, 2 or more, joined by commas")
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=_sizes, default=(2, 4), help="joined by commas")
    parser.add_argument("--rounds", type=above_0, default=5)
    parser.add_argument("--tokens", type=above_0, default=2048)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--out", type=file_to_write)
    options = parser.parse_args()
    if options.cuda:
        dist.init_process_group("nccl")
        records = on_gpus(options)
        dist.destroy_process_group()
    else:
        records = on_cpu(options)
    if records:
        ratios = sorted(each["forecast"] / each["measured"] for each in records)
        near = sum(1 / 1.3 <= ratio <= 1.3 for ratio in ratios)
        print(f"\n{len(ratios)} rows: median forecast / measured {median(ratios):.2f}, {near} within a factor of 1.3")
        if options.out:
            options.out.write_text(json.dumps({"machine": machine().as_dict(), "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
