"""Distribute a Diffusers pipeline, or one model, over all named dimensions of a mesh at once; undoable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from foci.core.errors import Unsupported, a_type
from foci.integrations import parallel_cfg, parallel_rows, parallel_vae, pipefusion, split
from foci.integrations.mesh import DIMS, degrees_of
from foci.integrations.pipefusion_stage import FAMILIES
from foci.integrations.split_plan import SplitPlan
from foci.integrations.undoable import Undoable
from foci.ops.softmax.api import attention
from foci.parallel.group import Group, Traffic

__all__ = ["Spread", "install"]

_DENOISERS = ("transformer", "transformer_2", "unet", "prior")


@dataclass
class Spread(Undoable):
    """The handle of `install`: `handles` by "component: dimension", and parts of the pipeline skipped, with reasons."""

    degrees: dict[str, int]
    handles: dict[str, Any]
    skipped: tuple[tuple[str, str], ...]
    _groups: list[Group] = field(repr=False)

    @property
    def sent(self) -> Traffic:
        """What this rank has sent to others since `install`."""
        traffic = [group.traffic for group in self._groups]
        traffic += [handle.sent for handle in self.handles.values() if isinstance(handle, split.SplitHandle)]
        return Traffic(*(sum(getattr(each, name) for each in traffic) for name in ("bytes", "messages", "control")))

    def facts(self) -> dict[str, Any]:
        """Figures of every part for a report."""
        facts = {name: handle.facts() for name, handle in self.handles.items() if hasattr(handle, "facts")}
        return {"degrees": dict(self.degrees), **facts}

    def restore(self) -> None:
        """Restore the pipeline's original objects."""
        for name in reversed(self.handles):
            self.handles[name].restore()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in reversed(self.handles):
            self.handles[name].__exit__(kind, error, trace)


def install(
    pipeline: Any,
    mesh: DeviceMesh,
    *,
    plan: SplitPlan | None = None,
    patches: int | None = None,
    warmup: int = 1,
    calls: int = 1,
    text: str = "auto",
    inputs: Mapping[str, Any] | None = None,
    vae: bool = True,
) -> Spread:
    """Distribute a pipeline's denoiser over a mesh of `make_mesh`, and its VAE's decoder over all ranks of that mesh.

    "data" splits the batch's rows, "cfg" the branches of guidance, "pipe" the blocks (PipeFusion, with `patches`,
    `warmup` and `calls`: approximate after the warm-up, all else is exact), "ulysses" and "ring" the tokens (with
    `plan`, `text` and `inputs`: see `split.install`). A dimension of one rank does nothing. All ranks run the same
    pipeline and get the same pictures. A collective call; for sampling.

    Raises what the parts raise; nothing is changed then. A VAE that cannot be split is left, with the reason.
    """
    degrees = {**dict.fromkeys(DIMS, 1), **degrees_of(mesh)}
    if unknown := sorted(set(degrees) - set(DIMS)):
        raise ValueError(f"install: mesh has dimensions {unknown}; expected some of {', '.join(DIMS)}")
    groups = {name: Group.of(mesh[name]) for name in DIMS if degrees[name] > 1}
    spread = Spread(degrees, {}, (), [groups[name] for name in ("data", "cfg", "pipe") if name in groups])
    tokens = degrees["ulysses"] * degrees["ring"]
    try:
        for name, model in _denoisers(pipeline):
            op: Any = attention
            if tokens > 1:
                # A patch's queries attend to the tokens of all ranks, so text is sharded like the image.
                how = "split" if "pipe" in groups and text == "auto" and _has_text(model) else text
                splitting = split.install(model, mesh, plan, text=how, inputs=inputs)
                spread.handles[f"{name}: tokens"], op = splitting, splitting.attention
            if "pipe" in groups:
                spread.handles[f"{name}: pipe"] = pipefusion.install(
                    model, groups["pipe"], patches=patches, warmup=warmup, calls=calls, op=op
                )
            if "data" in groups:
                spread.handles[f"{name}: data"] = parallel_rows.install(model, groups["data"])
            if "cfg" in groups:
                spread.handles[f"{name}: cfg"] = parallel_cfg.install(model, groups["cfg"])
        decoder = _component(pipeline, "vae") if vae else None
        if decoder is not None and mesh.size() > 1:
            _decode_on_all(spread, decoder, mesh)
    except BaseException:
        spread.restore()
        raise
    return spread


def _decode_on_all(spread: Spread, vae: nn.Module, mesh: DeviceMesh) -> None:
    ranks = sorted(mesh.mesh.flatten().tolist())
    everyone: Any = dist.group.WORLD
    if len(ranks) < dist.get_world_size():
        # Never destroyed: torch would give the next group of these ranks the same name.
        everyone = dist.new_group(ranks, use_local_synchronization=True)
    group = Group.of(everyone)
    try:
        spread.handles["vae"] = parallel_vae.install(vae, group)
        spread._groups.append(group)
    except (Unsupported, ValueError) as error:
        spread.skipped = (("vae", str(error)),)


def _denoisers(pipeline: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(pipeline, nn.Module):
        yield type(pipeline).__name__, pipeline
        return
    found = [(name, module) for name in _DENOISERS if (module := _component(pipeline, name)) is not None]
    if not found:
        raise ValueError(
            f"install: pipeline is {a_type(pipeline)} without {', '.join(_DENOISERS)}; expected a Diffusers "
            "pipeline or an nn.Module"
        )
    yield from found


def _component(pipeline: Any, name: str) -> nn.Module | None:
    components = getattr(pipeline, "components", None)
    found = components.get(name) if isinstance(components, Mapping) else getattr(pipeline, name, None)
    return found if isinstance(found, nn.Module) and not isinstance(pipeline, nn.Module) else None


def _has_text(model: nn.Module) -> bool:
    known = (FAMILIES.get(base.__name__) for base in type(model).__mro__)
    return any(family is not None and family.text for family in known)
