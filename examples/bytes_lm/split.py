"""Train bytes-lm over ranks that share each sequence, beside one process, and read a long context so: gloo, on a CPU.

python examples/bytes_lm/split.py [--ranks 4] [--steps 10] [--dtype float32|float64] [--muon]
torchrun --nproc-per-node 4 examples/bytes_lm/split.py

The second starts the ranks by torchrun, also over several machines. Needs foci[transformers]. Each line: the loss of
one process, that over ranks, how far they are apart. The steps are train.py's without its autocast, with AdamW for all
weights; --muon takes train.py's Muon too, which rounds to bfloat16 inside: float32's last digits are then seen.
"""

from __future__ import annotations

import argparse
import copy
import json
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train as recipe
from torch import Tensor

from foci.accelerate import bytes_lm
from foci.core.world import World
from foci.integrations.sequence import split_sequence
from foci.parallel import Group, shard


def optimizers(model: Any, muon: bool) -> list[torch.optim.Optimizer]:
    if muon:
        return recipe.optimizers(model)
    return [torch.optim.AdamW(model.parameters(), lr=recipe.ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)]


def update(model: Any, makers: list[torch.optim.Optimizer]) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in makers:
        optimizer.step()
        optimizer.zero_grad()


def loss_over(model: Any, reads: Tensor, wanted: Tensor, group: Group) -> float:
    """One step's loss and gradients, each rank with its run of every sequence."""
    with split_sequence(model, group) as split:
        logits = model(shard(reads, group, "plain"), use_cache=False).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, shard(wanted, group, "plain").flatten(), reduction="sum") / wanted.numel()
        loss.backward()
        split.reduce_gradients()
    whole = loss.detach()
    dist.all_reduce(whole, group=group.pg)
    return whole.item()


def learn(steps: int, rows: int, dtype: torch.dtype, muon: bool) -> list[dict[str, float]]:
    """The curve; every rank also trains the model of one process, to compare with."""
    group = Group.of(dist.group.WORLD)
    text = bytes_lm.text_of(bytes_lm.library_files("train"))
    alone = bytes_lm.untrained(bytes_lm.HYBRID, seed=recipe.SEED).train().to(dtype)
    together = copy.deepcopy(alone)
    makers = [optimizers(model, muon) for model in (alone, together)]
    curve = []
    for step in range(steps):
        batch = recipe.batch(text, step)[:rows]
        reads, wanted = batch[:, :-1], batch[:, 1:]
        loss = F.cross_entropy(alone(reads, use_cache=False).logits.flatten(0, 1), wanted.flatten())
        loss.backward()
        split = loss_over(together, reads, wanted, group)
        for model, own in zip((alone, together), makers, strict=True):
            update(model, own)
        curve.append({"step": step, "alone": loss.item(), "over ranks": split, "apart": abs(loss.item() - split)})
    return curve


@torch.no_grad()
def read(context: int, tokens: int) -> tuple[str, str, int]:
    """What the trained model writes behind a long context: read in one process, and over ranks; bytes sent."""
    group, model = Group.of(dist.group.WORLD), bytes_lm.load()
    ids = bytes_lm.text_of(bytes_lm.library_files("validation"))[None, :context].long()
    memories, written = (bytes_lm.BytesCache(), bytes_lm.BytesCache()), []
    model(ids, past_key_values=memories[0], logits_to_keep=1)
    with split_sequence(model, group):
        model(shard(ids, group, "plain"), past_key_values=memories[1], logits_to_keep=1)
    sent = group.traffic.bytes
    for memory in memories:
        token, found = ids[:, -1:], []
        for _ in range(tokens):
            token = model(token, past_key_values=memory).logits[:, -1:].argmax(-1)
            found.append(int(token))
        written.append(bytes(found).decode(errors="replace"))
    return written[0], written[1], sent


def both(steps: int, rows: int, dtype: torch.dtype, muon: bool, context: int) -> Any:
    return learn(steps, rows, dtype, muon), read(context, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="how many to start; torchrun says it itself")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=2, help="of a step's batch")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--muon", action="store_true")
    parser.add_argument("--context", type=int, default=8192)
    given = parser.parse_args()
    work = (given.steps, given.rows, getattr(torch, given.dtype), given.muon, given.context)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        rank, (curve, (alone, together, sent)) = dist.get_rank(), both(*work)
        dist.destroy_process_group()
    else:
        with World(given.ranks, timeout=600.0, limit=3600.0) as world:
            rank, (curve, (alone, together, sent)) = 0, world.run(both, *work)[0]
    if rank == 0:
        for entry in curve:
            print(json.dumps(entry))
        print(f"behind {given.context} bytes, read in one process: {alone!r}")
        print(f"read over ranks ({sent} bytes sent by this one):   {together!r}")


if __name__ == "__main__":
    main()
