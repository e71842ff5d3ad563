"""Gated slot attention against FLA's naive form, with gates and without (ABC), with grouped queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.compat import fla as ours
from tests.compat.fla.compare import Problem, State, check, forms

H, K, V, M = 2, 8, 5, 4


@pytest.mark.parametrize("gated", [True, False], ids=["gates", "abc"])
@pytest.mark.parametrize("groups", [1, 3])
@forms("chunk_gsa", "fused_recurrent_gsa")
def test_gsa(fla: Any, name: str, groups: int, gated: bool, dtype: torch.dtype) -> None:
    naive = fla.naive("gsa/naive.py", "naive_recurrent_gsa")

    def theirs(state: State, **tokens: Tensor) -> tuple[Tensor, State]:
        return naive(**tokens, initial_state=state, output_final_state=True)  # type: ignore[no-any-return]

    tokens = {"q": (groups * H, K), "k": (H, K), "v": (H, V), "s": (H, M)} | ({"g": (H, M)} if gated else {})
    check(getattr(ours, name), theirs, Problem(tokens, ((H, K, M), (H, M, V))), dtype)


def test_reverse() -> None:
    tokens = {"q": (H, K), "k": (H, K), "v": (H, V), "s": (H, M), "g": (H, M)}
    inputs = Problem(tokens, ()).make(2, 17)
    out, states = ours.fused_recurrent_gsa(**inputs, output_final_state=True, reverse=True)  # type: ignore[arg-type]
    turned = {name: x.flip(1) for name, x in inputs.items()}
    other, expected = ours.fused_recurrent_gsa(**turned, output_final_state=True)  # type: ignore[arg-type]
    torch.testing.assert_close(out, other.flip(1))
    torch.testing.assert_close(states, expected)


def test_half_precision() -> None:
    """Relative RMS error at most 5e-3 of output and gradients, against float64 on the same rounded inputs."""
    tokens = {"q": (H, K), "k": (H, K), "v": (H, V), "s": (H, M), "g": (H, M)}
    half = {name: x.bfloat16().requires_grad_() for name, x in Problem(tokens, ()).make(1, 100).items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in half.items()}
    (out, _), (expected, _) = ours.chunk_gsa(**half), ours.chunk_gsa(**exact)  # type: ignore[arg-type]
    assert out.dtype == torch.bfloat16
    mine = [out, *torch.autograd.grad(out.sum(), list(half.values()))]
    for x, y in zip(mine, [expected, *torch.autograd.grad(expected.sum(), list(exact.values()))], strict=True):
        assert (x.double() - y).square().mean().sqrt() <= 5e-3 * y.square().mean().sqrt()


def test_arguments_that_do_not_fit() -> None:
    x = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match="checkpoint_level must be 0, 1 or 2, got 3"):
        ours.chunk_gsa(x, x, x, x, checkpoint_level=3)
    with pytest.raises(ValueError, match="q has 3 heads, k has 2; expected a multiple"):
        ours.chunk_gsa(x, x[:, :, :2], x[:, :, :2], x[:, :, :2])
    for s, said in ((x[0], "s has 3 dimensions"), (x.tolist(), "s must be a tensor"), (x[:, :1], "s has shape")):
        with pytest.raises((TypeError, ValueError), match=f"^fla: {said}"):
            ours.chunk_gsa(x, x, x, s)
    with pytest.raises(TypeError, match="fla: initial_state must be a tensor, got 1"):
        ours.chunk_gsa(x.repeat(1, 1, 2, 1), x, x, x, -x, initial_state=(1, 1))
