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
    extra = torch.randn(H, K, dtype=torch.float64) if with_extra else None
    state = torch.randn(B, H, K, V, dtype=torch.float64)
    out, final = foci.linear_attention(q, k, v, log_decay=g, bonus=extra, state=state, scale=0.3, return_state=True)
    place = state.data_ptr()
    for t in range(T):
        now = g if g is None or kind == "head" else g[:, t]
        of_token = None if extra is None else extra
        found = foci.linear_attention_step(q[:, t], k[:, t], v[:, t], state, log_decay=now, bonus=of_token, scale=0.3)
        torch.testing.assert_close(found, out[:, t])
    torch.testing.assert_close(state, final)
    assert state.data_ptr() == place


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    state = torch.zeros(B, H, K, V)
    q, v = torch.ones(B, G, K, dtype=dtype), torch.ones(B, H, V, dtype=dtype)
    found = foci.linear_attention_step(q, q, v, state)
    assert found.dtype == dtype
    assert torch.equal(state, torch.ones_like(state))


def test_it_forgets_at_minus_infinity() -> None:
    state = torch.full((B, H, K, V), 1e30)
    q, v = torch.ones(B, G, K), torch.ones(B, H, V)
    found = foci.linear_attention_step(q, q, v, state, log_decay=torch.full((H,), -torch.inf), scale=1.0)
    assert torch.equal(found, torch.full((B, H, V), float(K)))


def test_compiled_in_one_graph() -> None:
    q, v = torch.randn(B, G, K), torch.randn(B, H, V)
    states = [torch.randn(1, H, K, V).expand(B, -1, -1, -1).clone() for _ in range(2)]
    states[1].copy_(states[0])
    step = torch.compile(foci.linear_attention_step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        args = (q, q, v)
        torch.testing.assert_close(step(*args, states[0]), foci.linear_attention_step(*args, states[1]))
    torch.testing.assert_close(*states)
