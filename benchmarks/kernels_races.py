"""Where a kernel, as Triton has compiled it for Hopper, overwrites what a product may still be reading.

A product of a warpgroup goes on behind the instruction that begins it, until a wait. Loads that run ahead of a loop
write to a buffer of several slots, one after the other. Triton counts these slots by who reads a load; where a product
reads it and something else does too, one is missing, and the next load's bytes are multiplied in place of this one's:
where a loop ends, zeros. A left operand may lie in registers, which the next round writes as well
(triton-lang/triton#9433). No test of numbers is sure to see either, as it takes a product that is later than what
overwrites it. So what was compiled is walked through as a GPU does: indices are computed, loops within loops too. What
nothing known decides, whether a loop has a round and which branch is taken, is left to chance, some walks long. Nothing
may be written on the way that a product under way reads. Parts of a program that run beside each other are walked one
by one.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

MOST = 12  # rounds of a loop: more than slots of a buffer, as Triton makes them
WALKS = 8  # through a kernel, which differ in the branches that they take
_LOCATION = re.compile(r' loc\((?:"[^"]*"|[^()"]|\((?:"[^"]*"|[^()"]|\([^()]*\))*\))*\)')
_NAME = re.compile(r"%[\w.$-]+(?:#\d+)?")
_RESULT = re.compile(r"(%[\w.$-]+)(?::(\d+))? = (.*)")
_CARRIED = re.compile(r"(%[\w.$-]+) = (%[\w.$-]+(?:#\d+)?)")
_SHAPE = re.compile(r"-> !ttg\.memdesc<((?:\d+x)+)")
_PENDING = re.compile(r"pendings = (\d+)")
_TMA = ("ttng.async_tma_copy_global_to_local", "ttng.async_tma_gather")  # MAP[PLACE] TILE, BARRIER, ..
_WRITTEN = {"ttg.async_copy_global_to_local": 1, "ttg.local_store": 1, "ttg.local_scatter": 0, "ttg.local_dealloc": 0}
_VIEWS = ("ttg.memdesc_index", "ttg.memdesc_trans", "ttg.memdesc_subslice", "ttg.memdesc_reshape",
          "ttg.memdesc_reinterpret")  # fmt: skip
_SAME = ("extsi", "extui", "trunci", "index_cast")
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "addi": operator.add, "subi": operator.sub, "muli": operator.mul, "andi": operator.and_, "xori": operator.xor,
    "ori": operator.or_, "shli": operator.lshift, "shrsi": operator.rshift, "minsi": min, "maxsi": max,
    "divsi": lambda a, b: int(a / b), "remsi": lambda a, b: a - b * int(a / b), "remui": lambda a, b: a % b,
}  # fmt: skip
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge
}  # fmt: skip
_UNSIGNED = 2**64 - 1


@dataclass(eq=False)
class Line:
    """One operation, and the blocks in its braces."""

    text: str
    blocks: list[list[Line]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Buffer:
    """Shared memory: what allocates it, and how many tiles it holds at once. Two of one name are two."""

    name: str
    slots: int


class Tile(NamedTuple):
    """A tile in shared memory. Of which slot, may be unknown: then it may be any."""

    of: Buffer
    slot: int | None

    def overlaps(self, other: Tile) -> bool:
        return self.of is other.of and (self.slot == other.slot or None in (self.slot, other.slot))


class Product(NamedTuple):
    """A product under way: the tiles that it reads, and names of what it reads from registers."""

    name: str
    tiles: list[Tile]
    registers: list[str]


Value = int | Tile | None  # what a name stands for, as far as that is known


def races(ttgir: str) -> list[str]:
    """A sentence for everything that is overwritten too early, or of which that could not be found out."""
    program = _lines(ttgir)
    found: dict[str, None] = {}
    for walk in range(WALKS):
        Walk(random.Random(walk), found).through(program)
    return list(found)


def _lines(ttgir: str) -> list[Line]:
    program: list[Line] = []
    blocks = [program]
    for text in (_LOCATION.sub("", line).strip() for line in ttgir.splitlines()):
        if text.startswith("}"):
            blocks.pop()
        elif text:
            blocks[-1].append(Line(text))
        if text.endswith("{"):
            last = blocks[-1][-1]  # behind `} else {` as well
            last.blocks.append([])
            blocks.append(last.blocks[-1])
    return program


class Walk:
    """One way through a kernel: what is known of names, and which products are under way."""

    def __init__(self, chance: random.Random, found: dict[str, None]) -> None:
        self.chance, self.found = chance, found
        self.known: dict[str, Value] = {}
        self.buffers: dict[Line, Buffer] = {}  # of each allocation, also where a loop comes by again
        self.under_way: list[Product] = []
        self.handed: list[str] = []  # to parts of a program that run beside each other

    def through(self, block: Iterable[Line]) -> list[str]:
        """All of a block; the names that it gives to what it is in."""
        given: list[str] = []
        for line in block:
            result = _RESULT.match(line.text)
            results = _results(result) if result else []
            called, _, rest = (result[3] if result else line.text).partition(" ")
            if called == "scf.yield" or called.startswith("scf.condition("):
                given = _NAME.findall(rest.partition(" :")[0])
            elif called in ("scf.for", "scf.while"):
                self._loop(called, rest, line.blocks, results)
            elif called == "scf.if":
                self._branch(rest, line.blocks, results)
            elif called.startswith(("ttg.warp_specialize(", "default", "partition")):
                self._beside(line, called, rest)
            else:
                for inner in line.blocks:
                    self.through(inner)
                self._operation(line, called, rest, results)
        return given

    def _loop(self, called: str, rest: str, blocks: list[list[Line]], results: list[str]) -> None:
        head = rest.partition(" ->")[0]
        carried = [name for name, _ in _CARRIED.findall(head)]
        values = [self.known.get(begins) for _, begins in _CARRIED.findall(head)]
        counter, start, step, rounds = "", None, None, self._rounds()
        if called == "scf.for":  # COUNTER = START to STOP step STEP
            (counter, *carried), (_, *values) = carried, values
            start, stop, step = (self.known.get(name) for name in _NAME.findall(head)[1:4])
            if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int) and step:
                rounds = min(MOST, max(0, -(-(stop - start) // step)))
        self._are(carried, values)
        for turn in range(rounds):
            if counter:
                self._is(counter, start + turn * step if isinstance(start, int) and isinstance(step, int) else None)
            for block in blocks:
                if block and block[0].text.startswith("^"):  # of `while`: what its condition hands on
                    self._are(_NAME.findall(block[0].text), values)
                given = self.through(block)
                values = [self.known.get(name) for name in given]
            changed = [place for place, (name, new) in enumerate(zip(carried, given, strict=False)) if name != new]
            self._are([carried[place] for place in changed], [values[place] for place in changed])
        self._are(results, [self.known.get(name) for name in carried])

    def _rounds(self) -> int:
        """Of a loop whose end is not known: none, now and then, else more than any buffer has slots."""
        slots = max((buffer.slots for buffer in self.buffers.values()), default=1)
        return self.chance.choice((0, *(min(slots + 3, MOST),) * 3))

    def _branch(self, rest: str, blocks: list[list[Line]], results: list[str]) -> None:
        condition = _NAME.findall(rest)[0]
        decided = self.known.get(condition)
        taken = int(decided if isinstance(decided, int) else self.chance.random() < 0.5)
        self.known[condition] = taken
        given = self.through(blocks[0] if taken else blocks[1] if len(blocks) > 1 else [])
        self._are(results, [self.known.get(name) for name in given])

    def _beside(self, line: Line, called: str, rest: str) -> None:
        """A part of a program that others run beside: it has products of its own, and names that no other sees."""
        if called.startswith("ttg.warp_specialize"):
            self.handed = _NAME.findall(f"{called} {rest}".partition(")")[0])
            return
        part = Walk(self.chance, self.found)
        part.known, part.buffers = dict(self.known), self.buffers
        named = _NAME.findall(line.text) if line.text.startswith("partition") else []
        part.known.update({name: self.known.get(given) for name, given in zip(named, self.handed, strict=False)})
        for block in line.blocks:
            part.through(block)

    def _operation(self, line: Line, called: str, rest: str, results: list[str]) -> None:
        names = _NAME.findall(rest)
        values = [self.known.get(name) for name in names]
        if called == "ttng.warp_group_dot":
            self._product(results[0], rest, names[:2])
        elif called == "ttng.warp_group_dot_wait" and (left := _PENDING.search(rest)):
            self.under_way = self.under_way[-int(left[1]) :] if int(left[1]) else []
            self._are(results, values)
        elif called in _WRITTEN or called in _TMA:
            place = _NAME.findall(rest.partition("]")[2])[0] if called in _TMA else names[_WRITTEN[called]]
            self._written(self.known.get(place), place, whole=called == "ttg.local_dealloc")
        elif called == "ttg.local_alloc":
            tile = self._allocated(line, results[0], stored=rest.startswith("%"))
            self._is(results[0], tile)
            if rest.startswith("%"):
                self._written(tile, results[0])
        else:
            value = _computed(called, rest, values) if results else None
            if called == "arith.select" and not isinstance(values[0], int):
                value = self.chance.choice(values[1:3])
            self._are(results, [value] * len(results))

    def _allocated(self, line: Line, name: str, stored: bool) -> Tile:
        if line not in self.buffers:
            shape = _SHAPE.search(line.text)
            sizes = shape[1].rstrip("x").split("x") if shape else []
            self.buffers[line] = Buffer(name, 1 if stored or len(sizes) < 3 else int(sizes[0]))
        buffer = self.buffers[line]
        return Tile(buffer, 0 if buffer.slots == 1 else None)

    def _product(self, name: str, rest: str, operands: list[str]) -> None:
        kinds = rest.rpartition(" : ")[2].partition(" -> ")[0].split(" * ")
        of: list[Tile] = []
        registers: list[str] = []
        for operand, kind in zip_longest(operands, kinds[:2], fillvalue=""):
            tile = self.known.get(operand)
            if isinstance(tile, Tile):
                of.append(tile)
            elif kind.startswith("tensor"):
                registers.append(operand)
            else:
                self.found[f"{name} reads {operand}, of which it is not known where it lies"] = None
        self._is(name, None)
        self.under_way = [*self.under_way, Product(name, of, registers)] if "isAsync = true" in rest else []

    def _written(self, tile: Value, place: str, whole: bool = False) -> None:
        """What lies at a place, or all of its buffer, is overwritten."""
        for product in self.under_way:
            if not isinstance(tile, Tile):
                self.found[f"{product.name} may still read {place}, of which it is not known where it lies"] = None
            elif any(map((Tile(tile.of, None) if whole else tile).overlaps, product.tiles)):
                self.found[f"{product.name} may still read {tile.of.name} when other bytes are written there"] = None

    def _are(self, names: Iterable[str], values: Iterable[Value]) -> None:
        for name, value in zip(names, values, strict=False):
            self._is(name, value)

    def _is(self, name: str, value: Value) -> None:
        """A name stands for this from here on; registers that had what it stood for before are written."""
        self.known[name] = value
        for product in self.under_way:
            if name in product.registers:
                self.found[f"{product.name} may still read {name} when it is made anew"] = None


def _results(found: re.Match[str]) -> list[str]:
    """The names of what an operation gives: %a, or of several %a#0 and so on."""
    return [f"{found[1]}#{place}" for place in range(int(found[2]))] if found[2] else [found[1]]


def _computed(called: str, rest: str, values: list[Value]) -> Value:
    """What is known of a number, or a tile's place."""
    kind, _, name = called.partition(".")
    with suppress(TypeError, KeyError, ValueError, ZeroDivisionError, IndexError):  # not known, or of no interest
        if called == "arith.constant":
            word = rest.partition(" ")[0]
            return {"true": 1, "false": 0}[word] if word in ("true", "false") else _number(word)
        if called in _VIEWS:
            return _viewed(called, values)
        if called == "arith.cmpi":
            how, numbers = rest.partition(",")[0], [value for value in values[:2] if isinstance(value, int)]
            if how.startswith("u"):
                numbers = [number & _UNSIGNED for number in numbers]
            return int(_COMPARED[how.lstrip("su")](*numbers))
        if called == "arith.select":
            return values[1 if values[0] else 2]
        if name in _SAME:
            return values[0]
        if kind == "arith":
            return _ARITHMETIC[name](*values[:2])  # type: ignore[arg-type]
    return None


def _number(word: str) -> int | None:
    return int(word) if re.fullmatch(r"-?\d+", word) else None


def _viewed(called: str, values: list[Value]) -> Value:
    tile = values[0]
    if called == "ttg.memdesc_index" and isinstance(tile, Tile) and tile.of.slots > 1:
        return Tile(tile.of, values[1] if isinstance(values[1], int) else None)
    return tile
