"""The equation, token by token in numbers small enough to check by hand."""

from __future__ import annotations

import torch

from foci.ops.decay.call import bind
from foci.ops.decay.reference import equation, forward, reasons

Q = torch.tensor([1.0, 1.0, 1.0]).view(1, 3, 1, 1).double()
V = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1).double()
HALF = torch.tensor([0.5], dtype=torch.float64).log()


def out(**kwargs: object) -> list[float]:
    return forward(bind(Q, Q, V, scale=1.0, **kwargs))[0].flatten().tolist()  # type: ignore[arg-type]


def test_by_hand() -> None:
    assert out() == [1, 11, 111]
    assert out(log_decay=HALF) == [1, 10.5, 105.25]
    assert out(log_decay=HALF, bonus=torch.full((1, 1), 3.0).double()) == [3, 31, 310.5]
    assert out(causal=False) == [111, 111, 111]
    assert out(state=torch.full((1, 1, 1, 1), 4.0).double(), log_decay=HALF) == [3, 11.5, 105.75]
    assert out(offsets=torch.tensor([0, 1, 1, 3])) == [1, 10, 110]


def test_it_takes_everything_and_computes_in_the_dtype_asked() -> None:
    call = bind(Q.half(), Q.half(), V.half())
    assert reasons(call) == []
    assert [x.dtype for x in forward(call)] == [torch.float16, torch.float32]
    assert equation(call, torch.float16)[0].dtype == torch.float16


def test_the_state_given_is_not_the_state_returned() -> None:
    state = torch.zeros(1, 1, 1, 1).double()
    call = bind(Q[:, :0], Q[:, :0], V[:, :0], state=state)
    assert forward(call)[1].data_ptr() != state.data_ptr()
