"""The one DeviceMesh for all kinds of parallelism, with a named dimension for each."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

DIMS = ("data", "cfg", "pipe", "ulysses", "ring")
# Outermost to innermost: inner dimensions have the fastest links. All-to-all needs those, a ring only neighbours.
_OUTERMOST_FIRST = ("data", "cfg", "pipe", "ring", "ulysses")


def make_mesh(
    *, data: int = 1, cfg: int = 1, pipe: int = 1, ulysses: int = 1, ring: int = 1, device: str = "cpu"
) -> DeviceMesh:
    """The mesh of all ranks with dimensions data, cfg, pipe, ulysses and ring, in this order; each degree is its size.

    Ranks of one Ulysses group are numbered one after the other (launchers put such ranks on one machine), then come
    ring, pipe, cfg and data. A collective call: every rank makes it, with the same degrees.

    Raises ValueError for a degree below 1, for degrees whose product is not the number of ranks, and where no process
    group has been started.
    """
    degrees = {"data": data, "cfg": cfg, "pipe": pipe, "ulysses": ulysses, "ring": ring}
    _require_ranks(degrees)
    places = torch.arange(dist.get_world_size(), device="cpu").reshape([degrees[name] for name in _OUTERMOST_FIRST])
    ranks = places.permute([_OUTERMOST_FIRST.index(name) for name in DIMS])
    return DeviceMesh(torch.device(device).type, ranks, mesh_dim_names=DIMS)


def degrees_of(mesh: DeviceMesh) -> dict[str, int]:
    """The size of each dimension of a mesh by its name."""
    if mesh.mesh_dim_names is None:
        raise ValueError(f"mesh: its dimensions have no names; expected some of {', '.join(DIMS)}")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def sequence_ranks(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh that share this rank's sequence: all along its dimensions "ulysses" and "ring"."""
    names, place = mesh.mesh_dim_names or (), mesh.get_coordinate()
    if not {"ulysses", "ring"} <= set(names) or place is None:
        raise ValueError(f"mesh: has dimensions {names}; expected 'ulysses' and 'ring' among them (see make_mesh)")
    # Not a slice of both dimensions: before torch 2.12 a mesh gives none whose ranks are not in the mesh's own order.
    along = tuple(slice(None) if name in ("ulysses", "ring") else at for name, at in zip(names, place, strict=True))
    return sorted(mesh.mesh[along].flatten().tolist())


def _require_ranks(degrees: dict[str, int]) -> None:
    for name, degree in degrees.items():
        if not isinstance(degree, int) or degree < 1:
            raise ValueError(f"mesh: {name} is {degree!r}; expected a whole number of ranks, at least 1")
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "mesh: no process group has been started; run under torchrun and call torch.distributed.init_process_group"
        )
    product = 1
    for degree in degrees.values():
        product *= degree
    if product != dist.get_world_size():
        asked = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "1"
        raise ValueError(f"mesh: {asked} is {product} ranks; this world has {dist.get_world_size()}")
