"""One token at a time, in place, is the whole sequence at once; rows may have their states in slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import foci

B, T, G, H, K, V = 2, 7, 2, 4, 3, 5
BOTH = {
    "linear": (foci.linear_attention, foci.linear_attention_step),
    "delta": (foci.delta_rule, foci.delta_rule_step),
}
both = pytest.mark.parametrize("operator", BOTH)
# What stands at one place of each token; the others, gates per head and a bonus, are the same for all of them.
SHAPES = {
    "q": (B, T, G, K), "k": (B, T, G, K), "v": (B, T, H, V), "beta": (B, T, H), "erase": (B, T, G, K),
    "token": (B, T, H), "channel": (B, T, H, K),
}  # fmt: skip


def named(operator: str) -> list[str]:
    """What an operator always takes."""
    return ["q", "k", "v", *["beta"] * (operator == "delta")]


def token(operator: str, dtype: torch.dtype = torch.float32, rows: int = B) -> dict[str, Tensor]:
    """What stands before the state, of one token."""
    shapes = {name: SHAPES[name] for name in named(operator)}
    return {name: torch.rand(rows, *shape[2:]).to(dtype) for name, shape in shapes.items()}


def states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, H, K, V, dtype=dtype)


@both
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("kind", [None, "head", "token", "channel"])
def test_steps_are_the_sequence(operator: str, kind: str | None, extra: bool) -> None:
    whole, step = BOTH[operator]
    often = [*named(operator), *["erase"] * (extra and operator == "delta")]
    inputs = {name: torch.randn(SHAPES[name], dtype=torch.float64) for name in often}
    same: dict[str, Any] = {"scale": 0.3}
    if extra and operator == "linear":
        same["bonus"] = torch.randn(H, K, dtype=torch.float64)
    if kind:
        where = same if kind == "head" else inputs
        where["log_decay"] = -torch.rand(SHAPES.get(kind, (H,)), dtype=torch.float64)
    state = torch.randn(B, H, K, V, dtype=torch.float64)
    out, final = whole(**inputs, **same, state=state, return_state=True)
    place = state.data_ptr()
    for t in range(T):
        now = {name: x[:, t] for name, x in inputs.items()}
        torch.testing.assert_close(step(**now, **same, state=state), out[:, t])
    torch.testing.assert_close(state, final)
    assert state.data_ptr() == place


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(operator: str, dtype: torch.dtype) -> None:
    state = torch.zeros(B, H, K, V)
    ones = {name: torch.ones_like(x) for name, x in token(operator, dtype).items()}
    assert BOTH[operator][1](**ones, state=state).dtype == dtype
    assert torch.equal(state, torch.ones_like(state))


@both
def test_it_forgets_at_minus_infinity(operator: str) -> None:
    state, gates = torch.full((B, H, K, V), 1e30), torch.full((H,), -torch.inf)
    ones = {name: torch.ones_like(x) for name, x in token(operator).items()}
    found = BOTH[operator][1](**ones, state=state, log_decay=gates, scale=1.0)
    assert torch.equal(found, torch.full((B, H, V), float(K)))


@both
@pytest.mark.parametrize("slots", [None, torch.tensor([3, -1])], ids=["rows", "slots"])
def test_compiled_in_one_graph(operator: str, slots: Tensor | None) -> None:
    step, inputs = BOTH[operator][1], token(operator)
    state = states()[: B if slots is None else 5].clone()
    again = state.clone()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found, expected = (each(**inputs, state=s, slots=slots) for each, s in ((compiled, state), (step, again)))
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(state, again)


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("slots", [(4, 0), (-1, 2), (-1, 0), (0, -1), (-1, -1)])
def test_slots_are_the_states_of_rows(operator: str, slots: tuple[int, ...], dtype: torch.dtype) -> None:
    step, inputs, pool = BOTH[operator][1], token(operator, dtype), states(dtype)
    before, expected = pool.clone(), pool.clone()
    out = step(**inputs, state=pool, log_decay=-torch.ones(B, H), slots=torch.tensor(slots))
    for b, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(out[b], torch.zeros(H, V, dtype=dtype))
            continue
        row = before[slot : slot + 1].clone()
        alone = step(**{n: x[b : b + 1] for n, x in inputs.items()}, state=row, log_decay=-torch.ones(1, H))
        torch.testing.assert_close(out[b], alone[0])
        expected[slot] = row[0]
    torch.testing.assert_close(pool, expected)
    assert all(torch.equal(pool[m], before[m]) for m in range(5) if m not in slots)


@both
def test_what_padding_holds_does_not_matter(operator: str) -> None:
    inputs, pool = token(operator), states()
    for x in inputs.values():
        x[0] = torch.nan
    out = BOTH[operator][1](**inputs, state=pool, slots=torch.tensor([-1, 2], dtype=torch.int32))
    assert out.isfinite().all() and pool.isfinite().all()


@both
@pytest.mark.parametrize(
    "slots, said",
    [
        (torch.tensor([0, 5]), "slots holds 5; expected -1 \\(padding\\) to 4, the last of 5 states"),
        (torch.tensor([-2, 0]), "slots holds -2"),
        (torch.tensor([0.0, 1.0]), "slots must be int32 or int64, got float32"),
        (torch.tensor([0, 1, 2]), "slots has shape \\[3\\]; expected \\[B=2\\]"),
    ],
)
def test_slots_that_do_not_fit(operator: str, slots: Tensor, said: str) -> None:
    step, inputs = BOTH[operator][1], token(operator)
    with pytest.raises(ValueError, match=said):
        step(**inputs, state=states(), slots=slots)
    with pytest.raises(ValueError, match="state has no slots"):
        step(**inputs, state=states()[:0], slots=torch.zeros(B, dtype=torch.int64))


@both
def test_no_rows_take_no_slots(operator: str) -> None:
    pool = torch.ones(5, H, K, V)
    out = BOTH[operator][1](**token(operator, rows=0), state=pool, slots=torch.zeros(0, dtype=torch.int64))
    assert out.shape == (0, H, V) and torch.equal(pool, torch.ones(5, H, K, V))


@both
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "erase", "log_decay"])
def test_what_lies_in_the_state_is_read_as_it_was(operator: str, name: str, dtype: torch.dtype, strided: bool) -> None:
    if operator == "linear" and name in ("beta", "erase"):
        return
    sizes = (B, H, V, K) if strided else (B, H, K, V)
    memory = -torch.rand(sizes, dtype=dtype)  # all of it could be gates
    state = memory.mT if strided else memory
    shape = SHAPES[{"log_decay": "channel"}.get(name, name)]
    shape = (shape[0], *shape[2:])
    inside = memory.view(-1)[3 : 3 + torch.Size(shape).numel()].view(shape)
    given = token(operator, dtype) | {name: inside}
    apart = {n: x.clone() for n, x in given.items()}
    step, after = BOTH[operator][1], state.clone()
    torch.testing.assert_close(step(**given, state=state), step(**apart, state=after), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, after, rtol=1e-5, atol=1e-6)


@both
def test_autocast_rounds_no_product_with_the_state(operator: str) -> None:
    step, inputs = BOTH[operator][1], token(operator, torch.bfloat16)
    state = states()[:B].mT.contiguous().mT  # in columns, which C++ does not take
    again = state.clone()
    expected = step(**inputs, state=again)
    with torch.autocast("cpu", torch.bfloat16):
        found = step(**inputs, state=state)
    assert torch.equal(found, expected) and torch.equal(state, again)


@both
@pytest.mark.parametrize("stride", [(0, 15, 5, 1), (30, 15, 5, 1), (60, 15, 1, 1)])
def test_a_state_whose_numbers_are_one_in_memory(operator: str, stride: tuple[int, ...]) -> None:
    state = torch.zeros(2 * H * K * V).as_strided((B, H, K, V), stride)
    with pytest.raises(ValueError, match=r"state has strides .*one in memory"):
        BOTH[operator][1](**token(operator), state=state)


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["v", "state"])
def test_a_tangent_is_never_lost(operator: str, name: str, dtype: torch.dtype) -> None:
    """Forward mode wants no gradient: what runs without torch's knowledge would drop it without a word."""
    given = {**token(operator, dtype), "state": states(dtype)[:B].clone()}
    direction = torch.randn_like(given[name])
    whole = {n: x[:, None] if n != "state" else x for n, x in given.items()}
    _, expected = torch.func.jvp(
        lambda x: BOTH[operator][0](**whole | {name: x if name == "state" else x[:, None]}, backend="reference")[0],
        (given[name].clone(),), (direction,),
    )  # fmt: skip
    with forward_ad.dual_level():
        given[name] = forward_ad.make_dual(given[name], direction)
        found = forward_ad.unpack_dual(BOTH[operator][1](**given)).tangent
    torch.testing.assert_close(found, expected[:, 0], rtol=1e-4, atol=1e-5)


@both
def test_a_step_reads_what_its_arguments_stand_for(operator: str) -> None:
    """The imaginary part of a conjugate is negated when it is read, and some zeros have no memory."""
    step, given, state = BOTH[operator][1], token(operator), torch.randn(B, H, K, V)
    g = torch.randn(B, H, dtype=torch.complex64).conj().imag
    assert g.is_neg()
    plain, found = state.clone(), state.clone()
    wanted = step(**given, state=plain, log_decay=g.resolve_neg().contiguous())
    torch.testing.assert_close(step(**given, state=found, log_decay=g), wanted)
    torch.testing.assert_close(found, plain)
    nothing = torch._efficientzerotensor((B, H, V))
    wanted = step(**given | {"v": torch.zeros(B, H, V)}, state=plain)
    torch.testing.assert_close(step(**given | {"v": nothing}, state=found) + 0, wanted)
    torch.testing.assert_close(found, plain)


@both
@pytest.mark.parametrize(
    "graph", [torch.jit.trace, lambda step, given: make_fx(step)(*given)], ids=["trace", "make_fx"]
)
def test_a_graph_reads_what_lies_in_the_state_as_it_was(operator: str, graph: Any) -> None:
    beta = {"beta": torch.rand(2, 3)} if operator == "delta" else {}

    def step(state: Tensor) -> Tensor:
        q, k, v = state[:, :, 0], state[:, :, 1], state[:, :, 2]
        return BOTH[operator][1](q, k, v, **beta, state=state)

    plain = torch.randn(2, 3, 4, 4)
    found, made = plain.clone(), graph(step, (plain.clone(),))
    torch.testing.assert_close(made(found), step(plain))
    torch.testing.assert_close(found, plain)
