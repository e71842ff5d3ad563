"""What installs by a plan of backends share: the model is a module, and the plan names its sites and their backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from foci.core.errors import a_type
from foci.core.spec import Spec


def require_module(model: Any) -> None:
    """Raise TypeError for what is no nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"install: model is {a_type(model)}; expected an nn.Module")


def check_plan(plan: object, sites: Mapping[str, Spec]) -> None:
    """A plan is None, or maps names of `sites` to a backend of the operator there, or to None; else it raises."""
    if plan is None:
        return
    if not isinstance(plan, Mapping):
        raise TypeError(f"install: plan must map names of sites to backends, or be None, got {plan!r:.200}")
    for site, backend in plan.items():
        if site not in sites:
            raise ValueError(
                f"install: plan names {site!r}, which is no attention site of the model; it has {_some(list(sites))}"
            )
        names = [each.name for each in sites[site].backends]
        if backend is not None and backend not in names:
            raise ValueError(
                f"install: plan[{site!r}] is {backend!r}; expected None or one of {', '.join(map(repr, names))}"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
