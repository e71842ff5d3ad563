"""The ranks of attend.py started by Ray, on this machine or over a cluster.

python examples/parallel/on_ray.py [--ranks 4] [--gpus] [--ulysses 2] [--tokens 1000]

Needs ray (`pip install ray`). Each rank is an actor; the first says where they meet.
"""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

import ray
import torch
import torch.distributed as dist
from attend import run


class Rank:
    """One rank, in a process of its own on some machine of the cluster."""

    def address(self) -> str:
        """Where the ranks can meet: this machine, and a port that is free now."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def attend(self, rank: int, size: int, address: str, ulysses: int, tokens: int) -> str:
        """Ray gives each actor the GPU that it may see, so that every rank's own is number 0."""
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=size)
        line = run(ulysses, tokens)
        dist.destroy_process_group()
        return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument("--ulysses", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    ray.init()
    actor: Any = ray.remote(num_gpus=int(options.gpus), num_cpus=1)(Rank)
    ranks = [actor.remote() for _ in range(options.ranks)]
    address = ray.get(ranks[0].address.remote())
    work = [
        each.attend.remote(rank, options.ranks, address, options.ulysses, options.tokens)
        for rank, each in enumerate(ranks)
    ]
    print(ray.get(work)[0], flush=True)  # the first error of any rank is raised here
    ray.shutdown()


if __name__ == "__main__":
    main()
