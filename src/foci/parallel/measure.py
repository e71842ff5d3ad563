"""Measure Links and Compute on the ranks of a group, all working at the same time; the slowest rank counts."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from platform import node as host_name
from statistics import median
from typing import Any

import torch

from foci.bench.measure import clock
from foci.core.device import machine
from foci.merge.partial import Partial
from foci.parallel.exchange import Session, all_to_all, shift
from foci.parallel.group import Group
from foci.parallel.links import Compute, Link, Links
from foci.parallel.workload import Shape

SIDE = 1024  # of the square matrices whose product stands for a model's other matmuls
REPEATS = 4  # calls timed together, so that a device's queue is full
Kind = Callable[[Group, torch.device, int], Callable[[], object]]
_LARGEST = 2**30  # bytes of a message
_SHORTEST = 1e-9  # a difference of two times is at least this, so that a rate stays finite


def measure_links(
    group: Any, *, node: Any = None, device: str | torch.device = "cpu", size: int = 2**23, rounds: int = 7
) -> Links:
    """Links between the ranks of a group, all of which must call this; the result is for `plan_parallel`.

    A message of 4 bytes gives the latency, one of `size` bytes, or as many times 4 as outlast it, the bandwidth: all
    ranks to their neighbour at once, and all ranks to all. Then the large message while a product runs that takes as
    long, for the overlap. `node`: the group of the ranks that share this rank's host, where the ranks of `group` are on
    several; ranks of a node must be neighbours and nodes equally large. A time is the slowest rank's, and the median of
    `rounds`. Raises ValueError for a group of one rank, and for ranks on several hosts without `node`.
    """
    group, device = Group.of(group), torch.device(device)
    if group.size == 1:
        raise ValueError("measure_links: group must have two ranks at least, got one: nothing lies between")
    near = group if node is None else Group.of(node)
    hosts = [host for (host,) in group.agree("measure_links", {"size": size}, [zlib.crc32(host_name().encode())])]
    if node is None and len(set(hosts)) > 1:
        raise ValueError(f"measure_links: node must be given, the ranks are on {len(set(hosts))} hosts")
    inside = None
    if near.size > 1:
        inside = _link(near, _shifting, device, size, rounds), _link(near, _swapping, device, size, rounds)
    overlap = _overlap(near if near.size > 1 else group, device, size, rounds)
    far = _link(group, _swapping, device, size, rounds) if near.size < group.size else None
    if inside is None:  # every rank has a node of its own
        assert far is not None
        inside = far, far
    kind = machine().line if device.type == "cpu" else torch.cuda.get_device_name(device)
    source = f"measured between {group.size} ranks: {kind}"
    agree = _seconds(group, lambda: group.agree("measure_links", {}), rounds)
    return Links(*inside, near.size if far else None, far, overlap=overlap, agree=agree, source=source)


def measure_compute(
    shape: Shape, group: Any = None, *, device: str | torch.device = "cpu", tokens: int = 1024, rounds: int = 5
) -> Compute:
    """Compute of one rank for this shape's operator, heads and dtype, on min(T, `tokens`) tokens without a mask.

    With a `group` all its ranks must call this, and are timed at the same time: ranks that share cores are as slow as
    they will be. Without one, this process alone. A time is the slowest rank's, and the median of `rounds`.
    """
    group, device = None if group is None else Group.of(group), torch.device(device)
    count = min(shape.T, tokens)
    probe = replace(shape, causal=False, window=None).only(T=count, B=1)
    small = probe.only(T=1)
    function = shape.function.function

    def timed(run: Callable[[], object]) -> float:
        return _seconds(group, lambda: [run() for _ in range(REPEATS)], rounds) / REPEATS

    def calling(of: Shape) -> Callable[[], object]:
        tensors, keywords = of.inputs(device)
        return lambda: function(*tensors, **keywords)

    with torch.no_grad():
        call, whole = timed(calling(small)), timed(calling(probe))  # a GPU's queue hides the one behind the other
        a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.float32).to(shape.dtype) for _ in range(2))
        dense = timed(lambda: a @ b)
        out = torch.randn(1, count, shape.H, shape.values, device=device)
        part = Partial(out, out[..., 0].contiguous())
        stream = timed(lambda: part.combine(part))
    tensors, keywords = probe.inputs(device)
    for each in tensors:
        each.requires_grad_()

    def both() -> object:
        found = function(*tensors, **keywords)
        found = found if isinstance(found, torch.Tensor) else found[0]
        return torch.autograd.grad(found, tensors, torch.ones_like(found))

    back = timed(both)
    return Compute(
        rate=probe.flops / whole,
        dense=2 * SIDE**3 / dense,
        stream=3 * out.numel() * out.element_size() / stream,
        memory=_memory(group, device),
        backward=max((back - whole) / whole, 0.1),
        call=call,
        source=f"measured on {1 if group is None else group.size} ranks at once, {probe}",
    )


def _link(group: Group, kind: Kind, device: torch.device, size: int, rounds: int) -> Link:
    latency = _seconds(group, kind(group, device, 4), rounds) / REPEATS
    while True:
        whole = _seconds(group, kind(group, device, size), rounds) / REPEATS
        if whole > 4 * latency or size >= _LARGEST:  # every rank has the same times, and stops at the same size
            return Link(latency, size / max(whole - latency, _SHORTEST))
        size *= 4


def _shifting(group: Group, device: torch.device, size: int) -> Callable[[], object]:
    block = torch.zeros(max(1, size // 4), device=device)

    def run() -> None:
        with Session(group, "measure_links") as session:
            for _ in range(REPEATS):
                shift([block], [block.shape], 1, session).wait()

    return run


def _swapping(group: Group, device: torch.device, size: int) -> Callable[[], object]:
    part = torch.zeros(max(1, size // 4 // (group.size - 1)), device=device)

    def run() -> None:
        with Session(group, "measure_links") as session:
            for _ in range(REPEATS):
                all_to_all([part] * group.size, [part.shape] * group.size, session)

    return run


def _overlap(group: Group, device: torch.device, size: int, rounds: int) -> float:
    """The share of a transfer that a matmul of the same duration hides."""
    block, a = torch.zeros(size // 4, device=device), torch.randn(256, 256, device=device)
    transfer = _seconds(group, _shifting(group, device, size), rounds)
    once = _seconds(group, lambda: [a @ a for _ in range(8)], rounds) / 8
    products = group.agree("measure_links", {}, [max(1, round(transfer / REPEATS / once))])[0][0]
    alone = _seconds(group, lambda: [a @ a for _ in range(products * REPEATS)], rounds)

    def both() -> None:
        with Session(group, "measure_links") as session:
            for _ in range(REPEATS):
                pending = shift([block], [block.shape], 1, session)
                for _ in range(products):
                    a @ a
                pending.wait()

    together = _seconds(group, both, rounds)
    return min(1.0, max(0.0, (alone + transfer - together) / min(alone, transfer)))


def _seconds(group: Group | None, run: Callable[[], object], rounds: int) -> float:
    """The median over rounds of the slowest rank's seconds; all begin together, after one untimed run."""
    run()
    taken = []
    for _ in range(rounds):
        if group is not None:
            group.agree("measure", {})
        seconds = clock(run)
        if group is not None:
            seconds = max(each[0] for each in group.agree("measure", {}, [round(seconds * 1e9)])) / 1e9
        taken.append(seconds)
    return median(taken)


def _memory(group: Group | None, device: torch.device) -> float:
    """Bytes of one rank: a GPU's own, or an even part of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return machine().memory / (1 if group is None else group.size)
