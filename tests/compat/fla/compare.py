"""Ours against theirs: outputs, final states and every gradient; with a state and without, whole and packed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

State = Any  # None, a tensor, or a tuple of tensors
Function = Callable[..., tuple[Tensor, State]]
ENDS = [0, 5, 5, 6, 13]  # one document is empty, one a single token


def forms(*names: str) -> pytest.MarkDecorator:
    """Every name in float32, and the first in float64: they share what they compute."""
    pairs = [(names[0], torch.float64), *((name, torch.float32) for name in names)]
    return pytest.mark.parametrize(("name", "dtype"), pairs, ids=lambda x: str(x).removeprefix("torch."))


@dataclass(frozen=True)
class Problem:
    """Arguments by their names with us.

    tokens: shapes behind [B,T]; a name with `log` in `decays` is made negative. whole: arguments that have no tokens.
    states: shapes behind [N]; steps: how many entries a token has, where it is not one. length: the tokens of a batch.
    """

    tokens: Mapping[str, tuple[int, ...]]
    states: tuple[tuple[int, ...], ...]
    decays: tuple[str, ...] = ("g", "gk", "gv", "w")
    positive: tuple[str, ...] = ()
    whole: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    length: int = 17

    def make(self, B: int, T: int, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made: dict[str, Tensor] = {}
        for name, shape in self.tokens.items():
            x = torch.randn(B, T * self.steps.get(name, 1), *shape, generator=generator)
            if name in self.decays:
                x = torch.nn.functional.logsigmoid(x) * 2
            x = x.sigmoid() if name in self.positive else x
            made[name] = torch.nn.functional.normalize(x, dim=-1) if name in ("k", "p", "a", "b", "kk") else x
        return made | {name: torch.randn(shape, generator=generator) for name, shape in self.whole.items()}

    def make_states(self, N: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        return tuple(
            torch.rand(N, *shape, generator=generator) for shape in self.states
        )  # sums of keys are not negative


def one(states: tuple[Tensor, ...]) -> State:
    """How FLA takes states: one as it is, several as a tuple, none as None."""
    return None if not states else states[0] if len(states) == 1 else states


def several(state: State) -> tuple[Tensor, ...]:
    return () if state is None else (state,) if isinstance(state, Tensor) else tuple(state)


def leaves(
    inputs: Mapping[str, Tensor], states: tuple[Tensor, ...], dtype: torch.dtype
) -> tuple[dict[str, Tensor], Any]:
    copies = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    return copies, tuple(x.to(dtype).requires_grad_() for x in states)


def results(out: Tensor, final: State, inputs: dict[str, Tensor], states: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Everything to compare, by name; gradients of one fixed random sum of what came out."""
    generator = torch.Generator().manual_seed(2)
    found = {"out": out} | {f"final {i}": x for i, x in enumerate(several(final))}
    loss = sum((x.double() * torch.randn(x.shape, generator=generator)).sum() for x in found.values())
    wanted = inputs | {f"state {i}": x for i, x in enumerate(states)}
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)  # type: ignore[arg-type]
    named = zip(wanted, gradients, strict=True)
    return found | {f"gradient of {name}": x for name, x in named if x is not None}


def check(ours: Function, theirs: Function, problem: Problem, dtype: torch.dtype, packed: bool = True) -> None:
    """theirs(state, **tokens and whole arguments) -> (out, final state), in float32; ours by FLA's own names."""
    inputs = problem.make(2, problem.length)
    options = {"output_final_state": True, **problem.options}
    for states in ((), problem.make_states(2)):
        mine, my_states = leaves(inputs, states, dtype)
        out, final = ours(**mine, initial_state=one(my_states), **options)
        other, other_states = leaves(inputs, states, torch.float32)
        agree(results(out, final, mine, my_states), results(*theirs(one(other_states), **other), other, other_states))
        assert all(x.dtype == dtype and x.is_contiguous() for x in (out, *several(final)))
    quiet, nothing = ours(**mine, initial_state=one(my_states), **options | {"output_final_state": False})
    assert nothing is None
    torch.testing.assert_close(quiet, out)
    if packed:
        check_packed(ours, theirs, problem, dtype)


def check_packed(ours: Function, theirs: Function, problem: Problem, dtype: torch.dtype) -> None:
    inputs, states = problem.make(1, ENDS[-1]), problem.make_states(len(ENDS) - 1)
    mine, my_states = leaves(inputs, states, dtype)
    options = {"output_final_state": True, **problem.options}
    out, final = ours(**mine, initial_state=one(my_states), cu_seqlens=torch.tensor(ENDS), **options)
    other, other_states = leaves(inputs, states, torch.float32)
    outs, finals = [], []
    for n, (start, stop) in enumerate(itertools.pairwise(ENDS)):
        state = tuple(x[n : n + 1] for x in other_states)
        if start == stop:  # nothing happens to its state
            finals.append(state)
            continue
        here = {
            name: x if name in problem.whole else x[:, start * (n_ := problem.steps.get(name, 1)) : stop * n_]
            for name, x in other.items()
        }
        part, after = theirs(one(state), **here)
        outs.append(part)
        finals.append(several(after))
    joined = tuple(torch.cat(parts) for parts in zip(*finals, strict=True))
    agree(results(out, final, mine, my_states), results(torch.cat(outs, 1), joined, other, other_states))


def agree(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Relative RMS error at most 1e-5: what float32 may err by, and theirs is float32."""
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        y = theirs[name].double()
        assert x.shape == y.shape, f"{name}: {list(x.shape)} and theirs {list(y.shape)}"
        error = (x.double() - y).square().mean().sqrt() / y.square().mean().sqrt().clamp_min(1e-12)
        assert error <= 1e-5, f"{name}: relative RMS error {error:.1e}"
