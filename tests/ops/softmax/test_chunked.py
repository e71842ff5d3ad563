"""The chunked backend: the reference's numbers however it is cut into tiles, O(T) memory, skipped tiles skipped."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import foci
from foci import Causal, Lengths, Mask, Packed, Window
from foci.core.spec import Case
from foci.ops.masks import lower, segments
from foci.ops.softmax import aten, chunked
from foci.ops.softmax.call import together
from foci.ops.softmax.spec import SPEC
from tests.ops.softmax.problems import CPU, TINY, assert_close, evaluate, gradcheck, inputs_of, tiny

module = {"aten": aten, "chunked": chunked}


@pytest.mark.parametrize("problem", SPEC.cases, ids=lambda problem: problem.name)
def test_every_case_is_the_reference(problem: Case) -> None:
    inputs = problem.make(torch.float64, CPU, 1)
    assert chunked.reasons(SPEC.bind(**inputs)) == []
    assert_close(evaluate(inputs, "chunked"), evaluate(inputs))


@pytest.mark.parametrize("tile", [1, 500, 5000])
@pytest.mark.parametrize(
    "name",
    ["two blocks", "causal, two blocks", "causal window", "grouped heads", "everything", "dropout", "packed cross"],
)
def test_the_cut_into_tiles_does_not_matter(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, few heads and few batch rows a tile: seams everywhere."""
    inputs = inputs_of(name)
    truth = evaluate(inputs)
    monkeypatch.setattr(chunked, "_TILE", tile)
    assert_close(evaluate(inputs, "chunked"), truth)


@pytest.mark.parametrize("name", TINY)
def test_gradcheck(name: str) -> None:
    assert gradcheck(tiny(name), "chunked")


@pytest.mark.parametrize("T", [31, 32, 33, 255, 256, 257])
def test_lengths_round_a_block(T: int) -> None:
    draw = torch.Generator().manual_seed(T)
    inputs: dict[str, Any] = {n: torch.randn(1, T, 1, 4, generator=draw, dtype=torch.float64) for n in ("q", "k", "v")}
    inputs["mask"] = Causal() & Window(40, None)
    assert_close(evaluate(inputs, "chunked"), evaluate(inputs))


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes or returns, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(found):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return found


def largest(T: int, **options: Any) -> int:
    """Elements of the largest tensor of one forward and backward of one thin head, inside its ops."""
    q, k, v = (torch.randn(1, T, 1, 4) for _ in range(3))
    options = {name: make(T) if callable(make) else make for name, make in options.items()}
    with Largest() as mode:
        call = SPEC.bind(q, k, v, **options)
        out, lse = chunked.forward(call)
        chunked.backward(call, (out, lse), (out, lse), [True, True, True, call.bias is not None, call.sink is not None])
    return mode.elements


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, causal": {"mask": Causal(), "softcap": 20.0},
    "window": {"mask": Window(100, 100)},
    "bias, sink": {"bias": lambda T: torch.randn(T), "sink": lambda T: torch.zeros(1)},
    "lengths, dense": {"mask": lambda T: Lengths(torch.tensor([T - T // 8])) & foci.Dense(torch.rand(1, T) < 0.9)},
    "dropout": {"dropout": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_memory_grows_with_t_not_with_t_times_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles at their fewest rows, 4 times the tokens make no tensor more than 4 times as large."""
    monkeypatch.setattr(chunked, "_TILE", 1)
    short, long = largest(256, **OPTIONS[name]), largest(1024, **OPTIONS[name])
    assert long <= 4 * short
    assert long <= 64 * 1024


@pytest.mark.parametrize("name", ["plain", "softcap, causal"])
def test_no_tensor_of_t_times_s_at_4096(name: str) -> None:
    assert largest(4096, **OPTIONS[name]) <= chunked._TILE < 4096 * 4096 / 8


def test_the_memory_of_a_long_row_grows_with_the_row() -> None:
    """Where a tile is at its fewest rows it grows as S does."""
    q, k, v = torch.randn(1, 40, 1, 2), *(torch.randn(1, 1 << 16, 1, 2) for _ in range(2))
    with Largest() as mode:
        chunked.forward(SPEC.bind(q, k, v))
    assert mode.elements <= max(chunked._TILE, 32 << 16)


def covered(mask: Mask | None, T: int, S: int, B: int = 1) -> float:
    """Logits computed, as a share of T x S: the tiles' areas."""
    q, k = torch.empty(B, T, 1, 64), torch.empty(B, S, 1, 64)
    tiles = chunked._tiles(SPEC.bind(q, k, k, mask=mask), segments(lower(mask), B, T, S))
    return sum((x.b1 - x.b0) * (x.i1 - x.i0) * (x.j1 - x.j0) for x in tiles) / (B * T * S)


@pytest.mark.parametrize(
    ("mask", "T", "S", "live"),
    [
        (None, 4096, 4096, 1.0),
        (Causal(), 4096, 4096, 0.5),
        (Causal("top-left"), 4096, 4096, 0.5),
        (Causal(), 2048, 4096, 0.75),
        (Causal(), 4096, 2048, 0.25),
        (Causal() & Window(1024, None), 16384, 16384, 1024 / 16384),
        (Window(512, 512), 16384, 16384, 1024 / 16384),
        (Packed(torch.tensor([0, 1024, 1024, 4096])), 4096, 4096, (1 + 9) / 16),
        (Packed(torch.tensor([0, 1024, 2048])) & Causal(), 4096, 4096, 1 / 16),
        (Lengths(torch.tensor([1024, 4096])), 4096, 4096, 5 / 8),
        (Lengths(torch.tensor([1024, 0]), torch.tensor([1024, 4096])), 4096, 4096, 1 / 32),
    ],
    ids=str,
)
def test_skipped_blocks_are_skipped(mask: Mask | None, T: int, S: int, live: float) -> None:
    B = 2 if isinstance(mask, Lengths) else 1
    assert live * 0.97 <= covered(mask, T, S, B) <= live * 1.5


def test_every_live_pair_is_in_one_tile() -> None:
    mask = Packed(torch.tensor([0, 40, 40, 300]), torch.tensor([0, 10, 30, 280])) & Causal() & Window(50, None)
    q, k = torch.empty(1, 310, 6, 4), torch.empty(1, 290, 3, 4)
    seen = torch.zeros(1, 3, 310, 290, dtype=torch.int32)
    for tile in chunked._tiles(SPEC.bind(q, k, k, mask=mask), segments(lower(mask), 1, 310, 290)):
        seen[tile.b0 : tile.b1, tile.g0 : tile.g1, tile.i0 : tile.i1, tile.j0 : tile.j1] += 1
    assert int(seen.max()) == 1
    assert (seen[0, 0].bool() | ~mask.materialize(310, 290)[0, 0]).all()


class Copied(TorchDispatchMode):
    """Numbers that operations copy or convert."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::copy_", "aten::_to_copy", "aten::clone", "aten::constant_pad_nd"):
            self.elements += args[0].numel()
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("mask", "backend"),
    [
        (Causal() & Window(9, 0), "chunked"),  # aten has no window
        *itertools.product(
            [Causal() & Lengths(torch.tensor([10, 3])), Lengths(torch.tensor([0, 10]))], ["chunked", "aten"]
        ),
    ],
    ids=str,
)
def test_keys_that_nobody_sees_are_not_copied(mask: Mask, backend: str) -> None:
    """A step of decoding costs what it sees, not its cache: converted to float32, or padded to one width."""
    q, k, v = torch.randn(2, 1, 4, 8).half(), torch.randn(2, 5000, 2, 8).half(), torch.randn(2, 5000, 2, 16).half()
    call = SPEC.bind(q, k, v, mask=mask)
    assert not module[backend].reasons(call)
    with Copied() as mode:
        out, _ = module[backend].forward(call)
    assert mode.elements < 4000
    torch.testing.assert_close(out, foci.attention(q, k, v, mask=mask, backend="reference"), rtol=2e-3, atol=2e-3)


def test_documents_end_to_end_and_rows_that_are_alike_are_one_span() -> None:
    offsets = torch.tensor([0, 40, 40, 300])
    for mask, B, expected in (
        (Packed(offsets), 1, [(0, 1, 0, 300)]),
        (Packed(offsets, torch.tensor([0, 10, 30, 280])), 1, [(0, 1, 0, 10), (0, 1, 30, 280)]),
        (Lengths(torch.tensor([7, 7, 0, 9])), 4, [(0, 2, 0, 7), (3, 4, 0, 9)]),
        (Causal() & Window(4, None), 3, [(0, 3, 0, 300)]),
    ):
        found = chunked._spans(segments(lower(mask), B, 300, 300), B)
        assert [(x.rows.start, x.rows.stop, x.keys.start, x.keys.stop) for x in found] == expected


def test_inputs_are_not_written() -> None:
    inputs = inputs_of("everything")
    before = {name: x.clone() for name, x in inputs.items() if isinstance(x, Tensor)}
    evaluate(inputs, "chunked")
    for name, x in before.items():
        assert torch.equal(inputs[name], x), name


@pytest.mark.parametrize("sink", [None, -1e9, -torch.inf])
def test_a_row_of_biases_far_below_zero_is_a_mean(sink: float | None) -> None:
    """log S is lost in its lse, but not in what divides its sums; a sink as low is one more key."""
    q, k, v = (torch.randn(1, n, 2, 16) for n in (3, 8, 8))
    bias = torch.zeros(3, 8)
    bias[1] = -1e9
    low = None if sink is None else torch.full((2,), sink)
    out = foci.attention(q, k, v, bias=bias, sink=low, backend="chunked")
    expected = v.mean(1) if sink != -1e9 else v.sum(1) / 9
    torch.testing.assert_close(out[:, 1], expected)


@pytest.mark.parametrize("tokens", [8, 17])
@pytest.mark.parametrize("ends", [False, True])
def test_short_rows_are_together_and_long_ones_apart(tokens: int, ends: bool) -> None:
    """What lengths exclude may be NaN either way, and lengths that are wrong are named."""
    q, k, v = (torch.randn(64, tokens, 2, 4, dtype=torch.float64) for _ in range(3))
    lengths = torch.arange(64) % (tokens + 1)
    mask = Causal() & Lengths(lengths, (lengths + 1).clamp(max=tokens) if ends else None)
    truth = evaluate({"q": q, "k": k, "v": v, "mask": mask})
    for x in (k, v):
        x[torch.arange(tokens) >= lengths[:, None]] = torch.nan
    inputs = {"q": q, "k": k, "v": v, "mask": mask}
    assert_close(evaluate(inputs, "chunked"), truth)
    q[:, 0] = torch.nan  # of what is real it reaches what is real
    found = evaluate(inputs | {"q": q}, "chunked")["dk"]
    assert not found[torch.arange(tokens) >= lengths[:, None]].any() and found[40, 0].isnan().all()
    call = together(SPEC.bind(**inputs))
    assert (call.dense is None) == (tokens > 16)
    with pytest.raises(ValueError, match=r"Lengths: kv_lengths\[1\] is 99"):
        foci.attention(q, k, v, mask=Lengths(lengths.index_fill(0, torch.tensor(1), 99)), backend="chunked")
