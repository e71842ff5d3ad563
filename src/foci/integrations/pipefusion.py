"""PipeFusion: pipeline parallelism of a diffusion transformer: blocks in stages, an image's patches as micro-batches.

Each rank (stage) runs its share of the blocks. In the first steps of an image all tokens go from stage to stage
together, which is exact. Later they go patch by patch, so that all stages work at the same time, and attention uses the
previous step's keys and values for patches that have not arrived yet: an approximation, as images change little from
step to step (Fang et al. 2024, arXiv:2405.14430).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from foci.core.errors import Unsupported
from foci.integrations.diffusers import Handle, Target, route
from foci.integrations.overrides import Overrides, require_evaluating, require_sampling
from foci.integrations.parallel_rows import rebuilt, tensors_of
from foci.integrations.pipefusion_stage import FAMILIES, Family, Stage
from foci.integrations.undoable import Undoable
from foci.ops.softmax.api import attention
from foci.parallel.exchange import Session, all_gather
from foci.parallel.group import Group

__all__ = ["PipeFusion", "install", "psnr"]


@dataclass
class PipeFusion(Undoable):
    """The handle of `install`: the blocks of this rank, and the numbers of exact and approximate calls."""

    blocks: tuple[str, ...]
    stage: Stage = field(repr=False)
    _undo: list[Callable[[], None]] = field(repr=False)

    def facts(self) -> dict[str, Any]:
        """Figures for a report."""
        stage = self.stage
        return {
            "ranks": stage.group.size,
            "patches": stage.patches,
            "warmup": stage.warmup,
            "blocks": len(self.blocks),
            "exact": stage.exact_calls,
            "approximate": stage.approximate_calls,
        }

    def reset(self) -> None:
        """Start a new image: the next call is exact. (A new image is also recognised by its first timestep.)"""
        self.stage.forget()

    def restore(self) -> None:
        """Restore the model's original objects."""
        while self._undo:
            self._undo.pop()()


def install(
    model: nn.Module,
    group: Any,
    *,
    patches: int | None = None,
    warmup: int = 1,
    calls: int = 1,
    op: Callable[..., Tensor] = attention,
) -> PipeFusion:
    """Run the blocks of a DiT, PixArt or Flux transformer as a pipeline over the ranks of `group`, for sampling.

    All ranks make the same calls with the same whole tensors and get the same whole output. Blocks are assigned in
    order, so that stages have about equally many parameters. `patches`: the number of parts of the tokens, by default
    twice the ranks; more keep the stages busier (patches / (patches + ranks - 1) of the time) with smaller attention
    calls. `warmup`: the number of exact steps of each image; the number of all steps makes every step exact. `calls`:
    how often a pipeline calls the model per step; 2 for one call per branch of guidance. A new image starts when the
    timestep increases, or sizes change.

    `op` computes the self-attention of the blocks, on q [B, T, H, K] of one patch and k, v of all tokens. If tokens are
    also sharded over ranks, it is the wrapper that attends over those ranks.

    Raises Unsupported for another model, fewer blocks than ranks, or what the blocks cannot be given a patch at a time;
    ValueError for numbers below 1, in training mode, and where a gradient would be asked for.
    """
    group = Group.of(group)
    patches = 2 * group.size if patches is None else patches
    for name, value in (("patches", patches), ("warmup", warmup), ("calls", calls)):
        if value < 1:
            raise ValueError(f"install: {name} must be at least 1, got {value}")
    require_evaluating("pipefusion.install", model)
    family, blocks = _blocks(model)
    shares = _shares([sum(p.numel() for p in block.parameters()) for block in blocks.values()], group.size)
    if min(shares) < 1:
        raise Unsupported(
            f"install: {type(model).__name__} has too few blocks for {group.size} stages", [f"it has {len(blocks)}"]
        )
    first = sum(shares[: group.rank])
    mine = range(first, first + shares[group.rank])
    stage = Stage(model, family, group, mine, patches, warmup, calls)
    undo = _route(model, blocks, family, stage, op)
    overrides = Overrides()
    undo.append(overrides.restore)
    inner = overrides.put(model, lambda *args, **kwargs: _call(stage, inner, args, kwargs))
    stage.run = [overrides.put(block, _forward(stage, place)) for place, block in enumerate(blocks.values())]
    stage.signature = inspect.signature(stage.run[0])
    names = tuple(blocks)
    return PipeFusion(names[first : first + shares[group.rank]], stage, undo)


def psnr(picture: Tensor, exact: Tensor, span: float = 2.0) -> float:
    """Peak signal-to-noise ratio in dB of images with values in a range of width `span`; inf if equal."""
    error = (picture.double() - exact.double()).square().mean().item()
    return math.inf if error == 0 else 10 * math.log10(span**2 / error)


def _blocks(model: nn.Module) -> tuple[Family, dict[str, nn.Module]]:
    family = next((FAMILIES[base.__name__] for base in type(model).__mro__ if base.__name__ in FAMILIES), None)
    if family is None:
        raise Unsupported(
            f"install: the blocks of {type(model).__name__} cannot be run as a pipeline",
            [f"it is known how of {', '.join(FAMILIES)}"],
        )
    return family, {f"{name}.{i}": block for name in family.lists for i, block in enumerate(getattr(model, name))}


def _shares(sizes: list[int], stages: int) -> list[int]:
    """Blocks per stage: each takes blocks until it has its share of the rest, leaving at least one per later stage."""
    shares, place = [], 0
    for stage in range(stages):
        left = stages - stage
        wanted, taken, count = sum(sizes[place:]) / left, 0.0, 0
        while place + count < len(sizes) - (left - 1):
            size = sizes[place + count]
            if count and left > 1 and taken + size / 2 > wanted:
                break
            taken, count = taken + size, count + 1
        shares.append(count)
        place += count
    return shares


def _route(
    model: nn.Module, blocks: Mapping[str, nn.Module], family: Family, stage: Stage, op: Callable[..., Tensor]
) -> list[Callable[[], None]]:
    """Route the blocks' self-attention through `stage`; returns the undo functions, to be run in reverse."""
    sites = {f"{name}.{family.attention}": block.get_submodule(family.attention) for name, block in blocks.items()}
    given: list[tuple[Any, Any, Any]] = [(it, it.processor, _own(it.processor)) for it in sites.values()]

    def give_back() -> None:
        for module, before, own in given:
            if module.processor is own:  # keep a processor that was set since
                module.processor = before

    for module, _, own in given:
        module.processor = own
    handle = route(model, dict.fromkeys(sites, Target(None, stage.attend(op))))
    if reasons := _not_once(handle, set(sites)):
        handle.restore()
        give_back()
        raise Unsupported(
            f"install: the attention of {type(model).__name__} cannot be given a patch at a time", reasons
        )
    return [give_back, handle.restore]


def _own(processor: Any) -> Any:
    """The original processor of a site that foci has routed already, since `op` replaces that routing."""
    if isinstance(processor, FunctionType) or not hasattr(processor, "_foci_routes"):
        return getattr(processor, "_foci_routes", processor)
    own: Any = object.__new__(type(processor)._foci_routes)
    object.__setattr__(own, "__dict__", processor.__dict__)
    return own


def _not_once(handle: Handle, sites: set[str]) -> list[str]:
    reasons = [f"{name}: {why}" for name, why in handle.skipped if name in sites]
    reasons += [f"{site.name}: it makes {site.calls} attention calls" for site in handle.sites if site.calls != 1]
    return reasons


def _forward(stage: Stage, place: int) -> Callable[..., Any]:
    if place == 0:
        return lambda *args, **kwargs: stage.first(args, kwargs)
    return lambda *args, **kwargs: stage.later(place, args, kwargs)


def _call(stage: Stage, inner: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A call of the model by its own code: its first block runs the whole pipeline, the other blocks nothing."""
    bound = inspect.signature(inner).bind(*args, **kwargs)
    require_sampling("pipefusion", stage.model, bound.arguments.values())
    stage.begin(bound.arguments)
    answer = inner(*args, **kwargs)
    # Only the last stage has the blocks' output; on the others, the layers after them ran on the blocks' input.
    parts = tensors_of(stage.model, answer)
    with Session(stage.group, "pipefusion") as session:
        everyones = [all_gather(stage.last_only(part), _shapes(stage.group, part.numel()), session) for part in parts]
    return rebuilt(answer, [tensors[-1].view(part.shape) for tensors, part in zip(everyones, parts, strict=True)])


def _shapes(group: Group, numel: int) -> list[list[int]]:
    return [[0]] * (group.size - 1) + [[numel]]
