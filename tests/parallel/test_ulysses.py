"""Heads for tokens round every operator: equal to one process, forward and every gradient; refusals; failures."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import foci
from foci.core.errors import Disagreement, RankError, ShapeError, Unsupported
from foci.core.world import Raised, World
from foci.parallel.balance import pieces, positions, shard, unshard
from foci.parallel.group import Group
from foci.parallel.handoff import handoff
from foci.parallel.ring import ring
from foci.parallel.ulysses import Ulysses, ulysses, usp
from tests.parallel.proof import even, plain, prove

Worlds = Callable[[int], World]
DOUBLE = torch.float64


def over_all(op: Any) -> Ulysses:
    return ulysses(op, dist.group.WORLD)


def over_two_levels(op: Any) -> Ulysses:
    """Ulysses round Ulysses: pairs of neighbours inside, the pairs outside."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return ulysses(ulysses(op, mesh["inner"]), mesh["outer"])


def mesh_of(size: int) -> Any:
    """Two ranks for heads, or one, and a ring of the rest."""
    return dist.init_device_mesh("cpu", MESHES[size], mesh_dim_names=("ulysses", "ring"))


MESHES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 6: (2, 3), 8: (4, 2)}


def over_mesh(op: Any) -> Ulysses:
    return usp(op, mesh_of(dist.get_world_size()))


def over_plain_mesh(op: Any) -> Ulysses:
    return usp(op, mesh_of(dist.get_world_size()), order="plain")


def over_striped_mesh(op: Any) -> Ulysses:
    return usp(op, mesh_of(dist.get_world_size()), order="stripe")


ORDERS = {"zigzag": over_mesh, "plain": over_plain_mesh, "stripe": over_striped_mesh}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def softmax(B: int = 2, T: int = 7, S: int | None = None, H: int = 6, G: int = 3, **more: Tensor) -> dict[str, Tensor]:
    S = T if S is None else S
    return {"q": draw(B, T, H, 4), "k": draw(B, S, G, 4), "v": draw(B, S, G, 5)} | more


def linear(B: int = 2, T: int = 7, H: int = 6, G: int = 3, **more: Tensor) -> dict[str, Tensor]:
    return {"q": draw(B, T, G, 4), "k": draw(B, T, G, 4) / 2, "v": draw(B, T, H, 5)} | more


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "full": lambda: ("attention", softmax(), {}),
    "causal": lambda: ("attention_with_lse", softmax(), {"mask": {"Causal": ()}}),
    "window": lambda: ("attention_with_lse", softmax(T=9), {"mask": {"Window": (2, 1)}}),
    "padding": lambda: ("attention_with_lse", softmax(), {"mask": {"Lengths": ([3, 7], [2, 7]), "Causal": ()}}),
    "packed": lambda: ("attention_with_lse", softmax(B=1, T=9), {"mask": {"Packed": ([0, 2, 2, 7, 9],), "Causal": ()}}),
    "cross": lambda: ("attention_with_lse", softmax(S=4), {}),
    "bias": lambda: ("attention_with_lse", softmax(S=9, bias=draw(2, 6, 7, 9)), {"softcap": 2.0}),
    "bias of a row": lambda: ("attention", softmax(S=9, bias=draw(1, 1, 1, 9)), {}),
    "bias for all heads": lambda: ("attention", softmax(S=9, bias=draw(7, 9)), {}),
    "bias of heads": lambda: ("attention", softmax(bias=draw(6, 1, 1)), {}),
    "dense": lambda: ("attention_with_lse", softmax(dense=torch.rand(2, 6, 7, 7) > 0.3), {"mask": {"Causal": ()}}),
    "dense of keys": lambda: ("attention", softmax(dense=torch.rand(2, 1, 1, 7) > 0.3), {}),
    "sink": lambda: ("attention_with_lse", softmax(H=5, G=1, sink=draw(5)), {"mask": {"Causal": ()}}),
    "dropout": lambda: ("attention_with_lse", softmax(H=7, G=7), {"dropout": 0.4, "mask": {"Causal": ()}}),
    "fewer heads than ranks": lambda: ("attention_with_lse", softmax(H=2, G=1, sink=draw(2)), {"dropout": 0.2}),
    "one key head": lambda: ("attention", softmax(H=8, G=1), {"mask": {"Causal": ()}}),
    "fewer tokens than ranks": lambda: ("attention_with_lse", softmax(T=1, S=5), {"mask": {"Causal": ()}}),
    "linear": lambda: ("linear_attention", linear(state=draw(2, 6, 4, 5)), {"return_state": True}),
    "linear, decay per head": lambda: ("linear_attention", linear(log_decay=-torch.rand(6, dtype=DOUBLE)), {}),
    "linear, decay per channel": lambda: (
        "linear_attention",
        linear(log_decay=-torch.rand(2, 7, 6, 4, dtype=DOUBLE), bonus=draw(6, 4)),
        {"return_state": True},
    ),
    "linear, without order": lambda: ("linear_attention", linear(), {"causal": False}),
    "linear, packed": lambda: (
        "linear_attention",
        linear(B=1, state=draw(3, 6, 4, 5), log_decay=-torch.rand(1, 7, 6, dtype=DOUBLE)),
        {"offsets": torch.tensor([0, 2, 2, 7]), "return_state": True},
    ),
    "delta": lambda: (
        "delta_rule",
        linear(beta=torch.rand(2, 7, 6, dtype=DOUBLE), log_decay=-torch.rand(2, 7, 6, dtype=DOUBLE)),
        {"return_state": True},
    ),
    "delta, decay of one token": lambda: (
        "delta_rule",
        linear(T=3, beta=torch.rand(2, 3, 6, dtype=DOUBLE), log_decay=-torch.rand(6, dtype=DOUBLE)),
        {"return_state": True},
    ),
    "scan": lambda: (
        "scan",
        {"x": draw(2, 7, 5), "log_decay": -torch.rand(2, 7, 5, dtype=DOUBLE), "state": draw(2, 5)},
        {"return_state": True},
    ),
    "selective scan": lambda: (
        "selective_scan",
        {
            "x": draw(2, 7, 5), "dt": torch.rand(2, 7, 5, dtype=DOUBLE), "A": -torch.rand(5, 3, dtype=DOUBLE),
            "B": draw(2, 7, 3), "C": draw(2, 7, 3), "skip": draw(5), "state": draw(2, 5, 3),
        },
        {"return_state": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(worlds: Worlds, name: str, size: int) -> None:
    torch.manual_seed(1)
    prove(worlds(size), over_all, *CASES[name]())


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 6, 8])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process_at_other_sizes(worlds: Worlds, name: str, size: int) -> None:
    torch.manual_seed(1)
    prove(worlds(size), over_all, *CASES[name]())


def prove_usp(world: World, name: str, order: str) -> None:
    function, inputs, options = CASES[name]()
    sizes = {"T": inputs["q"].shape[1], "S": inputs["k"].shape[1]}
    rings, heads = MESHES[world.size][1], MESHES[world.size][0]
    held: list[dict[str, list[int]]] = [{} for _ in range(world.size)]
    for letter, size in sizes.items():
        for place_in_ring in range(rings):
            whole = [place for piece in pieces(order, size, rings, place_in_ring) for place in piece.positions]
            for row, run in enumerate(plain(even(len(whole), heads))):
                held[row * rings + place_in_ring][letter] = [whole[place] for place in run]
    prove(world, ORDERS[order], function, inputs, options, held)


SOFTMAX = [name for name in CASES if CASES[name]()[0].startswith("attention")]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SOFTMAX)
def test_with_a_ring_inside(worlds: Worlds, name: str, order: str) -> None:
    torch.manual_seed(1)
    prove_usp(worlds(4), name, order)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "order"), [(6, "zigzag"), (8, "zigzag"), (6, "stripe")])
@pytest.mark.parametrize("name", SOFTMAX)
def test_with_a_ring_inside_at_other_sizes(worlds: Worlds, name: str, order: str, size: int) -> None:
    torch.manual_seed(1)
    prove_usp(worlds(size), name, order)


@pytest.mark.parametrize("name", ["causal", "dropout", "bias", "linear"])
def test_a_wrapper_can_be_round_a_wrapper(worlds: Worlds, name: str) -> None:
    torch.manual_seed(1)
    runs = plain((2, 1, 3, 1))
    # What an inner rank would hold is cut over the outer ones: ranks 0 and 2 have the first two runs.
    held = [{"T": runs[place], "S": runs[place]} for place in (0, 2, 1, 3)]
    function, inputs, options = CASES[name]()
    if name == "bias":
        inputs |= {"k": draw(2, 7, 3, 4), "v": draw(2, 7, 3, 5), "bias": draw(2, 6, 7, 7)}
    prove(worlds(4), over_two_levels, function, inputs, options, held)


@pytest.mark.parametrize("lengths", [(5, 0, 2), (1, 1, 5)])
def test_ranks_may_hold_any_number_of_tokens(worlds: Worlds, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    held = [{"T": t, "S": t} for t in plain(lengths)]
    for name in ("causal", "bias of heads", "delta"):
        prove(worlds(3), over_all, *CASES[name](), held=held)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
    """Somebody's own attention: no keyword of foci, and a head of q for each `len(k)` of them."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    p = (torch.einsum("bthk,bshk->bhts", q, k) * scale).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", p, v)


def own_attention_on_rank(inputs: list[Tensor], lengths: list[list[int]]) -> list[Tensor]:
    places = lengths[dist.get_rank()]
    leaves = [x[:, places].clone().requires_grad_() for x in inputs]
    out = ulysses(plain_attention, dist.group.WORLD)(*leaves, scale=0.5)
    out.sin().sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("H", [6, 2])
def test_a_callable_that_foci_does_not_know(worlds: Worlds, H: int) -> None:
    torch.manual_seed(1)
    inputs = list(softmax(H=H, G=2).values())
    lengths = plain((3, 2, 2))
    whole = [x.clone().requires_grad_() for x in inputs]
    out = plain_attention(*whole, scale=0.5)
    out.sin().sum().backward()
    for places, found in zip(lengths, worlds(3).run(own_attention_on_rank, inputs, lengths), strict=True):
        for mine, expected in zip(found, [out.detach(), *(x.grad for x in whole)], strict=True):
            assert expected is not None
            torch.testing.assert_close(mine, expected[:, places])


class Learned:
    """An attention with a table of its own."""

    def __init__(self) -> None:
        self.table = torch.ones(4, dtype=DOUBLE, requires_grad=True)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain_attention(q * self.table, k, v)


def short(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain_attention(q, k, v)[:, 1:]


def refusals() -> list[str]:
    """What is said on this rank, of calls that are wrong on every rank alike."""
    q, k, v = (x.requires_grad_() for x in softmax(G=6).values())
    group = dist.group.WORLD
    attempts: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ShapeError, lambda: ulysses(foci.attention, group)(q, k, v, bias=draw(7, 5))),
        (ValueError, lambda: ulysses(foci.attention, group)(q, k, v, mask=foci.Lengths(torch.tensor([3, 99])))),
        (ValueError, lambda: ulysses(foci.scan, group)(q[:1, :, 0], q[:1, :, 1], offsets=torch.tensor([0, 2]))),
        (ValueError, lambda: ulysses(foci.attention, group)(q[:, :1], k, v, bias=draw(1, 14).requires_grad_())),
        (Unsupported, lambda: ulysses(Learned(), group)(q, k, v)),
        (Unsupported, lambda: ulysses(Learned(), group)(q.detach(), k.detach(), v.detach())),
        (ValueError, lambda: ulysses(ring(foci.attention, group), group)),
        (ValueError, lambda: ulysses(handoff(foci.delta_rule, group), group)),
        (Unsupported, lambda: ulysses(plain_attention, group)(q, k, v, scale=torch.ones(()))),
        (TypeError, lambda: ulysses(short, group)(q, k, v)),
    ]
    found = []
    for kind, attempt in attempts:
        try:
            attempt()
        except kind as error:
            found.append(str(error))
    return found


def test_what_is_wrong_everywhere_is_said_in_the_operators_words(worlds: Worlds) -> None:
    first, second = worlds(2).run(refusals)
    assert first == second
    bias, lengths, offsets, row, learned, alone, round_ring, round_handoff, tensor, returned = first
    assert "bias has shape [14, 5], so S would be 5; expected 1 or S=14" in bias
    assert "kv_lengths[1] is 99; expected 0 to 14" in lengths
    assert "offsets must rise from 0 to T=14" in offsets
    assert "bias has one row on each of 2 ranks" in row
    assert "wants a gradient and is no argument" in learned and learned == alone
    assert (
        round_ring == round_handoff and "group has ranks [0, 1], a wrapper inside [0, 1]; expected groups" in round_ring
    )
    assert "scale is a tensor []" in tensor
    assert "it returned torch.float64 [2, 13, 3, 5]; expected torch.float64 [2, 14, 3, 5]" in returned


def groups_that_are_no_grid(outer: list[list[int]], inner: list[list[int]]) -> str:
    own: list[Any] = []
    for each in (outer, inner):
        groups = [dist.new_group(ranks) for ranks in each]  # by all ranks, members or not
        own += [group for group, ranks in zip(groups, each, strict=True) if dist.get_rank() in ranks]
    q = draw(1, 3, 4, 4)
    with pytest.raises(Disagreement) as caught:
        ulysses(ring(foci.attention, own[1], "plain"), own[0])(q, q, q)
    return str(caught.value)


@pytest.mark.parametrize("crossed", [False, True])
def test_groups_that_are_no_grid_are_refused_by_all(worlds: Worlds, crossed: bool) -> None:
    """Of two of four ranks each, in which a rank is not at one place of its group as those of the other are."""
    straight, across = [[0, 1], [2, 3]], [[0, 3], [1, 2]]
    outer, inner = (straight, across) if crossed else (across, straight)
    for told in worlds(4).run(groups_that_are_no_grid, outer, inner):
        assert f"this rank's place in the group{' around' if crossed else 's inside'}" in told


def on_meshes_in_any_order() -> list[str]:
    x, told = torch.arange(13), []
    for ranks in ([[3, 1], [0, 2]], [[0, 1], [3, 2]]):
        mesh = dist.DeviceMesh("cpu", ranks, mesh_dim_names=("u", "r"))
        for attempt in (lambda m: usp(foci.attention, m), lambda m: shard(x, m, dim=0), lambda m: positions(13, m)):
            with pytest.raises(ValueError, match="expected its rows in one order of ranks, and its columns") as caught:
                attempt(mesh)
            told.append(str(caught.value))
    for ranks in ([[1, 3], [0, 2]], [[3, 2], [1, 0]]):
        mesh = dist.DeviceMesh("cpu", ranks, mesh_dim_names=("u", "r"))
        mine = shard(x, mesh, dim=0)
        assert torch.equal(mine, positions(13, mesh)) and torch.equal(unshard(mine, mesh, dim=0), x)
    return told


def test_a_mesh_is_a_grid_in_the_order_of_ranks_or_refused(worlds: Worlds) -> None:
    assert len(worlds(4).run(on_meshes_in_any_order)[0]) == 6


def test_what_is_no_operator_is_refused_where_it_is_wrapped() -> None:
    with pytest.raises(TypeError, match="expected an operator of foci"):
        ulysses("attention", None)  # type: ignore[arg-type]


def disagreeing(what: str) -> None:
    rank = dist.get_rank()
    q, k, v = softmax().values()
    options: dict[str, Any] = {}
    if what == "mask" and rank == 1:
        options["mask"] = foci.Causal()
    if what == "gradient":
        q.requires_grad_(rank == 1)
    if what == "dtype" and rank == 1:
        q, k, v = (x.float() for x in (q, k, v))
    if what == "heads" and rank == 1:
        q = q[:, :, :3]
    if what == "offsets":
        q, k, v = (x[:1] for x in (q, k, v))
        options["mask"] = foci.Packed(torch.tensor([0, 3 + rank, 14]))
    ulysses(foci.attention, dist.group.WORLD)(q, k, v, **options)


@pytest.mark.parametrize("what", ["mask", "gradient", "dtype", "heads", "offsets"])
def test_ranks_that_are_called_differently_all_say_how(worlds: Worlds, what: str) -> None:
    outcomes = worlds(2).outcomes(disagreeing, what)
    assert all(isinstance(each, Raised) and isinstance(each.error, Disagreement) for each in outcomes)
    assert str(outcomes[0].error) == str(outcomes[1].error)


class Failing:
    """An attention that raises on one rank, in the forward or in the backward."""

    def __init__(self, direction: str) -> None:
        self.direction = direction

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if dist.get_rank() == 1 and self.direction == "forward":
            raise ArithmeticError("out of numbers")
        out = plain_attention(q, k, v)
        if dist.get_rank() == 1:
            out.register_hook(self.fail)
        return out

    def fail(self, grad: Tensor) -> Tensor:
        raise ArithmeticError("out of numbers")


def failing(direction: str) -> None:
    leaves = [x.requires_grad_() for x in softmax(G=6).values()]
    ulysses(Failing(direction), dist.group.WORLD)(*leaves).sum().backward()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_that_raises_is_named_by_all(worlds: Worlds, direction: str) -> None:
    outcomes = worlds(3).outcomes(failing, direction)
    assert [type(each.error) for each in outcomes] == [RankError] * 3
    error = outcomes[0].error
    assert (error.rank, error.step, error.direction) == (1, 1, direction) and "out of numbers" in str(error)
    assert {str(each.error) for each in outcomes} == {str(error)}


def twice() -> list[Any]:
    q, k, v = (x.requires_grad_() for x in softmax().values())
    out = ulysses(foci.attention, dist.group.WORLD)(q, k, v)
    first = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
    second = torch.autograd.grad(out.sum(), q)[0]
    said = []
    for again in (lambda: torch.autograd.grad(out.sum(), q), lambda: torch.autograd.grad(first.sum(), q)):
        try:
            again()
        except RuntimeError as error:
            said.append(str(error))
    return [torch.equal(first, second), *said]


def test_a_graph_is_kept_as_long_as_asked(worlds: Worlds) -> None:
    for equal, freed, double in worlds(2).run(twice):
        assert equal and "second time" in freed and "does not require grad" in double


def counted(H: int, G: int) -> tuple[int, int]:
    group = Group.of(dist.group.WORLD)
    q, k, v = (x.float().requires_grad_() for x in softmax(B=1, T=8, H=H, G=G).values())
    out = ulysses(foci.attention, group)(q, k, v)
    forward = group.traffic.bytes
    out.sum().backward()
    return forward, group.traffic.bytes - forward


def test_bytes_on_the_wire_are_those_of_the_formula(worlds: Worlds) -> None:
    """(n - 1) / n of this rank's q, k, v and out; the backward sends the gradients of the same."""
    for forward, backward in worlds(2).run(counted, 4, 2):
        tensors = 8 * (4 * 4 + 2 * 4 + 2 * 5 + 4 * 5) * 4
        assert forward == backward == tensors // 2


def cast(kind: str) -> list[Any]:
    q, k, v = (x.float() for x in softmax().values())
    group = dist.group.WORLD
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"), torch.inference_mode(kind == "inference"):
        ours = ulysses(foci.attention, group)(q, k, v)
        theirs = ulysses(plain_attention, group)(q, k, v, scale=0.5)
    return [ours.dtype, theirs.dtype, (ours.float() - theirs.float()).abs().max().item(), ours.requires_grad]


@pytest.mark.parametrize(("kind", "dtype"), [("autocast", torch.bfloat16), ("inference", torch.float32)])
def test_autocast_and_inference_mode(worlds: Worlds, kind: str, dtype: torch.dtype) -> None:
    for ours, theirs, off, grown in worlds(2).run(cast, kind):
        assert (ours, theirs, grown) == (dtype, dtype, False) and off < 3e-2


def rounded(inputs: list[Tensor], lengths: list[list[int]]) -> list[Tensor]:
    places = lengths[dist.get_rank()]
    leaves = [x[:, places].clone().requires_grad_() for x in inputs]
    out = ulysses(foci.attention, dist.group.WORLD)(*leaves, mask=foci.Causal())
    out.float().sin().sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("size", [2, 4])
def test_bfloat16_is_as_near_the_truth_as_one_process(worlds: Worlds, size: int) -> None:
    """But for what it costs that a key head's gradient, a sum over every rank here, travels in parts of bfloat16."""
    torch.manual_seed(1)
    inputs = [x.bfloat16() for x in softmax(T=24, H=8, G=1).values()]
    found = worlds(size).run(rounded, inputs, plain(even(24, size)))
    alone = [x.clone().requires_grad_() for x in inputs]
    out = foci.attention(*alone, mask=foci.Causal())
    out.float().sin().sum().backward()
    leaves = [x.to(DOUBLE).requires_grad_() for x in inputs]
    right = foci.attention(*leaves, mask=foci.Causal())
    of_heads = [torch.autograd.grad(part.sin().sum(), leaves, retain_graph=True) for part in right.chunk(size, dim=2)]
    parts = [right.detach()[None], *(torch.stack(each) for each in zip(*of_heads, strict=True))]
    for place, (part, one) in enumerate(zip(parts, [out.detach(), *(x.grad for x in alone)], strict=True)):
        over = torch.cat([each[place] for each in found], 1)
        sent = part.bfloat16().to(DOUBLE) if place > 1 else part  # out and dq are whole on one rank
        error, single, way = ((x.to(DOUBLE) - part.sum(0)).square().mean().sqrt() for x in (over, one, sent.sum(0)))
        assert error <= 1.1 * single + way, (place, error, single, way)


def wrong_on_one(kind: str) -> str:
    q, k, v = softmax(B=1, T=8, H=4, G=2).values()
    op = over_mesh(foci.attention)
    mine = [x.narrow(1, 2 * dist.get_rank(), 2) for x in (q, k, v)]
    options: dict[str, Any] = {}
    if dist.get_rank() == 1:
        mine[1] = mine[1][..., :2] if kind == "shape" else mine[1]
        options["mask"] = foci.Causal() if kind == "mask" else None
    try:
        op(*mine, **options)
    except (RankError, Disagreement) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("kind", "words"), [("shape", "rank 1 failed.*k has shape"), ("mask", "causal_end")])
def test_all_ranks_of_a_mesh_hear_what_one_of_them_did(worlds: Worlds, kind: str, words: str) -> None:
    """The others of its Ulysses group hear it from the rank itself, those of the other rings from these."""
    for said in worlds(4).run(wrong_on_one, kind):
        assert re.search(words, said, re.DOTALL), said


def watched() -> list[bool]:
    q, k, v = (x.requires_grad_() for x in softmax().values())
    seen = []

    def watching(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled() and q.requires_grad)
        return plain_attention(q, k, v)

    op = ulysses(watching, dist.group.WORLD)
    op(q, k, v)
    with torch.no_grad():
        op(q, k, v)
    return seen


def test_without_gradients_nothing_is_recorded(worlds: Worlds) -> None:
    assert worlds(2).run(watched) == [[True, False]] * 2


def over_two_levels_and_a_line(op: Any) -> Ulysses:
    mesh = dist.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("outer", "inner", "line"))
    return ulysses(ulysses(handoff(op, mesh["line"]), mesh["inner"]), mesh["outer"])


@pytest.mark.parametrize("wrap", [over_two_levels, over_two_levels_and_a_line])
@pytest.mark.parametrize("name", ["linear", "delta"])
def test_wrappers_in_wrappers_hand_on_no_state_that_nobody_asks_for(worlds: Worlds, name: str, wrap: Any) -> None:
    torch.manual_seed(1)
    runs = plain((2, 1, 3, 1))
    held = [{"T": runs[place]} for place in (0, 2, 1, 3)]
    function, inputs, options = CASES[name]()
    prove(worlds(4), wrap, function, inputs, options | {"return_state": False}, held)
