"""Every wrapper x every case x worlds against one process; the full product is `python -m tests.parallel.matrix`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import foci
from foci.core.world import World
from foci.parallel.balance import Order, Piece, cut, length, pieces
from foci.parallel.handoff import handoff
from foci.parallel.joint import joint
from foci.parallel.ring import ring
from foci.parallel.ulysses import ulysses, usp
from tests.parallel.proof import known, mask_of, taken

BUDGET = 1e-10  # relative to the largest number of a tensor, in float64
FLAT = "attention_with_lse"
Held = list[dict[str, list[int]]]


@dataclass(frozen=True)
class Case:
    """One problem: tensors by name (`dense` is a mask's), the other arguments, and which column of the table it is."""

    name: str
    function: str = FLAT
    sizes: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    text: int = 0  # so many of the tokens are text: a joint case

    def size(self, letter: str) -> int:
        sizes = {"B": 2, "T": 24, "H": 4, "K": 8, "D": 6, "1": 1} | self.sizes
        own = {"S": sizes["T"], "G": sizes["H"], "V": sizes["K"], "N": sizes["B"]}
        return (own | sizes)[letter]

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Drawn from the name, the same on every rank."""
        draw = torch.Generator().manual_seed(sum(map(ord, self.name)))
        found = {}
        for name, letters in (_SHAPES[self.function] | self.tensors).items():
            x = torch.randn([self.size(letter) for letter in letters], generator=draw, dtype=torch.float64)
            if name == "dense":
                found[name] = x > -1
                if x.shape[-2] > 1:
                    found[name][..., 1, :] = False  # a row that sees nothing
                continue
            x = -x.abs() if name in ("log_decay", "A") else x.sigmoid() if name in ("beta", "dt") else x
            found[name] = (x / x.norm(dim=-1, keepdim=True) if self.function == "delta_rule" and name == "k" else x).to(
                dtype
            )
        return found


_SHAPES: dict[str, dict[str, tuple[str, ...]]] = {
    FLAT: {"q": ("B", "T", "H", "K"), "k": ("B", "S", "G", "K"), "v": ("B", "S", "G", "V")},
    "linear_attention": {"q": ("B", "T", "G", "K"), "k": ("B", "T", "G", "K"), "v": ("B", "T", "H", "V")},
    "delta_rule": {
        "q": ("B", "T", "G", "K"), "k": ("B", "T", "G", "K"), "v": ("B", "T", "H", "V"), "beta": ("B", "T", "H"),
    },
    "scan": {"x": ("B", "T", "D"), "log_decay": ("B", "T", "D")},
    "selective_scan": {
        "x": ("B", "T", "D"), "dt": ("B", "T", "D"), "A": ("D", "K"), "B": ("B", "T", "K"), "C": ("B", "T", "K"),
    },
}  # fmt: skip
_CAUSAL = {"mask": {"Causal": ()}}
_PAIRS = ("B", "H", "T", "S")

CASES = (
    Case("full"),
    Case("causal", options=_CAUSAL),
    Case("window", options={"mask": {"Window": (5, 2)}}),
    Case("causal window", options={"mask": {"Causal": (), "Window": (6, None)}}),
    Case("padding", options={"mask": {"Lengths": ([17, 24],), "Causal": ()}}),
    Case("padded queries", options={"mask": {"Lengths": ([17, 0], [11, 24])}}),
    Case("packed", sizes={"B": 1}, options={"mask": {"Packed": ([0, 5, 5, 17, 18, 23],), "Causal": ()}}),
    Case("packed cross", sizes={"B": 1, "S": 19}, options={"mask": {"Packed": ([0, 7, 9, 24], [0, 9, 9, 18])}}),
    Case("cross", sizes={"S": 17}, options=_CAUSAL),
    Case("cross, top-left", sizes={"T": 9, "S": 22}, options={"mask": {"Causal": ("top-left",)}}),
    Case("bias", tensors={"bias": _PAIRS}, options=_CAUSAL),
    Case("bias of keys", tensors={"bias": ("B", "1", "1", "S")}),
    Case("bias of rows", tensors={"bias": ("H", "T", "1")}),
    Case("dense", tensors={"dense": ("B", "1", "T", "S")}),
    Case("softcap", options={"softcap": 1.5} | _CAUSAL),
    Case("sink", tensors={"sink": ("H",)}, options={"mask": {"Lengths": ([0, 24],), "Causal": ()}}),
    Case("GQA", sizes={"H": 6, "G": 2}, options=_CAUSAL),
    Case("one key head", sizes={"H": 8, "G": 1}, options=_CAUSAL),
    Case("value width", sizes={"K": 7, "V": 5}),
    Case("uneven length", sizes={"T": 29}, options=_CAUSAL),
    Case("uneven heads", sizes={"H": 5}, options=_CAUSAL),
    Case("fewer tokens than ranks", sizes={"T": 2, "S": 5}, options=_CAUSAL),
    Case("fewer heads than ranks", sizes={"H": 2, "G": 1}),
    Case("dropout", sizes={"H": 5}, options={"dropout": 0.3} | _CAUSAL),
    Case(
        "everything", sizes={"T": 25, "H": 6, "G": 2, "V": 4},
        tensors={"bias": ("H", "T", "S"), "sink": ("H",), "dense": ("B", "1", "1", "S")},
        options={"softcap": 2.0, "dropout": 0.2, "mask": {"Causal": (), "Window": (9, None), "Lengths": ([21, 25],)}},
    ),
    Case("joint, text in front", sizes={"T": 22}, text=5),
    Case(
        "joint, sink and softcap", sizes={"T": 25, "H": 3}, tensors={"sink": ("H",)}, options={"softcap": 2.0}, text=7,
    ),
)  # fmt: skip

RECURRENT = (
    *(Case(f"{function}{', ' * bool(name)}{name}", function, *rest)
    for function in ("linear_attention", "delta_rule")
    for name, *rest in (
        ("",),
        ("GQA", {"G": 2}),
        ("uneven length", {"T": 29}, {"log_decay": ("B", "T", "H")}),
        ("uneven heads", {"H": 5, "V": 4}, {"log_decay": ("B", "T", "H", "K"), "state": ("B", "H", "K", "V")}),
        ("fewer tokens than ranks", {"T": 2}, {"state": ("B", "H", "K", "V")}),
        (
            "packed", {"B": 1, "N": 4}, {"log_decay": ("B", "T", "H"), "state": ("N", "H", "K", "V")},
            {"offsets": torch.tensor([0, 5, 5, 17, 24])},
        ),
    )),
    Case("linear_attention, bonus", "linear_attention", {}, {"log_decay": ("B", "T", "H", "K"), "bonus": ("H", "K")}),
    Case("scan", "scan", {"T": 29}, {"state": ("B", "D")}),
    Case("scan, packed", "scan", {"B": 1, "N": 3}, {"state": ("N", "D")}, {"offsets": torch.tensor([0, 9, 9, 24])}),
    Case("selective_scan", "selective_scan", {"T": 29, "K": 4}, {"state": ("B", "D", "K"), "skip": ("D",)}),
)  # fmt: skip


def by_name(name: str) -> Case:
    return next(case for case in (*CASES, *RECURRENT) if case.name == name)


@dataclass(frozen=True)
class Wrapper:
    """A way to split: `make(op)` on a rank, where tokens go, and of which operators and worlds it is."""

    name: str
    make: Callable[[Any], Any]
    held: Callable[[int, int], list[list[Piece]]]  # (T, size) -> pieces of every rank
    functions: tuple[str, ...] = (FLAT,)
    size: int = 0  # of the world; 0: any


def _rings(order: Order) -> Wrapper:
    return Wrapper(
        f"ring {order}",
        lambda op: ring(op, dist.group.WORLD, order),
        lambda T, size: [pieces(order, T, size, rank) for rank in range(size)],
    )


def _products(u: int, r: int, order: Order) -> Wrapper:
    def make(op: Any) -> Any:
        return usp(op, dist.init_device_mesh("cpu", (u, r), mesh_dim_names=("ulysses", "ring")), order)

    def held(T: int, size: int) -> list[list[Piece]]:
        """Ring rank by ring rank, then cut in runs over the Ulysses ranks."""
        rings = [pieces(order, T, r, place) for place in range(r)]
        found = []
        for row in range(u):
            for each in rings:
                runs = _runs(length(each), u)
                found.append(cut(each, *runs[row]))
        return found

    return Wrapper(f"usp {u}x{r} {order}", make, held, size=u * r)


def _runs(T: int, size: int) -> list[tuple[int, int]]:
    small, more = divmod(T, size)
    starts = [rank * small + min(rank, more) for rank in range(size + 1)]
    return list(pairwise(starts))


def _plain(T: int, size: int) -> list[list[Piece]]:
    return [pieces("plain", T, size, rank) for rank in range(size)]


_RECURRENT = ("linear_attention", "delta_rule", "scan", "selective_scan")
WRAPPERS = (
    _rings("zigzag"),
    _rings("stripe"),
    _rings("plain"),
    Wrapper("ulysses", lambda op: ulysses(op, dist.group.WORLD), _plain, (FLAT, *_RECURRENT)),
    _products(2, 2, "zigzag"),
    _products(2, 3, "zigzag"),
    _products(3, 2, "stripe"),
    _products(4, 2, "zigzag"),
    _products(2, 4, "stripe"),
    Wrapper("handoff", lambda op: handoff(op, dist.group.WORLD), _plain, _RECURRENT),
)
WORLDS = (1, 2, 3, 4, 6, 8)


def wrapper(name: str) -> Wrapper:
    return next(each for each in WRAPPERS if each.name == name)


def applies(each: Wrapper, case: Case, size: int) -> bool:
    return case.function in each.functions and each.size in (0, size)


def evaluated(
    op: Any, case: Case, inputs: Mapping[str, Tensor], weights: Sequence[Tensor], backend: str | None = None
) -> dict[str, Tensor]:
    """Outputs by number and the gradient of every floating input, of the sum of outputs times weights."""
    torch.manual_seed(3)
    leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    arguments: dict[str, Any] = dict(leaves)
    options = dict(case.options) | ({} if backend is None else {"backend": backend})
    mask = mask_of(options.pop("mask", {}))
    if "dense" in arguments:
        dense = foci.Dense(arguments.pop("dense"))
        mask = dense if mask is None else mask & dense
    if mask is not None:
        arguments["mask"] = mask
    if case.function != FLAT:
        options["return_state"] = True
    outputs = op(**arguments, **options)
    outputs = tuple(_flat(outputs))
    pairs = [(y, w.to(y.dtype)) for y, w in zip(outputs, weights, strict=True)]
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad([y for y, _ in pairs], list(wanted.values()), [w for _, w in pairs])
    found = {f"output {n}": y.detach() for n, y in enumerate(outputs)}
    return found | {f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}


def _flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [x for each in outputs for x in _flat(each)]


def _weights(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """Numbers of that dtype, so that no gradient carries their rounding."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(tuple(shape), generator=draw, dtype=torch.float64).to(dtype).double() for shape in shapes]


def _places(each: Wrapper, sizes: Mapping[str, int], size: int) -> Held:
    held = {letter: each.held(n, size) for letter, n in sizes.items()}
    return [
        {letter: [x for piece in held[letter][rank] for x in piece.positions] for letter in held}
        for rank in range(size)
    ]


def _tokens(case: Case) -> dict[str, int]:
    return {"T": case.size("T"), "S": case.size("S")}


def on_rank(name: str, place: str, dtype: torch.dtype, shapes: list[list[int]]) -> dict[str, Tensor]:
    """What one rank finds: its part of every output and gradient."""
    case, each = by_name(name), wrapper(place)
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, weights = case.inputs(dtype), _weights(shapes, dtype)
    if case.text:
        return _joint_on_rank(case, each, inputs, weights)
    operator = known(getattr(foci, case.function))
    here = _places(each, _tokens(case), size)[rank]
    mine = {n: taken(n, x, operator.letters, here) for n, x in inputs.items()}
    share = [
        w[:, here["T"]] if "T" in letters.names else w / size
        for letters, w in zip(operator.results, weights, strict=True)
    ]
    return evaluated(each.make(operator.function), case, mine, share)


def truth(case: Case, dtype: torch.dtype, op: Any = None, **options: Any) -> dict[str, Tensor]:
    """One process, on the numbers of that dtype: in float64 by default, or what `op` makes of them as they are."""
    inputs = case.inputs(dtype)
    exact = inputs if op is not None else {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    return evaluated(op or getattr(foci, case.function), case, exact, _weights(shapes_of(case), dtype), **options)


def shapes_of(case: Case) -> list[list[int]]:
    operator = known(getattr(foci, case.function))
    inputs = {n: x for n, x in case.inputs(torch.float32).items() if n != "dense"}
    options = {n: x for n, x in case.options.items() if n not in ("mask", "dropout")}
    options |= {} if case.function == FLAT else {"return_state": True}
    call = operator.bind((), inputs | options).call
    return [list(output.shape) for output in operator.declared(call)]


def found_on(world: World, each: Wrapper, case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What the ranks found, put together: parts by their places; what should be equal on all of them, checked to be."""
    ranks = world.run(on_rank, case.name, each.name, dtype, shapes_of(case))
    operator = known(getattr(foci, case.function))
    held = _places(each, _tokens(case), world.size)
    if case.text:
        held = _joint_places(case, each, world.size)
    letters = {f"output {n}": found for n, found in enumerate(operator.results)}
    letters |= {f"d{n}": found for n, found in operator.letters.items()}
    whole = {}
    for name, first in ranks[0].items():
        names = letters[name].aligned(first)
        if name == "dlog_decay" and first.dim() == 3:
            names = ("B", "T", "H") if case.function != "scan" else ("B", "T", "D")
        letter = next((letter for letter in ("T", "S") if letter in letters[name].names), None)
        dim = names.index(letter) if letter in names else None
        tokens = None if letter is None else _tokens(case)[letter]
        sizes = [0 if dim is None else x[name].shape[dim] for x in ranks]
        if dim is None or letter is None or (letters[name].broadcast and sizes != [len(x[letter]) for x in held]):
            for rank, x in enumerate(ranks):
                assert torch.equal(x[name], first), f"{name} on rank {rank} is not that of rank 0"
            whole[name] = first
            continue
        shape = list(first.shape)
        shape[dim] = tokens  # type: ignore[call-overload]
        whole[name] = first.new_full(shape, math.nan)
        for x, place in zip(ranks, held, strict=True):
            whole[name].index_copy_(dim, torch.tensor(place[letter], dtype=torch.int64), x[name])
    return whole


def _joint_on_rank(case: Case, each: Wrapper, inputs: dict[str, Tensor], weights: list[Tensor]) -> dict[str, Tensor]:
    """Text in front, the same on every rank; image tokens split. Outputs and gradients as [text, image] again."""
    rank, size, n = dist.get_rank(), dist.get_world_size(), case.text
    image = _places(each, {"T": case.size("T") - n}, size)[rank]["T"]
    take = torch.tensor(image, dtype=torch.int64) + n

    def op(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        parts = [x[:, take] for x in (q, k, v)] + [x[:, :n] for x in (q, k, v)]
        (out, lse), (text_out, text_lse) = joint(each.make(foci.attention_with_lse))(*parts, **options)
        return torch.cat([text_out, out], 1), torch.cat([text_lse, lse], 1)

    share = [torch.cat([w[:, :n] / size, w[:, take]], 1) for w in weights]
    found = evaluated(op, case, inputs, share)
    cuts = torch.cat([torch.arange(n), take])
    return {name: x[:, cuts] if name in ("dq", "dk", "dv") else x for name, x in found.items()}


def _joint_places(case: Case, each: Wrapper, size: int) -> Held:
    image = _places(each, {"T": case.size("T") - case.text}, size)
    text = list(range(case.text))
    return [dict.fromkeys(("T", "S"), text + [x + case.text for x in place["T"]]) for place in image]


def errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest error of each tensor relative to its largest number; infinite where -inf stands elsewhere."""
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    result = {}
    for name, right in expected.items():
        got = found[name].double()
        assert got.shape == right.shape, f"{name}: {list(got.shape)} is not {list(right.shape)}"
        gap = torch.where(got == right, 0.0, (got - right).abs()).nan_to_num(nan=math.inf)
        size = right.masked_fill(right == -math.inf, 0.0).abs()
        result[name] = float(gap.max() / size.max().clamp(min=1e-3)) if gap.numel() else 0.0
    return result


def prove(world: World, place: str, case: Case) -> None:
    """Raise AssertionError naming the tensors in which a wrapper differs from one process, in float64."""
    found = errors(found_on(world, wrapper(place), case), truth(case, torch.float64))
    wrong = {name: f"{error:.1e}" for name, error in found.items() if not error <= BUDGET}
    assert not wrong, f"{place}, {case.name}, {world.size} ranks: {wrong}"


def cell(world: World, each: Wrapper, case: Case, right: Mapping[str, Tensor]) -> str:
    """One run in words: its largest error, with a mark where that is too large, or what it raised."""
    if not applies(each, case, world.size):
        return "."
    try:
        error = max(errors(found_on(world, each, case), right).values())
    except (AssertionError, RuntimeError, ValueError, NotImplementedError) as reason:
        print(f"{each.name}, {case.name}, {world.size} ranks: {type(reason).__name__}: {reason}", file=sys.stderr)
        return "raised !"
    return f"{error:.0e}" + " !" * (not error <= BUDGET)


def main(arguments: Sequence[str] | None = None) -> int:
    """The full product: a table for each world, a row for each case, a column for each wrapper."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS))
    parser.add_argument("--wrappers", nargs="+", default=[each.name for each in WRAPPERS])
    parser.add_argument("--cases", nargs="+", default=[case.name for case in (*CASES, *RECURRENT)])
    given = parser.parse_args(arguments)
    right = {name: truth(by_name(name), torch.float64) for name in given.cases}
    print(f"Largest relative error of any output or gradient in float64. '!': above {BUDGET:.0e}; '.': does not apply.")
    cells: list[str] = []
    start = time.monotonic()
    for size in given.worlds:
        columns = [each for each in map(wrapper, given.wrappers) if each.size in (0, size)]
        print(f"\n{f'{size} ranks':<42}" + "".join(f"{each.name:>17}" for each in columns))
        with World(size, timeout=60.0, limit=300.0, preload=("foci.parallel", "tests.parallel.proof")) as world:
            for name, expected in right.items():
                row = [cell(world, each, by_name(name), expected) for each in columns]
                print(f"{name:<42}" + "".join(f"{text:>17}" for text in row), flush=True)
                cells += [text for text in row if text != "."]
    wrong = sum(text.endswith("!") for text in cells)
    print(f"\n{len(cells)} runs, {wrong} wrong, {time.monotonic() - start:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
