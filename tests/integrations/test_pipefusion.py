"""PipeFusion: exact while all of a picture goes through the stages, near after, and what it cannot do is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foci.core.errors import RankError, Unsupported
from foci.core.world import World
from foci.integrations import pipefusion
from foci.integrations.diffusers import Handle, Target, route
from foci.integrations.pipefusion import _shares, psnr

Worlds = Callable[[int], World]
TIMES = (900.0, 700.0, 500.0, 300.0)


def small(name: str) -> Any:
    """A model of three or more blocks in float64, and the inputs of one call; the same on every rank."""
    from tests.integrations.models import BUILDERS, build

    assert name in BUILDERS
    chosen = build(name)
    model: Any = chosen.model
    if name != "flux":
        config = {**model.config, "num_layers": 4}
        torch.manual_seed(0)
        model = type(model).from_config(config)
        for parameter in model.parameters():
            parameter.detach().normal_(0, 1.0 / max(parameter[0].numel() if parameter.dim() else 1, 1) ** 0.5)
    return model.double().eval().requires_grad_(False), {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in chosen.inputs.items()
    }


def drawn(model: nn.Module, inputs: dict[str, Any], times: tuple[float, ...], calls: int = 1) -> list[Tensor]:
    """A picture drawn in as many steps: what the model answered in each, the next step's input being made of it."""
    answers, x = [], inputs["hidden_states"]
    for time in times:
        for branch in range(calls):
            given = {**inputs, "hidden_states": x, "timestep": torch.full((len(x),), time) / scale(model)}
            if branch:
                given["encoder_hidden_states"] = 0.5 * inputs["encoder_hidden_states"]
            answer = model(**given, return_dict=False)[0]
            answers.append(answer)
        x = x + 0.02 * answer[:, : x.shape[1]]
    return answers


def scale(model: nn.Module) -> float:
    return 1000.0 if type(model).__name__.startswith("Flux") else 1.0


def routed(model: nn.Module) -> Handle:
    """Self-attention through foci, as PipeFusion has it, and nothing else changed."""
    names = [name for name, _ in model.named_modules() if name.endswith((".attn", ".attn1"))]
    return route(model, dict.fromkeys(names, Target()))


def both(name: str, options: dict[str, Any], times: tuple[float, ...], calls: int = 1) -> Any:
    """On a rank: the answers with PipeFusion and without, what it counted, and whether all is undone."""
    import torch.distributed as dist

    model, inputs = small(name)
    sites = {key: module.processor for key, module in model.named_modules() if hasattr(module, "processor")}
    with routed(model):
        alone = drawn(model, inputs, times, calls)
    with pipefusion.install(model, dist.group.WORLD, calls=calls, **options) as handle:
        answers = drawn(model, inputs, times, calls)
        blocks, held = handle.blocks, sum(k.numel() for m in handle.stage.memories for k, _ in m.held.values())
    undone = not any("forward" in vars(module) for module in model.modules())
    undone &= all(model.get_submodule(key).processor is processor for key, processor in sites.items())
    return answers, alone, handle.facts(), blocks, held, undone


@pytest.mark.parametrize(("name", "size"), [("dit", 2), ("pixart", 3), ("flux", 2), ("flux", 4), ("dit", 4)])
def test_steps_of_the_warm_up_are_one_process_to_the_bit(worlds: Worlds, name: str, size: int) -> None:
    results = worlds(size).run(both, name, {"warmup": 3, "patches": 3}, TIMES[:3])
    for answers, alone, facts, _, _, undone in results:
        assert all(torch.equal(a, b) for a, b in zip(answers, alone, strict=True))
        assert facts["exact"] == 3 and facts["approximate"] == 0 and undone
    ran = [name for result in results for name in result[3]]
    assert len(ran) == len(set(ran)) == 4  # every block on one stage


@pytest.mark.parametrize(("name", "size", "patches"), [("dit", 2, 4), ("pixart", 3, 5), ("flux", 4, 3)])
def test_later_steps_are_near(worlds: Worlds, name: str, size: int, patches: int) -> None:
    results = worlds(size).run(both, name, {"patches": patches}, TIMES)
    for answers, alone, facts, _, _, _ in results:
        assert torch.equal(answers[0], alone[0])
        for answer, exact, before in zip(answers[1:], alone[1:], alone, strict=False):
            # Of the way from step to step it misses a part: it is nearer than what keys of the step before would be.
            assert 0 < (answer - exact).norm() < 0.5 * (exact - before).norm()
        assert facts["exact"] == 1 and facts["approximate"] == 3
        assert all(torch.equal(a, b) for a, b in zip(answers, results[0][0], strict=True))


def stale(name: str, patches: int) -> Any:
    """On a rank: the second step against a model whose attention is told, patch by patch, what it may have seen."""
    import torch.distributed as dist

    model, inputs = small(name)
    with pipefusion.install(model, dist.group.WORLD, patches=patches):
        found = drawn(model, inputs, TIMES[:2])[1]
    # One patch sees everything fresh: so does a single stage of one patch.
    with pipefusion.install(model, dist.group.WORLD, patches=1):
        fresh = drawn(model, inputs, TIMES[:2])[1]
    with routed(model):
        alone = drawn(model, inputs, TIMES[:2])[1]
    return found, fresh, alone


def test_one_patch_is_never_stale(worlds: Worlds) -> None:
    for found, fresh, alone in worlds(2).run(stale, "dit", 2):
        assert torch.allclose(fresh, alone, rtol=0, atol=1e-13 * alone.abs().max().item())
        assert (found - alone).abs().max() > 1e-6


def test_nothing_is_stale_when_nothing_changed(worlds: Worlds) -> None:
    """A step like the one before finds the keys it would have made: the schedule moves every patch to its place."""
    for name in ("dit", "flux"):
        for first, second in worlds(3).run(repeated, name):
            assert (first - second).abs().max() <= 1e-12 * first.abs().max()


def repeated(name: str) -> Any:
    import torch.distributed as dist

    model, inputs = small(name)
    given = {**inputs, "timestep": torch.full((2,), 500.0) / scale(model)}
    with pipefusion.install(model, dist.group.WORLD, patches=5, calls=1) as handle:
        first = model(**given).sample
        handle.stage.time += 1.0  # as if the step before had been at a later time
        second = model(**given).sample
        assert handle.facts()["approximate"] == 1
    return first, second


def test_branches_of_guidance_have_memories_of_their_own(worlds: Worlds) -> None:
    for answers, alone, facts, _, held, _ in worlds(2).run(both, "flux", {"warmup": 1}, TIMES[:2], 2):
        assert torch.equal(answers[0], alone[0]) and torch.equal(answers[1], alone[1])
        assert facts["exact"] == facts["approximate"] == 2 and held > 0
        for answer, exact, before in zip(answers[2:], alone[2:], alone, strict=False):
            assert 0 < (answer - exact).norm() < 0.5 * (exact - before).norm()


def test_a_new_picture_and_other_sizes_begin_anew(worlds: Worlds) -> None:
    assert worlds(2).run(anew) == [(4, 2)] * 2


def anew() -> tuple[int, int]:
    import torch.distributed as dist

    model, inputs = small("dit")
    half = {**inputs, "hidden_states": inputs["hidden_states"][..., :4, :4].contiguous()}
    with pipefusion.install(model, dist.group.WORLD) as handle:
        drawn(model, inputs, TIMES[:2])  # exact, approximate
        drawn(model, inputs, TIMES[:2])  # the time went up
        drawn(model, half, TIMES[2:3])  # another size
        handle.reset()
        drawn(model, half, TIMES[3:])
        return handle.stage.exact_calls, handle.stage.approximate_calls


def refused() -> list[str]:
    import torch.distributed as dist

    flux, flux_inputs = small("flux")
    dit, dit_inputs = small("dit")
    sana, _ = small("sana")
    found = []
    for act in (
        lambda: pipefusion.install(sana, dist.group.WORLD),
        lambda: pipefusion.install(dit, dist.group.WORLD, patches=0),
        lambda: pipefusion.install(dit.train(), dist.group.WORLD),
        lambda: [
            pipefusion.install(flux, dist.group.WORLD),
            flux(**flux_inputs, controlnet_block_samples=[torch.ones(2, 16, 32, dtype=torch.float64)]),
        ],
        lambda: [
            pipefusion.install(dit.eval(), dist.group.WORLD),
            dit(**{**dit_inputs, "cross_attention_kwargs": {"a": 1}}),
        ],
    ):
        try:
            act()
            found.append("accepted")
        except (Unsupported, ValueError) as error:
            found.append(str(error))
    return found


def test_what_it_cannot_do_is_refused(worlds: Worlds) -> None:
    for sana, patches, training, controlled, keywords in worlds(2).run(refused):
        assert "SanaTransformer2DModel cannot be run as a pipeline" in sana and "FluxTransformer2DModel" in sana
        assert "patches must be at least 1, got 0" in patches
        assert ".eval()" in training
        assert "changes the tokens before block 1, as a ControlNet does" in controlled
        assert "cross_attention_kwargs" in keywords


def test_too_few_blocks(worlds: Worlds) -> None:
    with pytest.raises(Unsupported, match="too few blocks for 2 stages"):
        worlds(2).run(one_block)


def one_block() -> None:
    import torch.distributed as dist
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(num_layers=1, attention_head_dim=4, num_attention_heads=2, sample_size=4)
    pipefusion.install(model.eval(), dist.group.WORLD)


def failing() -> None:
    import torch.distributed as dist

    model, inputs = small("dit")
    with pipefusion.install(model, dist.group.WORLD) as handle:
        if dist.get_rank() == 1:
            broken = handle.stage.run[handle.stage.mine.start]

            def fail(*args: Any, **kwargs: Any) -> Any:
                if not handle.stage.exact:
                    raise ArithmeticError("no more")
                return broken(*args, **kwargs)

            handle.stage.run[handle.stage.mine.start] = fail
        drawn(model, inputs, TIMES)


def test_a_stage_that_fails_is_named_on_all_ranks(worlds: Worlds) -> None:
    outcomes = worlds(3).outcomes(failing)
    words = "pipefusion: rank 1 failed in step 1 of the forward: ArithmeticError: no more"
    assert [str(outcome.error) for outcome in outcomes] == [words] * 3
    assert all(isinstance(outcome.error, RankError) for outcome in outcomes)


def test_stages_have_about_as_much_each() -> None:
    assert _shares([1] * 8, 4) == [2, 2, 2, 2]
    assert _shares([4, 4, 1, 1, 1, 1], 3) == [1, 1, 4]
    assert _shares([1, 1, 1], 3) == [1, 1, 1]
    assert _shares([5, 1, 1, 1], 2) == [1, 3]


def test_psnr() -> None:
    x = torch.zeros(4)
    assert psnr(x, x) == float("inf")
    assert psnr(x + 0.2, x) == pytest.approx(20.0)
