"""A wrapper on every rank of a world against the operator in one process: outputs and every gradient, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import foci
from foci.core.world import World
from foci.parallel.operators import Letters, Operator, operator_of

Wrap = Callable[[Any], Any]
Hold = Callable[[int], list[int]]


def plain(lengths: tuple[int, ...]) -> list[list[int]]:
    """The positions of each rank where rank r's run follows that of rank r - 1."""
    found, start = [], 0
    for length in lengths:
        found.append(list(range(start, start + length)))
        start += length
    return found


def even(T: int, size: int) -> tuple[int, ...]:
    return tuple(T // size + (rank < T % size) for rank in range(size))


def mask_of(words: Mapping[str, Any]) -> Any:
    """A mask from words that travel to ranks: {"Causal": (), "Window": (2, 0), "Lengths": ([3, 5],)}."""
    mask = None
    for name, args in words.items():
        each = getattr(foci, name)(*(torch.tensor(a) if isinstance(a, list) else a for a in args))
        mask = each if mask is None else mask & each
    return mask


def taken(name: str, tensor: Tensor, letters: Mapping[str, Letters], held: Mapping[str, list[int]]) -> Tensor:
    """This rank's part of an argument: its positions where the argument has tokens, all of it elsewhere."""
    each = letters.get(name)
    if name == "log_decay" and tensor.dim() == 1:
        return tensor
    if each is None:
        return tensor
    if name == "log_decay" and tensor.dim() == 3 and each.names[-1] == "K":
        each = Letters(each.names[:-1])
    place = each.token(tensor)
    if place is None or (each.broadcast and tensor.shape[place] == 1):
        return tensor
    letter = "T" if "T" in each.names else "S"
    return tensor.index_select(place, torch.tensor(held[letter], dtype=torch.int64))


def loss_of(operator: Operator, outputs: tuple[Tensor | None, ...], ranks: int) -> Tensor:
    """A loss in which every output counts; what all ranks have alike counts once among them."""
    total = torch.zeros((), dtype=torch.float64)
    for letters, output in zip(operator.results, outputs, strict=False):
        if output is not None:
            weight = torch.linspace(-1, 1, output.shape[-1], dtype=torch.float64)
            term = (output.masked_fill(output == -torch.inf, 0.0).double() * weight).sin().sum()
            total = total + (term if "T" in letters.names else term / ranks)
    return total


def called(op: Any, inputs: dict[str, Tensor], options: dict[str, Any], ranks: int) -> Any:
    """The outputs of `op` and the gradient of every input."""
    options = dict(options)
    mask = mask_of(options.pop("mask", {}))
    leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    if (dense := leaves.pop("dense", None)) is not None:
        mask = foci.Dense(dense) if mask is None else mask & foci.Dense(dense)
    result = op(**leaves, **options, **({} if mask is None else {"mask": mask}))
    outputs = result if isinstance(result, tuple) else (result,)
    operator = operator_of(op)
    assert operator is not None
    loss_of(operator.operator, outputs, ranks).backward()
    return [None if x is None else x.detach() for x in outputs], {name: x.grad for name, x in leaves.items()}


def on_rank(
    wrap: Wrap, function: str, inputs: dict[str, Tensor], options: dict[str, Any], held: list[dict[str, list[int]]]
) -> Any:
    op = getattr(foci, function)
    letters = known(op).letters
    mine = {name: taken(name, x, letters, held[dist.get_rank()]) for name, x in inputs.items()}
    return called(wrap(op), mine, options, dist.get_world_size())


def known(op: Any) -> Operator:
    operator = operator_of(op)
    assert isinstance(operator, Operator)
    return operator


def prove(
    world: World,
    wrap: Wrap,
    function: str,
    inputs: dict[str, Tensor],
    options: dict[str, Any] | None = None,
    held: list[dict[str, list[int]]] | None = None,
    budget: float = 1e-9,
) -> None:
    """Raise AssertionError naming the tensor and the rank where a wrapper differs from one process.

    `held`: the positions of each rank, by letter; without it, runs of even lengths.
    """
    options = options or {}
    T = next(iter(inputs.values())).shape[1]
    S = inputs["k"].shape[1] if "k" in inputs else T
    if held is None:
        both = zip(plain(even(T, world.size)), plain(even(S, world.size)), strict=True)
        held = [{"T": t, "S": s} for t, s in both]
    operator = known(getattr(foci, function))
    torch.manual_seed(0)
    outputs, grads = called(operator.function, inputs, options, 1)
    for rank, (ours, gradients) in enumerate(world.run(on_rank, wrap, function, inputs, options, held)):
        for letters, mine, whole in zip(operator.results, ours, outputs, strict=False):
            if whole is None:
                assert mine is None
                continue
            expected = whole[:, held[rank]["T"]] if "T" in letters.names else whole
            close(f"output {letters.names} on rank {rank}", mine, expected, budget)
        for name, gradient in gradients.items():
            expected = taken(name, grads[name], operator.letters, held[rank])
            close(f"gradient of {name} on rank {rank}", gradient, expected, budget)


def close(what: str, got: Tensor | None, expected: Tensor, budget: float) -> None:
    assert got is not None, f"{what} is None"
    assert got.shape == expected.shape and got.dtype == expected.dtype, f"{what}: {got.dtype} {list(got.shape)}"
    same = (got == expected) | ((got - expected).abs() <= budget * (1 + expected.abs()))
    assert bool(same.all()), f"{what}: off by {(got - expected).abs().max().item():.2e}"
