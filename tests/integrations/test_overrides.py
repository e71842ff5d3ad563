"""Forwards in others' places: undone exactly, in any order, and never carried along by a copy."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from foci.integrations.overrides import Overrides, require_evaluating, require_sampling


def plus(overrides: Overrides, module: nn.Module, amount: float) -> None:
    before: Callable[..., Tensor] = overrides.put(module, lambda *args, **kwargs: before(*args, **kwargs) + amount)


def test_one_instance_only_and_back() -> None:
    module, other, x = nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2)
    before = module(x)
    with Overrides() as overrides:
        plus(overrides, module, 1.0)
        assert torch.equal(module(x), before + 1)
        assert list(inspect.signature(module.forward).parameters) == ["input"]
        assert "forward" not in vars(other)
    assert "forward" not in vars(module) and torch.equal(module(x), before)


@pytest.mark.parametrize("first", [0, 1])
def test_two_are_taken_back_in_any_order(first: int) -> None:
    module, x, both = nn.Linear(2, 2), torch.ones(1, 2), [Overrides(), Overrides()]
    before = module(x)
    plus(both[0], module, 1.0)
    plus(both[1], module, 10.0)
    assert torch.equal(module(x), before + 1 + 10)
    both[first].restore()
    assert torch.equal(module(x), before + (10.0, 1.0)[first])
    both[1 - first].restore()
    both[1 - first].restore()
    assert "forward" not in vars(module)


def test_an_instance_gets_back_the_forward_it_had() -> None:
    module = nn.Linear(2, 2)
    own = module.forward = lambda x: x  # type: ignore[method-assign, assignment]
    with Overrides() as overrides:
        plus(overrides, module, 1.0)
    assert vars(module)["forward"] is own


def test_a_copy_runs_the_original_with_its_own_weights() -> None:
    module, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    before = module(x)
    with Overrides() as overrides:
        plus(overrides, module[0], 1.0)
        twin = copy.deepcopy(module)
        with pytest.raises(TypeError, match=r"Linear runs across ranks and cannot be pickled; call restore\(\)"):
            pickle.dumps(module)
        module[0].weight.detach().zero_()
        assert torch.equal(twin(x), before)


def test_only_for_sampling() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"mine: Linear is in training mode; call .eval\(\) first"):
        require_evaluating("mine", module)
    module.eval()
    require_evaluating("mine", module)
    with pytest.raises(ValueError, match="mine: it is for sampling and gives no gradients"):
        require_sampling("mine", module, [])
    with torch.no_grad():
        require_sampling("mine", module, [torch.ones(1, requires_grad=True)])
    module.requires_grad_(False)
    require_sampling("mine", module, [torch.ones(1), None])
    with pytest.raises(ValueError, match="gives no gradients"):
        require_sampling("mine", module, [torch.ones(1, requires_grad=True)])
