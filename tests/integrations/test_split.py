"""foci.integrations.split: over 2, 3, 4 ranks each model gives one process's output and gradients; undone exactly."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from foci.core.errors import Disagreement, Unsupported
from foci.core.world import World
from foci.integrations.mesh import degrees_of, make_mesh
from foci.integrations.split import SplitHandle, install
from foci.integrations.split_check import SplitError
from foci.integrations.split_infer import infer
from foci.integrations.split_plan import plan_for
from tests.integrations.models import Small, build

Worlds = Callable[[int], World]
MODELS = ("dit", "flux", "sd3", "pixart", "wan", "hunyuan")
JOINT = ("flux", "sd3", "hunyuan")


def results(small: Small, handle: SplitHandle | None = None) -> dict[str, Tensor]:
    """The output of a model and the gradient of every parameter and input."""
    small.model.zero_grad()
    for name in small.differentiable:
        small.inputs[name] = small.inputs[name].detach().requires_grad_()
    out = small.run()
    out.square().sum().backward()
    if handle is not None:
        handle.sum_gradients()
    parameters = {name: p.grad.clone() for name, p in small.model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **parameters, **{name: small.inputs[name].grad for name in small.differentiable}}


def errors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors beyond the rounding of what cancels."""
    assert got.keys() == expected.keys()
    noise = 1e-13 * max(value.norm() for value in expected.values())
    return {n: float(((got[n] - x).norm() - noise).clamp(min=0) / x.norm()) for n, x in expected.items() if x.norm()}


def compare(names: tuple[str, ...], ulysses: int, ring: int, text: str) -> dict[str, dict[str, float]]:
    """On a rank: each model in float64, alone and over the ranks; and alone again, bit for bit."""
    mesh = make_mesh(ulysses=ulysses, ring=ring)
    found = {}
    for name in names:
        small = build(name).to(torch.float64)
        expected = results(small)
        with install(small.model, mesh, text=text) as handle:
            got = results(small, handle)
            assert ulysses * ring == 1 or handle.sent.bytes > 0
        after = results(small)
        assert all(torch.equal(after[key], value) for key, value in expected.items())
        found[name] = errors(got, expected)
    return found


# Their own rotary embeddings and norms round to float32 whatever they are given, also the shares of a gradient.
BUDGET = dict.fromkeys(("flux", "sd3", "wan", "hunyuan", "auraflow"), 1e-6)


@pytest.mark.parametrize(
    ("ulysses", "ring", "text"),
    [
        (1, 2, "auto"),
        (3, 1, "replicated"),
        (2, 2, "auto"),
        pytest.param(1, 1, "auto", marks=pytest.mark.slow),
        pytest.param(2, 1, "auto", marks=pytest.mark.slow),
        pytest.param(1, 3, "auto", marks=pytest.mark.slow),
        pytest.param(2, 2, "replicated", marks=pytest.mark.slow),
        pytest.param(4, 1, "auto", marks=pytest.mark.slow),
        pytest.param(1, 4, "replicated", marks=pytest.mark.slow),
    ],
)
def test_forward_and_every_gradient_are_one_processs(worlds: Worlds, ulysses: int, ring: int, text: str) -> None:
    names = MODELS if text == "auto" else JOINT
    for found in worlds(ulysses * ring).run(compare, names, ulysses, ring, text):
        for name, each in found.items():
            bad = {key: error for key, error in each.items() if not error <= BUDGET.get(name, 1e-10)}
            assert not bad, (name, bad)


def in_single_precision() -> dict[str, float]:
    mesh = make_mesh(ulysses=2)
    found = {}
    for name in MODELS:
        small = build(name)
        expected = small.run()
        with install(small.model, mesh):
            found[name] = float((small.run() - expected).norm() / expected.norm())
    return found


def test_in_float32_the_output_is_bit_close(worlds: Worlds) -> None:
    for found in worlds(2).run(in_single_precision):
        assert all(error <= 1e-6 for error in found.values()), found


def train(checkpointing: bool, steps: int = 3) -> tuple[list[float], list[float]]:
    losses: list[list[float]] = []
    for split in (False, True):
        small = build("flux").to(torch.float64)
        if split and checkpointing:
            small.model.enable_gradient_checkpointing()
        small.model.train()
        handle = install(small.model, make_mesh(ulysses=2)) if split else None
        optimizer = torch.optim.SGD(small.model.parameters(), lr=0.01)
        losses.append([])
        for _ in range(steps):
            optimizer.zero_grad()
            loss = small.run().square().mean()
            loss.backward()
            if handle is not None:
                handle.sum_gradients()
            optimizer.step()
            losses[-1].append(loss.item())
    return losses[0], losses[1]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_goes_as_in_one_process(worlds: Worlds, checkpointing: bool) -> None:
    for alone, split in worlds(2).run(train, checkpointing):
        assert alone == pytest.approx(split, rel=1e-12)
        assert alone[-1] < alone[0]


def other_noise() -> None:
    small = build("dit")
    rank = torch.distributed.get_rank()
    with install(small.model, make_mesh(ring=2)):
        small.inputs["hidden_states"] = small.inputs["hidden_states"] + rank
        small.run()


def test_ranks_with_other_noise_are_told(worlds: Worlds) -> None:
    with pytest.raises(Disagreement, match="hidden_states"):
        worlds(2).run(other_noise)


def other_weights() -> None:
    small = build("dit", seed=torch.distributed.get_rank())
    install(small.model, make_mesh(ring=2))


def test_ranks_with_other_weights_are_told(worlds: Worlds) -> None:
    with pytest.raises(Disagreement, match="weights"):
        worlds(2).run(other_weights)


def wrong_plan() -> None:
    small = build("wan")
    plan = plan_for(small.model)
    install(small.model, make_mesh(ulysses=2), dataclasses.replace(plan, cuts=plan.cuts[1:]), inputs=small.inputs)


def test_a_plan_is_checked_before_use(worlds: Worlds) -> None:
    with pytest.raises(SplitError, match=r"rotary_emb\[0\] was left unsplit"):
        worlds(2).run(wrong_plan)


def inferred() -> dict[str, float]:
    found = {}
    for name in (*MODELS, "auraflow"):
        small = build(name).to(torch.float64)
        expected = results(small)
        plan = infer(small.model, small.inputs) if name in MODELS else None
        with install(small.model, make_mesh(ulysses=2), plan, inputs=small.inputs) as handle:
            found[name] = max(errors(results(small, handle), expected).values())
    return found


def test_inferred_plans_compute_the_same(worlds: Worlds) -> None:
    for found in worlds(2).run(inferred):
        assert all(error <= BUDGET.get(name, 1e-10) for name, error in found.items()), found


def unknown() -> str:
    small = build("sana")
    try:
        install(small.model, make_mesh(ulysses=2))
    except Unsupported as error:
        return str(error)
    return ""


def test_a_model_without_plan_is_refused(worlds: Worlds) -> None:
    assert all("SanaTransformer2DModel has no plan" in said for said in worlds(2).run(unknown))


def copied() -> bool:
    small = build("sd3")
    expected = small.run()
    with install(small.model, make_mesh(ring=2)):
        twin = small._replace(model=copy.deepcopy(small.model))
        return torch.equal(twin.run(), expected) and not torch.equal(small.run(), small.run() + 1)


def test_a_copy_of_a_split_model_is_whole(worlds: Worlds) -> None:
    assert all(worlds(2).run(copied))


def named_backend() -> float:
    small = build("pixart")
    expected = small.run()
    with install(small.model, make_mesh(ulysses=2), backend="chunked"):
        return float((small.run() - expected).norm() / expected.norm())


def test_a_backend_can_be_named(worlds: Worlds) -> None:
    assert max(worlds(2).run(named_backend)) <= 1e-6


def meshes() -> tuple[list[str], dict[str, int], list[int], Any]:
    said = []
    for degrees in ({"ulysses": 3}, {}, {"cfg": 2, "ring": 3}):
        try:
            make_mesh(**degrees)
        except ValueError as error:
            said.append(str(error))
    small = build("dit")
    try:
        install(small.model, DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("sequence",)))
    except ValueError as error:
        said.append(str(error))
    mesh = make_mesh(ulysses=2, ring=2)
    return said, degrees_of(mesh), mesh["ulysses"].mesh.tolist(), mesh["ring"].mesh.tolist()


def test_meshes_and_what_is_refused_of_them(worlds: Worlds) -> None:
    found = worlds(4).run(meshes)
    said, degrees, _, _ = found[0]
    assert said[:3] == [
        "mesh: ulysses 3 is 3 ranks; this world has 4",
        "mesh: 1 is 1 ranks; this world has 4",
        "mesh: cfg 2 x ring 3 is 6 ranks; this world has 4",
    ]
    assert "expected 'ulysses' and 'ring' among them" in said[3]
    assert degrees == {"data": 1, "cfg": 1, "pipe": 1, "ulysses": 2, "ring": 2}
    # All-to-all between neighbours, the ring across.
    assert [each[2] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each[3] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
