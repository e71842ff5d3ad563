"""The equation, token by token in numbers small enough to check by hand."""

from __future__ import annotations

import torch

from foci.ops.delta.call import bind
from foci.ops.delta.reference import equation, forward, reasons

Q = torch.tensor([1.0, 1.0, 1.0]).view(1, 3, 1, 1).double()
V = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1).double()
ONE = torch.ones(1, 3, 1).double()
HALF = torch.tensor([0.5], dtype=torch.float64).log()


def out(beta: torch.Tensor = ONE, **kwargs: object) -> list[float]:
    return forward(bind(Q, Q, V, beta, scale=1.0, **kwargs))[0].flatten().tolist()  # type: ignore[arg-type]


def test_by_hand() -> None:
    assert out() == [1, 10, 100]  # the same key: each value replaces the last
    assert out(ONE / 2) == [0.5, 5.25, 52.625]
    assert out(2 * ONE) == [2, 18, 182]
    assert out(ONE / 2, log_decay=HALF) == [0.5, 5.125, 51.28125]
    assert out(erase=0 * Q) == [1, 11, 111]  # nothing is read, nothing erased: linear attention
    assert out(ONE / 2, state=torch.full((1, 1, 1, 1), 4.0).double()) == [2.5, 6.25, 53.125]
    assert out(offsets=torch.tensor([0, 1, 1, 3])) == [1, 10, 100]


def test_it_takes_everything_and_computes_in_the_dtype_asked() -> None:
    call = bind(Q.half(), Q.half(), V.half(), ONE)
    assert reasons(call) == []
    assert [x.dtype for x in forward(call)] == [torch.float16, torch.float32]
    assert equation(call, torch.float16)[0].dtype == torch.float16
