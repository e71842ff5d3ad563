"""A projection and attention over ranks that share a sequence, forward and backward, held against one process.

torchrun --nproc-per-node 4 examples/parallel/attend.py [--ulysses 2] [--tokens 1000]

GPUs are used where there is one for each rank of this machine, else the CPU. README.md beside it has the commands for
several machines, for Slurm and for Ray.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import foci
from foci.parallel import Group, shard, unshard, usp

HEADS, SIZE = 8, 32


def attend(layer: torch.nn.Module, x: Tensor, op: Any) -> Tensor:
    """x [1, T, D] -> [1, T, H, K]: every token's own work needs no other rank; attention does."""
    q, k, v = layer(x).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
    out: Tensor = op(q, k, v, mask=foci.Causal())
    return out


def compare(ulysses: int, tokens: int, device: torch.device) -> str:
    """The largest errors over ranks, and what was sent, as a line."""
    size = dist.get_world_size()
    if size % ulysses:
        raise ValueError(f"--ulysses must divide the {size} ranks, got {ulysses}")
    # Neighbours share a Ulysses group: its all-to-all wants the fast links within a machine.
    places = torch.arange(size).view(size // ulysses, ulysses).T
    mesh = dist.DeviceMesh(device.type, places, mesh_dim_names=("ulysses", "ring"))
    torch.manual_seed(0)  # the same weights and the same sequence on every rank
    layer = torch.nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE, bias=False, device=device)
    x = torch.randn(1, tokens, HEADS * SIZE, device=device)

    expected = attend(layer, x, foci.attention)  # one process, for the comparison only
    expected.square().sum().backward()
    assert layer.weight.grad is not None
    whole, layer.weight.grad = layer.weight.grad.clone(), None

    op = usp(foci.attention, mesh)
    start = time.perf_counter()
    out = attend(layer, shard(x, mesh), op)  # this rank's tokens
    out.square().sum().backward()  # the loss of this rank's tokens
    dist.all_reduce(layer.weight.grad)  # a weight's gradient is the sum over ranks
    seconds = time.perf_counter() - start

    sent = sum(group.traffic.bytes for group in groups(op))
    errors = [relative(unshard(out.detach(), mesh), expected), relative(layer.weight.grad, whole)]
    return (
        f"{size} ranks ({ulysses} Ulysses x {size // ulysses} ring) on {device.type}, {tokens} tokens: output off by "
        f"{errors[0]:.1e}, gradient by {errors[1]:.1e}; {seconds:.2f} s, {sent / 1e6:.1f} MB sent by rank 0"
    )


def groups(op: Any) -> list[Group]:
    found = []
    while hasattr(op, "group"):
        found.append(op.group)
        op = op.inner
    return found


def relative(x: Tensor, expected: Tensor) -> float:
    return float((x - expected).abs().max() / expected.abs().max())


def run(ulysses: int, tokens: int) -> str:
    """What a rank does once torch.distributed is initialised."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpu and torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return compare(ulysses, tokens, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ulysses", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    # Both: tensors go over NCCL, and what ranks agree on, and news of failures, over gloo.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    line = run(options.ulysses, options.tokens)
    if dist.get_rank() == 0:
        print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
