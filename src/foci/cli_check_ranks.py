"""`foci check --world`: a parallel attention, yours or one of foci's wrappers, under ranks on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foci.check.across import examine_ranks
from foci.check.laws_ranks import dropout_law
from foci.check.orders import ORDERS, Places, places
from foci.check.ranks import IMPORT_SECONDS, Named, Ranks, Roles, Target
from foci.check.run import Report
from foci.core.spec import Candidate, Case, Spec
from foci.core.world import World
from foci.ops import FUNCTIONS, SPECS
from foci.ops.conventions import RETURNS
from foci.ops.conventions import WORDS as RECURRENT
from foci.ops.recurrent import sequences
from foci.ops.softmax import across
from foci.ops.softmax.across_mistakes import hypotheses

TIMEOUT = 10.0  # seconds that a rank waits for another, without --limit
WRAPS = ("ring", "ulysses", "usp", "handoff")
WHOLE = (*RECURRENT["state"], *RECURRENT["offsets"], *RETURNS)


@dataclass(frozen=True)
class Wrapped:
    """An operator of foci's in one of its wrappers, made anew on every rank. usp: two rows of ranks for Ulysses."""

    operator: str
    wrap: str
    order: str

    def signature_source(self) -> Callable[..., Any]:
        return FUNCTIONS[self.operator]

    def load(self) -> Callable[..., Any]:
        from foci import parallel

        group: Any = dist.group.WORLD
        made = getattr(parallel, self.wrap)
        if self.wrap == "usp":
            shape = 2, dist.get_world_size() // 2
            group = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("ulysses", "ring"))
        options = {"order": self.order} if self.wrap in ("ring", "usp") else {}
        wrapped: Callable[..., Any] = made(self.signature_source(), group, **options)
        return wrapped


def check_ranks(
    what: str,
    like: str,
    layout: str,
    world: int,
    order: str,
    wrap: str,
    *,
    dtypes: tuple[torch.dtype, ...] | None = None,
    limit: float | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Report:
    """The report of one parallel function. Raises ValueError for options that do not fit."""
    like = like or what
    target = _target(what, like, world, order, wrap)
    timeout = TIMEOUT if limit is None else limit
    layout, order = layout or "bthd", order or "plain"
    held = {name: partial(places, name, size=world) for name in ORDERS}
    mine: Callable[[int], Places] = partial(_square, order, world) if wrap == "usp" else held[order]
    start = partial(World, timeout=timeout, limit=3 * timeout + IMPORT_SECONDS)
    with start(world) as ranks, start(1) as one:
        across_ranks = Ranks(ranks, target, _roles(like, layout), mine, order, must_support_uneven=bool(wrap))
        alone = Ranks(one, target, _roles(like, layout), partial(places, order, size=1), order)
        if like != "softmax":
            spec, candidate = _recurrent(SPECS[like], across_ranks, layout, _called(what, wrap))
            return examine_ranks(spec, across_ranks, candidate, dtypes=dtypes, progress=progress)
        softmax = SPECS["softmax"].adapt
        assert softmax is not None
        adapt = partial(softmax, layout=layout, name=_called(what, wrap))
        others = {name: each for name, each in held.items() if name != order}
        more = (dropout_law(across.shown(world), mine, lambda: adapt(alone)),)
        candidate = adapt(across_ranks, ranks=world)
        return examine_ranks(
            across.spec_for(world), across_ranks, candidate, dtypes=dtypes, more=more, progress=progress,
            hypotheses=hypotheses(mine, others, across_ranks.text_tokens),
        )  # fmt: skip


def _target(what: str, like: str, world: int, order: str, wrap: str) -> Target:
    if world < 2:
        raise ValueError(f"--world must be at least 2, got {world}; one process is what is asked without it")
    if order not in ("", *ORDERS):
        raise ValueError(f"--order must be one of {', '.join(ORDERS)}, got {order!r}")
    if what not in FUNCTIONS:
        if wrap:
            raise ValueError(f"--wrap is for an operator of foci's ({', '.join(FUNCTIONS)}); {what!r} is none")
        if like not in ("softmax", "linear", "delta", "scan"):
            raise ValueError(f"--like must be softmax, linear, delta or scan with --world, got {like!r}")
        module, _, name = what.partition(":")
        return Named(module, name, str(Path.cwd()))
    if wrap not in WRAPS:
        raise ValueError(f"--wrap must be one of {', '.join(WRAPS)} for {what!r} with --world, got {wrap!r}")
    if (wrap == "handoff") != (what != "softmax") and wrap != "ulysses":
        raise ValueError(f"--wrap {wrap} does not take {what}: handoff is for recurrences, ring and usp for softmax")
    if wrap in ("ulysses", "handoff") and order not in ("", "plain"):
        raise ValueError(f"--order {order}: {wrap} takes tokens in plain order")
    if wrap == "usp" and world % 2:
        raise ValueError(f"--world {world}: usp takes an even number of ranks here, two of them for Ulysses")
    return Wrapped(what, wrap, order or "plain")


def _called(what: str, wrap: str) -> str:
    return f"foci {wrap}" if wrap else what


def _square(order: str, size: int, length: int) -> Places:
    """Two rows of ranks: cut over the columns by order, and what a column holds into runs over its two ranks."""
    columns = places(order, length, size // 2)
    return [column.tensor_split(2)[row] for row in range(2) for column in columns]


def _roles(like: str, layout: str) -> Roles:
    tokens = 2 if layout == "bhtd" else 1
    if like == "softmax":
        return Roles(across.split(layout), across.joined(layout), across.split("bthd"), tokens, across.share)

    def split(dim: int, name: str, tensor: Tensor) -> int | None:
        return None if name in WHOLE or tensor.dim() < 3 else dim

    return Roles(
        partial(split, tokens), lambda number, shard, length: tokens if number == 0 else None, partial(split, 1), tokens
    )


def _recurrent(spec: Spec, ranks: Ranks, layout: str, name: str) -> tuple[Spec, Candidate]:
    """A recurrence's Spec with cases cut to lengths that the ranks share equally, and the function as a candidate."""
    size = ranks.world.size
    cases = tuple(_even(case, size) for case in spec.cases)
    assert spec.adapt is not None
    layouts = {"layout": layout} if spec.name in ("linear", "delta") else {}
    return replace(spec, cases=cases, large=()), spec.adapt(ranks, name=name, **layouts)


def _even(case: Case, size: int) -> Case:
    """The same with the last tokens left out, so that every rank has as many; documents are left as they are."""

    def make(dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
        inputs = case.make(dtype, device, seed)
        if inputs.get("offsets") is not None:
            return inputs
        names = sequences(inputs)
        length = max((inputs[name].shape[1] for name in names), default=0)
        kept = length - length % (2 * size) or length
        return inputs | {name: inputs[name][:, :kept] for name in names}

    return Case(case.name, case.features, make)
