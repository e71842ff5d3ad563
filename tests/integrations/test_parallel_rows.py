"""Rows of a batch over ranks: every row computed once, the answer whole on all, and nothing guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foci.core.errors import RankError, Unsupported
from foci.core.world import World
from foci.integrations import parallel_rows

Worlds = Callable[[int], World]


def called(name: str, rows: int) -> Any:
    """On a rank: a Diffusers model's answer split and whole, how many rows this rank saw, whether all is undone."""
    import torch.distributed as dist

    from tests.integrations.models import build

    small = build(name)
    model: Any = small.model.double().requires_grad_(False)
    inputs = {key: repeated(key, value, rows) for key, value in small.inputs.items()}
    whole = model(**inputs).sample
    seen: list[int] = []
    with parallel_rows.install(model, dist.group.WORLD) as handle:
        hook = model.register_forward_pre_hook(lambda *_: None)
        inside = next(module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d))
        hook = inside.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        split = model(**inputs).sample
        (same,) = model(**inputs, return_dict=False)
        hook.remove()
    return split, same, whole, seen[0], handle.facts(), "forward" not in vars(model)


def repeated(name: str, value: Any, rows: int) -> Any:
    if isinstance(value, dict):
        return {key: repeated(key, part, rows) for key, part in value.items()}
    if not isinstance(value, Tensor):
        return value
    value = value.double() if value.is_floating_point() else value
    if name in ("img_ids", "txt_ids"):
        return value
    return torch.cat([value] * rows)[:rows] + (0 if value.dtype == torch.int64 else torch.randn(rows, *value.shape[1:]))


@pytest.mark.parametrize(
    ("size", "name", "rows"), [(2, "flux", 4), (3, "pixart", 4), (2, "sd3", 3), (3, "dit", 2), (4, "unet", 4)]
)
def test_equal_to_one_process(worlds: Worlds, size: int, name: str, rows: int) -> None:
    results = worlds(size).run(called, name, rows)
    for rank, (split, same, whole, seen, facts, undone) in enumerate(results):
        assert torch.allclose(split, whole, rtol=0, atol=1e-12 * whole.abs().max().item())
        assert torch.equal(split, same) and torch.equal(split, results[0][0])
        assert facts == {"ranks": size, "calls": 2} and undone
        assert seen == max(1, rows // size + (rank < rows % size))


class Denoiser(nn.Module):
    """Adds what it is given; `odd` has rows or not, and nobody knows."""

    def forward(self, hidden_states: Tensor, odd: Tensor | None = None, fail: bool = False) -> tuple[Any, ...]:
        if fail and hidden_states.min() > 0:
            raise ArithmeticError("positive")
        return (hidden_states if odd is None else hidden_states + odd,)


def unknown(how: str) -> Any:
    import torch.distributed as dist

    model, x = Denoiser().eval(), torch.arange(8.0).view(4, 2)
    if how == "unknown":
        parallel_rows.install(model, dist.group.WORLD)
        model(x, odd=x)
    if how == "rows":
        with parallel_rows.install(model, dist.group.WORLD, by_row=["odd"]):
            return torch.equal(model(x, odd=x)[0], 2 * x)
    if how == "whole":
        with parallel_rows.install(model, dist.group.WORLD, whole=["odd"]):
            return torch.equal(model(x, odd=torch.ones(2))[0], x + 1)
    if how == "count":
        parallel_rows.install(model, dist.group.WORLD, by_row=["odd"])
        model(x, odd=x[:3])
    if how == "text":
        parallel_rows.install(model, dist.group.WORLD)
        model([x])  # type: ignore[arg-type]
    if how == "ranks":
        parallel_rows.install(model, dist.group.WORLD)
        model(x if dist.get_rank() else x.double())
    parallel_rows.install(model, dist.group.WORLD)
    return model(x, fail=True)


def test_arguments_are_not_guessed(worlds: Worlds) -> None:
    with pytest.raises(ValueError, match=r"not known whether argument 'odd' \(4, 2\) has one row for each picture"):
        worlds(2).run(unknown, "unknown")
    assert worlds(2).run(unknown, "rows") == worlds(2).run(unknown, "whole") == [True, True]
    with pytest.raises(ValueError, match="argument 'odd' has 3 rows; expected 4, or 1"):
        worlds(2).run(unknown, "count")
    with pytest.raises(Unsupported, match="its first argument is list"):
        worlds(2).run(unknown, "text")


def test_ranks_that_call_differently_or_fail_say_so_everywhere(worlds: Worlds) -> None:
    outcomes = worlds(2).outcomes(unknown, "ranks")
    assert len({str(each.error) for each in outcomes}) == 1
    assert "parallel_rows: ranks disagree" in str(outcomes[0].error)
    outcomes = worlds(2).outcomes(unknown, "fail")
    assert all(isinstance(each.error, RankError) for each in outcomes)
    assert {str(each.error) for each in outcomes} == {"parallel_rows: rank 1 failed: ArithmeticError: positive"}


def compiled(regions: bool) -> Any:
    import torch._dynamo
    import torch.distributed as dist

    from tests.integrations.models import build

    small = build("dit")
    model: Any = small.model.requires_grad_(False)
    whole = model(**small.inputs).sample
    torch._dynamo.reset()
    graphs: list[Any] = []

    def keep(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    outside = model
    if regions:
        for block in model.transformer_blocks:
            block.compile(backend=keep)
    else:
        outside = torch.compile(model, backend=keep)
    with parallel_rows.install(model, dist.group.WORLD):
        return (outside(**small.inputs).sample - whole).abs().max().item(), len(graphs)


@pytest.mark.parametrize("regions", [True, False])
def test_round_compiled_blocks_and_inside_a_compiled_model(worlds: Worlds, regions: bool) -> None:
    """Blocks that are compiled stay compiled; of a model compiled as a whole the call runs as it is written."""
    for apart, graphs in worlds(2).run(compiled, regions):
        assert apart < 1e-5
        assert (graphs > 0) == regions
