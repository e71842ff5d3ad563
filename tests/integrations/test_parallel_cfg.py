"""Guidance over two ranks: both branches in one call, one call each, and every way a pipeline may look at the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foci.core.errors import RankError, Unsupported
from foci.core.world import World
from foci.integrations import parallel_cfg

Worlds = Callable[[int], World]


class Denoiser(nn.Module):
    """A branch is the sine of what is denoised times its text; it counts its rows, and returns as Diffusers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0), requires_grad=False)
        self.rows = 0

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, return_dict: bool = True) -> Any:
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        self.rows += len(hidden_states)
        if encoder_hidden_states.isnan().any():
            raise ArithmeticError("the text is no number")
        answer = (self.weight * hidden_states * encoder_hidden_states).sin()
        return Transformer2DModelOutput(sample=answer) if return_dict else (answer,)


def batched(model: nn.Module, x: Tensor) -> Tensor:
    """As PixArt, SD3 and digits-dit do it."""
    text = torch.tensor([0.5, 2.0], dtype=x.dtype).repeat_interleave(len(x))[:, None]
    for _ in range(3):
        none, given = model(torch.cat([x, x]), text).sample.chunk(2)
        x = x + 0.1 * (none + 3 * (given - none))
    return x


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """As Wan does it."""
    for _ in range(3):
        given = model(x, torch.full_like(x, 2.0), return_dict=False)[0]
        none = model(x, torch.full_like(x, 0.5), return_dict=False)[0]
        x = x + 0.1 * (none + 3 * (given - none))
    return x


def sliced(model: nn.Module, x: Tensor) -> Tensor:
    """As QwenImage does it, which keeps the first tokens only; and by name."""
    for _ in range(3):
        given = model(x, torch.full_like(x, 2.0)).sample[:, :2]
        none = model(x, torch.full_like(x, 0.5)).sample[:, :2]
        x = x + 0.1 * torch.cat([torch.lerp(none, given, 3.0), none * given], 1)
    return x


def looking(model: nn.Module, x: Tensor) -> Tensor:
    """A pipeline that looks at the first answer before it makes the second call."""
    for _ in range(3):
        given = model(x, torch.full_like(x, 2.0), return_dict=False)[0].float()
        none = model(x, torch.full_like(x, 0.5), return_dict=False)[0]
        x = x + 0.1 * (none + 3 * (given - none))
    return x


def sometimes(model: nn.Module, x: Tensor) -> Tensor:
    """Guidance in the first steps only; the last answer is never looked at."""
    for step in range(4):
        answer = model(x, torch.full_like(x, 2.0), return_dict=False)[0]
        if step < 2:
            none = model(x, torch.full_like(x, 0.5), return_dict=False)[0]
            answer = none + 3 * (answer - none)
        x = x + 0.1 * answer
    model(x, x, return_dict=False)
    return x


def drawn(pipeline: Callable[[nn.Module, Tensor], Tensor], rows: int) -> Any:
    import torch.distributed as dist

    model, x = Denoiser().eval(), torch.randn(rows, 4)
    whole = pipeline(model, x)
    alone, model.rows = model.rows, 0
    with parallel_cfg.install(model, dist.group.WORLD) as handle:
        split = pipeline(model, x)
    return torch.equal(split, whole), alone, model.rows, handle.facts(), "forward" not in vars(model)


@pytest.mark.parametrize(
    ("pipeline", "counted", "rows_of"),
    [
        (batched, (3, 0, 0), (9, 9)),
        (twice, (0, 3, 0), (9, 9)),
        (sliced, (0, 3, 0), (9, 9)),
        (looking, (0, 0, 6), (18, 0)),
        (sometimes, (0, 2, 3), (15, 6)),
    ],
)
def test_every_pipeline_draws_what_one_process_draws(
    worlds: Worlds, pipeline: Any, counted: tuple[int, ...], rows_of: tuple[int, int]
) -> None:
    for rank, (same, alone, rows, facts, undone) in enumerate(worlds(2).run(drawn, pipeline, 3)):
        assert same and undone
        assert (facts["batched"], facts["pairs"], facts["alone"]) == counted
        assert rows == rows_of[rank] and rows <= alone


def real(name: str) -> Any:
    """Flux called once a branch, and the digits pipeline with both in one batch; against one process."""
    import torch.distributed as dist

    if name == "digits":
        from foci.accelerate import digits

        pipeline = digits.load()
        pipeline.transformer.double()
        whole = pipeline([3, 7], steps=2)
        with parallel_cfg.install(pipeline.transformer, dist.group.WORLD) as handle:
            return pipeline([3, 7], steps=2), whole, handle.facts()
    from tests.integrations.models import build

    small = build("flux")
    model: Any = small.model.requires_grad_(False)
    other = {**small.inputs, "encoder_hidden_states": torch.randn(2, 5, 24), "txt_ids": torch.zeros(5, 3)}

    def guided() -> Any:
        given, none = model(**small.inputs, return_dict=False)[0], model(**other, return_dict=False)[0]
        return none + 2.0 * (given - none)

    whole = guided()
    with parallel_cfg.install(model, dist.group.WORLD) as handle:
        return guided(), whole, handle.facts()


@pytest.mark.parametrize("name", ["digits", "flux"])
def test_real_pipelines(worlds: Worlds, name: str) -> None:
    for split, whole, facts in worlds(2).run(real, name):
        assert torch.allclose(split, whole, rtol=0, atol=1e-6)
        assert (facts["batched"], facts["pairs"]) == ((2, 0) if name == "digits" else (0, 1))


def failing(branch: int) -> Any:
    import torch.distributed as dist

    model, x = Denoiser().eval(), torch.randn(3, 4)
    with parallel_cfg.install(model, dist.group.WORLD):
        texts = [torch.full_like(x, float("nan") if branch == place else 1.0) for place in range(2)]
        first, second = (model(x, text, return_dict=False)[0] for text in texts)
        return first + second


@pytest.mark.parametrize("branch", [0, 1])
def test_a_branch_that_fails_is_named_on_both_ranks(worlds: Worlds, branch: int) -> None:
    outcomes = worlds(2).outcomes(failing, branch)
    words = f"parallel_cfg: rank {branch} failed: ArithmeticError: the text is no number"
    assert [str(each.error) for each in outcomes] == [words] * 2
    assert all(isinstance(each.error, RankError) for each in outcomes)


class TwoTensors(nn.Module):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, hidden_states


def refused() -> Any:
    import torch.distributed as dist

    model = TwoTensors().eval()
    parallel_cfg.install(model, dist.group.WORLD)
    first, second = model(torch.randn(3, 4)), model(torch.randn(3, 4))
    return first[0] + second[0]


def three() -> Any:
    import torch.distributed as dist

    return parallel_cfg.install(Denoiser().eval(), dist.group.WORLD)


def test_refusals(worlds: Worlds) -> None:
    with pytest.raises((Unsupported, RankError), match="it returned 2 tensors; expected one"):
        worlds(2).run(refused)
    with pytest.raises(ValueError, match=r"group has 3 ranks; guidance has two branches, expected 2 \(or 1\)"):
        worlds(3).run(three)
