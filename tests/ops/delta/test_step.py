"""One token at a time, in place, is the whole sequence at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import foci

B, T, G, H, K, V = 2, 7, 2, 4, 3, 5


def decay(kind: str | None) -> Tensor | None:
    shape = {None: None, "head": (H,), "token": (B, T, H), "channel": (B, T, H, K)}[kind]
    return None if shape is None else -torch.rand(shape, dtype=torch.float64)


@pytest.mark.parametrize("with_extra", [False, True])
@pytest.mark.parametrize("kind", [None, "head", "token", "channel"])
def test_steps_are_the_sequence(kind: str | None, with_extra: bool) -> None:
    q, k = (torch.randn(B, T, G, K, dtype=torch.float64) for _ in range(2))
    v, g = torch.randn(B, T, H, V, dtype=torch.float64), decay(kind)
    beta = torch.rand(B, T, H, dtype=torch.float64)
    extra = torch.randn(B, T, G, K, dtype=torch.float64) if with_extra else None
    state = torch.randn(B, H, K, V, dtype=torch.float64)
    out, final = foci.delta_rule(q, k, v, beta, log_decay=g, erase=extra, state=state, scale=0.3, return_state=True)
    place = state.data_ptr()
    for t in range(T):
        now = g if g is None or kind == "head" else g[:, t]
        of_token = None if extra is None else extra[:, t]
        found = foci.delta_rule_step(
            q[:, t], k[:, t], v[:, t], beta[:, t], state, log_decay=now, erase=of_token, scale=0.3
        )
        torch.testing.assert_close(found, out[:, t])
    torch.testing.assert_close(state, final)
    assert state.data_ptr() == place


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    state = torch.zeros(B, H, K, V)
    q, v = torch.ones(B, G, K, dtype=dtype), torch.ones(B, H, V, dtype=dtype)
    found = foci.delta_rule_step(q, q, v, torch.ones(B, H, dtype=q.dtype), state)
    assert found.dtype == dtype
    assert torch.equal(state, torch.ones_like(state))


def test_it_forgets_at_minus_infinity() -> None:
    state = torch.full((B, H, K, V), 1e30)
    q, v = torch.ones(B, G, K), torch.ones(B, H, V)
    found = foci.delta_rule_step(
        q, q, v, torch.ones(B, H, dtype=q.dtype), state, log_decay=torch.full((H,), -torch.inf), scale=1.0
    )
    assert torch.equal(found, torch.full((B, H, V), float(K)))


def test_compiled_in_one_graph() -> None:
    q, v = torch.randn(B, G, K), torch.randn(B, H, V)
    states = [torch.randn(1, H, K, V).expand(B, -1, -1, -1).clone() for _ in range(2)]
    states[1].copy_(states[0])
    step = torch.compile(foci.delta_rule_step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        args = (q, q, v, torch.rand(B, H))
        torch.testing.assert_close(step(*args, states[0]), foci.delta_rule_step(*args, states[1]))
    torch.testing.assert_close(*states)


SLOTS = (torch.tensor([4, 0]), torch.tensor([-1, 2]), torch.tensor([-1, -1]))


def slotted(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """What stands before the state, and five states."""
    q, k = (torch.randn(B, G, K, dtype=dtype) for _ in range(2))
    return [q, k, torch.randn(B, H, V, dtype=dtype), torch.rand(B, H, dtype=dtype)], torch.randn(
        5, H, K, V, dtype=dtype
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_slots_are_the_states_of_rows(slots: Tensor, dtype: torch.dtype) -> None:
    args, states = slotted(dtype)
    before, expected = states.clone(), states.clone()
    out = foci.delta_rule_step(*args, states, log_decay=-torch.ones(B, H), slots=slots)
    for b, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert torch.equal(out[b], torch.zeros(H, V, dtype=dtype))
            continue
        row = before[slot : slot + 1].clone()
        alone = foci.delta_rule_step(*(x[b : b + 1] for x in args), row, log_decay=-torch.ones(1, H))
        torch.testing.assert_close(out[b], alone[0])
        expected[slot] = row[0]
    torch.testing.assert_close(states, expected)
    assert all(torch.equal(states[m], before[m]) for m in range(5) if m not in slots.tolist())


def test_what_padding_holds_does_not_matter() -> None:
    args, states = slotted(torch.float32)
    for x in args:
        x[0] = torch.nan
    out = foci.delta_rule_step(*args, states, slots=torch.tensor([-1, 2], dtype=torch.int32))
    assert out.isfinite().all() and states.isfinite().all()


@pytest.mark.parametrize(
    "slots, said",
    [
        (torch.tensor([0, 5]), "slots holds 5; expected -1 \\(padding\\) to 4, the last of 5 states"),
        (torch.tensor([-2, 0]), "slots holds -2"),
        (torch.tensor([0.0, 1.0]), "slots must be int32 or int64, got float32"),
        (torch.tensor([0, 1, 2]), "slots has shape \\[3\\]; expected \\[B=2\\]"),
    ],
)
def test_slots_that_do_not_fit(slots: Tensor, said: str) -> None:
    args, states = slotted(torch.float32)
    with pytest.raises(ValueError, match=said):
        foci.delta_rule_step(*args, states, slots=slots)
    with pytest.raises(ValueError, match="state has no slots"):
        foci.delta_rule_step(*args, states[:0], slots=torch.zeros(B, dtype=torch.int64))


def test_slots_compile_in_one_graph() -> None:
    args, states = slotted(torch.float32)
    again, slots = states.clone(), torch.tensor([3, -1])
    step = torch.compile(foci.delta_rule_step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(step(*args, states, slots=slots), foci.delta_rule_step(*args, again, slots=slots))
    torch.testing.assert_close(states, again)


def test_no_rows_take_no_slots() -> None:
    states = torch.ones(5, H, K, V)
    nothing = torch.zeros(0, dtype=torch.int64)
    out = foci.delta_rule_step(
        torch.ones(0, G, K), torch.ones(0, G, K), torch.ones(0, H, V), torch.rand(0, H), states, slots=nothing
    )
    assert out.shape == (0, H, V) and torch.equal(states, torch.ones(5, H, K, V))
