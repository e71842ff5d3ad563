"""Wrappers within a model that trains: under torch.compile, with FSDP2 and with activation checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import foci
from foci.core.world import World
from foci.parallel.balance import shard, unshard
from foci.parallel.handoff import handoff
from foci.parallel.joint import joint
from foci.parallel.ring import ring
from foci.parallel.ulysses import ulysses, usp

Worlds = Callable[[int], World]
WIDTH, HEADS, T, TEXT = 12, 3, 10, 4


def causal(kind: str, op: Any) -> Any:
    if kind == "handoff":
        return lambda q, k, v: op(q, k, v)[0]
    return lambda q, k, v: op(q, k, v, mask=foci.Causal())


class Block(nn.Module):
    """Attention and a small network, with their residuals; `text` goes beside when there is some."""

    def __init__(self, attend: Any, checkpointed: str = "no") -> None:
        super().__init__()
        self.attend, self.checkpointed = attend, checkpointed
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed != "no":
            computed: Tensor = checkpoint(self.compute, x, use_reentrant=self.checkpointed == "reentrant")
            return computed
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.narrow(torch.nn.functional.gelu(self.wide(x)))


class TwoStreams(nn.Module):
    """Joint attention of image and text; what comes back of the text is used too."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = attend
        self.image, self.text = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (layer(y).unflatten(-1, (3, HEADS, -1)) for layer, y in ((self.image, x), (self.text, text)))
        out, text_out = self.attend(*first.unbind(2), *second.unbind(2))
        return x + self.out(out.flatten(2)), text + text_out.flatten(2)


def model_of(attend: Any, checkpointed: str = "no") -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Block(attend, checkpointed), Block(attend, checkpointed)).double()


def tokens(count: int = T) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(2, count, WIDTH, dtype=torch.float64)


def wrapped(kind: str) -> tuple[Any, Any, Any]:
    """An attention over all ranks, what to shard over, and in which order."""
    world = dist.group.WORLD
    if kind == "handoff":
        return handoff(foci.linear_attention, world), world, "plain"
    if kind == "ring":
        return ring(foci.attention, world), world, "zigzag"
    if kind == "ulysses":
        return ulysses(foci.attention, world), world, "plain"
    mesh = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("ulysses", "ring"))
    return usp(foci.attention, mesh), mesh, "zigzag"


def alone(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    model = model_of(causal(kind, foci.linear_attention if kind == "handoff" else foci.attention))
    out = model(tokens())
    (out.sin().sum() / T).backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(kind: str, how: str) -> tuple[Tensor, dict[str, Tensor], dict[str, int]]:
    """The output, rejoined, and the gradients of one process, by name."""
    op, group, order = wrapped(kind)
    checkpointed = how.partition(" ")[2] if how.startswith("checkpoint") else "no"
    model: Any = model_of(causal(kind, op), "later" if how == "fsdp and checkpoint" else checkpointed)
    counts = {}
    if how.startswith("fsdp"):
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in (*model, model):
            module.set_gradient_divide_factor(1.0)  # shares of one gradient: their sum, not their mean
    run = model
    if how.startswith("compile"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run = torch.compile(model, backend=how.partition(" ")[2])
    x = shard(tokens(), group, order)
    with torch.device("meta") if how == "default device" else nullcontext():
        out = run(x.requires_grad_() if how == "checkpoint reentrant" else x)  # that kind sees no parameters
        (out.sin().sum() / T).backward()
    if how.startswith("compile"):
        counts = {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}
    gradients = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        gradient = p.grad
        if how.startswith("fsdp"):
            gradient = gradient.full_tensor()
        else:
            dist.all_reduce(gradient)
        gradients[name] = gradient
    return unshard(out.detach(), group, order), gradients, counts


def compare(kind: str, found: Any) -> None:
    out, gradients = alone(kind)
    for mine, theirs, _ in found:
        torch.testing.assert_close(mine, out, rtol=1e-9, atol=1e-9)
        assert set(theirs) == set(gradients)
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


KINDS = [("handoff", 2), ("ring", 3), ("ulysses", 2), ("usp", 4)]


@pytest.mark.parametrize(("kind", "size"), KINDS)
@pytest.mark.parametrize(
    "how", ["checkpoint later", "checkpoint reentrant", "fsdp", "fsdp and checkpoint", "default device"]
)
def test_a_model_trains_as_in_one_process(worlds: Worlds, kind: str, size: int, how: str) -> None:
    compare(kind, worlds(size).run(train, kind, how))


@pytest.mark.parametrize(
    ("kind", "size"), [pytest.param(*each, marks=[pytest.mark.slow] if each[0] == "usp" else []) for each in KINDS]
)
def test_a_model_is_compiled_but_for_its_attention(worlds: Worlds, kind: str, size: int) -> None:
    found = worlds(size).run(train, kind, "compile aot_eager")
    compare(kind, found)
    # What is before an attention, and what is behind it: two blocks of one code, each with its own wrapper.
    assert [counts["graphs"] for _, _, counts in found] == [4] * size


def two_streams(op: Any, cut: Callable[[Tensor], Tensor], how: str) -> Any:
    torch.manual_seed(3)
    model: Any = TwoStreams(op).double()
    run = torch.compile(model, backend="aot_eager") if how == "compile" else model
    if how == "fsdp":
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        # The image's layers see some of the tokens, so that their gradients are shares; the text's see all, and agree.
        for layer, factor in ((model.image, 1.0), (model.out, 1.0), (model.text, float(dist.get_world_size()))):
            fully_shard(layer, mesh=mesh)
            layer.set_gradient_divide_factor(factor)
    image, text = cut(tokens()), tokens(TEXT)
    if how == "checkpoint":
        out, text_out = checkpoint(run, image, text, use_reentrant=False)
    else:
        out, text_out = run(image, text)
    return model, out, text_out


def joined(how: str) -> dict[str, Tensor]:
    group = dist.group.WORLD
    size = dist.get_world_size()
    model, out, text_out = two_streams(
        joint(ring(foci.attention, group), where="front"), lambda x: shard(x, group, "zigzag"), how
    )
    (out.sin().sum() + text_out.cos().sum() / size).backward()
    gradients = {}
    for name, p in model.named_parameters():
        gradient = p.grad.full_tensor() if how == "fsdp" else p.grad
        if how != "fsdp" and not name.startswith("text"):
            dist.all_reduce(gradient)
        gradients[name] = gradient
    return gradients


@pytest.mark.parametrize("how", ["plain", "compile", "fsdp", "checkpoint"])
def test_joint_attention_trains_as_in_one_process(worlds: Worlds, how: str) -> None:
    model, out, text_out = two_streams(joint(foci.attention), lambda x: x, "plain")
    (out.sin().sum() + text_out.cos().sum()).backward()
    for found in worlds(3).run(joined, how):
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-9, atol=1e-9, msg=name)
