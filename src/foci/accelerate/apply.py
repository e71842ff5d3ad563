"""Apply a plan to a model, through the integration of the model's library; exactly undoable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from foci.accelerate.compile import Compiled, compile_parts
from foci.accelerate.plan import Plan, SitePlan, identify
from foci.core.errors import Unsupported, a_type
from foci.integrations.undoable import Undoable


class _Handle(Protocol):
    def restore(self) -> None: ...


@dataclass
class Applied(Undoable):
    """A plan applied to a model: the `sites` routed, those `skipped` with the reason, and `restore()` to undo it."""

    sites: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    _handle: _Handle = field(repr=False)
    _compiled: Compiled | None = field(default=None, repr=False)

    def restore(self) -> None:
        """Restore the original objects. Calling it twice has no further effect."""
        if self._compiled is not None:
            self._compiled.restore()
            self._compiled = None
        self._handle.restore()


def route(model: nn.Module, sites: Sequence[SitePlan] | None = None) -> Applied:
    """Route the planned sites (by default all, each with foci's own choice) to foci, without checking the plan.

    A model makes calls that were not planned (a growing cache, dropout in training). If the plan is what foci would
    choose anyway, for all sites of the model, no backend is fixed: foci chooses per call.
    """
    if sites is None:
        return _install(model, None)
    names = {site.name for site in sites}
    if not any(site.fixed for site in sites):
        applied = _install(model, None)
        if set(applied.sites) == names:
            return applied
        applied.restore()
    applied = _install(model, {site.name: site.backend for site in sites})
    if set(applied.sites) != names:
        applied.restore()
        left = [f"{name}: {why}" for name, why in applied.skipped if name in names]
        raise Unsupported(f"accelerate: the plan cannot be put into {type(model).__name__}", left)
    return applied


def _install(model: nn.Module, backends: Mapping[str, str] | None) -> Applied:
    from foci.integrations import diffusers, layers, transformers

    library = library_of(model)
    if library == "diffusers":
        handle: Any = diffusers.install(model, backends)
        return Applied(tuple(site.name for site in handle.sites), tuple(handle.skipped), handle)
    if library == "foci":
        handle = layers.install(model, backends)
        return Applied(handle.sites, handle.skipped, handle)
    if library == "transformers":
        handle = transformers.install(model, backends)
        return Applied(tuple(handle.sites), tuple(handle.skipped), handle)
    raise Unsupported(
        f"accelerate: {type(model).__name__} has no attention that foci can route",
        ["it is made neither of Diffusers' attention modules nor of transformers' nor of foci's own layers"],
        "in your own code, call foci.attention where you call scaled_dot_product_attention",
    )


def library_of(model: nn.Module) -> str | None:
    """The library of the model's attention modules, found without importing it; "foci" for our own layers."""
    from foci.integrations.layers import find_sites

    if find_sites(model):
        return "foci"
    modules = list(model.modules())
    if any(getattr(module, "processor", None) is not None for module in modules):
        return "diffusers"
    roots = {base.__module__.partition(".")[0] for module in modules for base in type(module).__mro__}
    return next((library for library in ("diffusers", "transformers") if library in roots), None)


def denoiser(model: Any, who: str) -> tuple[str, nn.Module]:
    """The module to work on: the model itself, or by its name the part of a Diffusers pipeline that runs every step."""
    if isinstance(model, nn.Module):
        return "", model
    components = getattr(model, "components", None)
    if not isinstance(components, Mapping):
        raise ValueError(f"{who}: model is {a_type(model)}; expected an nn.Module or a Diffusers pipeline")
    for part in ("transformer", "unet", "prior"):
        if isinstance(components.get(part), nn.Module):
            return part, components[part]
    raise ValueError(f"{who}: {type(model).__name__} has no transformer or unet; it has {sorted(components)}")


def apply(model: Any, plan: Plan | Mapping[str, Any] | str | Path) -> Applied:
    """Apply a plan that `foci accelerate` wrote: its path, its content, or the object.

    For a Diffusers pipeline, to its denoiser, as `accelerate` does.

    The plan is valid for the model it was made on: class, configuration and attention sites must be the same; weights
    may differ. Raises ValueError for a plan that cannot be read or that is another model's, with what differs, and
    TypeError for what is no plan; after an error the model is as it was.
    """
    _, model = denoiser(model, "apply")
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    plan.require_same_model(identify(model))
    if plan.ranks:
        raise ValueError(
            f"plan was made over {plan.ranks['world']} ranks; expected one of a single process (over ranks, use "
            "foci.integrations.parallel_pipeline.install on every rank)"
        )
    applied = route(model, plan.sites)
    if plan.compile.mode != "off":
        applied._compiled = compile_parts(model, plan.compile.mode, plan.names)
    return applied
