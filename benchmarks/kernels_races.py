"""Where a loop, as Triton has pipelined it, overwrites what a product on Hopper may still be reading.

A product of a warpgroup goes on behind the instruction that begins it, until a wait. Loads that run ahead of a loop
write to a buffer of several slots, one after the other. Triton counts these slots by who reads a load; where a product
reads it and something else does too, one is missing, and the next load's bytes are multiplied in place of this one's:
where a loop ends, zeros. A left operand may lie in registers, which the next round writes as well
(triton-lang/triton#9433). No test of numbers is sure to see either, as it takes a product that is later than what
overwrites it. So what was compiled is asked: some rounds of each innermost loop are gone through, and nothing may be
written that a product under way reads.
"""

from __future__ import annotations

import re
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

ROUNDS = 8  # of a loop: more than slots of a buffer, of which two rounds of each would do
_DEFINED = re.compile(r"\s*(%\w+)\S* = (\S+) ?(.*)")
_NAMES = re.compile(r"%\w+")
_SLOTS = re.compile(r"!ttg\.memdesc<((?:\d+x)+)")
_PENDING = re.compile(r"pendings = (\d+)")
_COPIES = ("ttg.async_copy_global_to_local", "ttng.async_tma_copy_global_to_local")


@dataclass(frozen=True, eq=False)
class Buffer:
    """Shared memory: what allocates it, and how many tiles it holds at once. Two of one name are two."""

    name: str
    slots: int


class Copy(NamedTuple):
    """Memory is copied, or a value stored, to the next slot of a buffer."""

    to: Buffer


class Made(NamedTuple):
    """A value, in registers or none."""

    name: str


class Product(NamedTuple):
    """A product begins, of buffers and maybe of a value on its left; and whether the code behind it goes on."""

    name: str
    of: tuple[Buffer, ...]
    left: tuple[Made, ...]
    goes_on: bool


class Wait(NamedTuple):
    """No more than `left` products are under way behind it."""

    left: int


Event = Copy | Made | Product | Wait | None


def races(ttgir: str) -> list[str]:
    """A sentence for every buffer that is overwritten too early."""
    lines = [line.split(" loc(")[0] for line in ttgir.splitlines()]
    events = list(_events(lines))
    found = [told for start, stop in _loops(lines) for told in _in_loop(events[:start], events[start + 1 : stop])]
    return list(dict.fromkeys(found))


def _events(lines: Iterable[str]) -> Iterator[Event]:
    """What each line does to buffers. A name holds in its braces, and behind them may stand for something else."""
    known: ChainMap[str, Buffer] = ChainMap()
    for line in lines:
        if line.lstrip().startswith("}"):
            known = known.parents
        yield _event(line, known)
        if line.endswith("{"):
            known = known.new_child()


def _event(line: str, known: ChainMap[str, Buffer]) -> Event:
    """The event of a line; what it defines is added to `known`: buffers, their slots and other views of them."""
    if not (made := _DEFINED.match(line)):
        return next((Copy(buffer) for copy in _COPIES if copy in line for buffer in _of(line, known)), None)
    name, operation, rest = made.groups()
    buffers = _of(rest, known)
    if operation == "ttg.local_alloc" and (shape := _SLOTS.search(line)):
        sizes, stored = shape[1].rstrip("x").split("x"), rest.startswith("%")
        known[name] = Buffer(name, 1 if stored or len(sizes) < 3 else int(sizes[0]))
        return Copy(known[name]) if stored else None
    if operation.startswith("ttg.memdesc_") and buffers:
        known[name] = buffers[0]
    if operation in _COPIES and buffers:
        return Copy(buffers[0])
    if operation == "ttng.warp_group_dot":
        operands = _NAMES.findall(rest)[:2]
        left = tuple(Made(each) for each in operands if each not in known)
        return Product(name, tuple(_of(" ".join(operands), known)), left, "isAsync = true" in rest)
    if operation == "ttng.warp_group_dot_wait" and (left := _PENDING.search(rest)):
        return Wait(int(left[1]))
    return Made(name)


def _of(text: str, known: ChainMap[str, Buffer]) -> list[Buffer]:
    return [known[name] for name in _NAMES.findall(text) if name in known]


def _loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line of every `for`, which Triton pipelines, that has no other in it."""
    begun: list[tuple[int, int]] = []
    for place, line in enumerate(lines):
        depth = len(line) - len(line.lstrip())
        if "scf.for" in line:
            begun.append((place, depth))
        elif begun and depth == begun[-1][1] and line.lstrip().startswith("}"):
            start, _ = begun.pop()
            if not any("scf.for" in inner for inner in lines[start + 1 : place]):
                yield start, place


def _in_loop(before: list[Event], body: list[Event]) -> Iterator[str]:
    ahead = Counter(event.to for event in before if isinstance(event, Copy))
    under_way: list[tuple[str, set[object]]] = []  # products, and what each reads
    for turn in range(ROUNDS):
        for event in body:
            if isinstance(event, Copy):
                slot = event.to, (turn + ahead[event.to]) % event.to.slots
                for product in _reading(slot, under_way):
                    yield f"{product} may still read {event.to.name} when the next tile is copied there"
            elif isinstance(event, Made):
                for product in _reading(event, under_way):
                    yield f"{product} may still read {event.name} when the next round makes it anew"
            elif isinstance(event, Product):
                read = {*event.left, *((buffer, turn % buffer.slots) for buffer in event.of)}
                under_way = [*under_way, (event.name, read)] if event.goes_on else []
            elif isinstance(event, Wait):
                under_way = under_way[-event.left :] if event.left else []


def _reading(what: object, under_way: list[tuple[str, set[object]]]) -> Iterator[str]:
    return (product for product, read in under_way if what in read)
