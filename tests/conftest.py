"""Every test runs on two threads, from one seed, and without the network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Before any import of huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before any import of torch, whose OpenMP reads it once. A thread that waits by turning holds the core that the other
# one, or the process beside, would work on: beside `make test`'s kernels, tests of many small sums took four times as
# long. Two threads as before, in ranks and children too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from foci.core.world import World

torch.set_num_threads(2)
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests import interpreter

    interpreter.hasten()
GPUS = torch.cuda.device_count()
# What ranks would import one by one, each for itself; the server that they come from does it once.
PRELOAD = ("foci.parallel", "pytest", "diffusers.models.transformers", "diffusers.models.autoencoders")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Where no GPU is, only the CPU: for every kind of GPU torch writes down who seeded it, 1 ms in each of 9000."""
    (torch if GPUS else torch.default_generator).manual_seed(0)


@pytest.fixture
def of_ranks() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """What makes a DTensor of a tensor, over a mesh of this one rank."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    yield lambda x: distribute_tensor(x, mesh, [Replicate()])
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], World]]:
    """`worlds(3).run(function, *args)`: a World of so many ranks, the same one for every test of a module.

    Not of the session: the threads of every group that a test makes live as long as its ranks and wake a hundred times
    a second. With what a thousand tests had left behind, the last ones of `make slow` stood still.
    """
    living: dict[int, World] = {}

    def world(size: int) -> World:
        if size not in living:
            living[size] = World(size, timeout=20.0, limit=120.0, preload=PRELOAD)
        return living[size]

    yield world
    for each in living.values():
        each.close()
