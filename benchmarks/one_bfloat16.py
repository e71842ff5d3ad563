"""What inference of Gated DeltaNet gains by one bfloat16 where keys are not alike, and what that costs in digits.

    python benchmarks/one_bfloat16.py                  # on a Hopper GPU: each kernel's microseconds, and errors
    python benchmarks/one_bfloat16.py --emulate 5000   # on a CPU: the worst of so many random problems

On a GPU: torch.profiler, medians of 15, behind a read that leaves nothing in a cache; keys in random directions, and
keys with a cosine of 0.8 on the mean. On a CPU the roundings of the walk are made in float64, chunk by chunk.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import defaultdict
from typing import Any

import torch
from errors import worst
from torch import Tensor
from torch.nn.functional import normalize

from foci.ops.delta.api import delta_rule
from foci.ops.delta.kernels_triton_chunks import ALIKE

SHAPES = ((4, 8192, 16, 32), (1, 8192, 16, 32))  # rows, tokens, heads of keys and of values
CHUNK, K = 64, 128


def inputs(
    B: int, T: int, G: int, H: int, alike: float, device: str, beta: float = 1.0, gates: float = 1.0, V: int = K
) -> dict[str, Any]:
    """Keys and queries are of length 1 and have a cosine of alike^2 / (1 + alike^2) on the mean."""
    mean = alike * torch.randn(G, K, device=device)
    q, k = (normalize(torch.randn(B, T, G, K, device=device) + mean, dim=-1).bfloat16() for _ in range(2))
    v, forgets = torch.randn(B, T, H, V, device=device), torch.randn(B, T, H, device=device)
    write = beta * torch.rand(B, T, H, device=device)
    decay = -0.03 * gates * (1.5 * forgets).exp()
    return {"q": q, "k": k, "v": v.bfloat16(), "beta": write.bfloat16(), "log_decay": decay}


def off(found: Tensor, wanted: Tensor) -> float:
    """In percent of all numbers' root mean square."""
    return float(100 * (found.double() - wanted).norm() / wanted.norm())


def timed(call: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each kernel of a forward."""
    cold, took = torch.empty(100_000_000, device="cuda"), defaultdict(list)
    delta_rule(**call, backend="triton")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(15):
            cold.sum()
            delta_rule(**call, backend="triton")
        torch.cuda.synchronize()
    for event in profile.events() or ():
        if event.name.startswith(("token_", "wide_", "lost_")):
            took[event.name].append(float(event.device_time))
    return {name: round(statistics.median(each), 1) for name, each in took.items()}


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def walked(call: dict[str, Any], rounds: bool) -> tuple[Tensor, Tensor]:
    """(out [T,V], the final state) of one head in float64: as the kernels round, or not at all."""
    q, k, v, beta, g = (x.double()[0, :, 0] for x in call.values())
    S, outs, scale = torch.zeros(K, v.shape[1], dtype=torch.float64), [], K**-0.5
    for t in range(0, len(q), CHUNK):
        queries, keys, values, write, gates = (x[t : t + CHUNK] for x in (q, k, v, beta, g))
        c = gates.cumsum(0)
        rise, fall = c.exp()[:, None], (c[-1] - c).exp()[:, None] * write[:, None]
        W = (c[:, None] - c[None, :]).exp().tril() * write
        E, A = (keys @ keys.mT * W).tril(-1), queries @ keys.mT * W * scale
        exact = (E.square().sum(1) > ALIKE.value).cumsum(0)[:, None] > 0

        def one(x: Tensor, exact: Tensor = exact) -> Tensor:
            high = rounded(x)
            return torch.where(exact, high + rounded(x - high), high) if rounds else x

        state = rounded(S) if rounds else S
        X = torch.linalg.inv(torch.eye(len(c), dtype=torch.float64) + E)
        d = one(X) @ one(values - rise * (keys @ state))
        outs.append(rise * scale * (queries @ state) + one(A) @ one(d))
        S = c[-1].exp() * S + keys.mT @ one(fall * d)
    return torch.cat(outs), S


def emulated(count: int) -> list[tuple[float, float, dict[str, Any]]]:
    """Errors of out and of the final state of random problems, worst first."""
    draw, found = random.Random(5), []
    for seed in range(count):
        torch.manual_seed(seed)
        options: dict[str, Any] = {
            "alike": draw.choice((0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0, 2.0)),
            "beta": draw.choice((0.5, 1.0, 2.0)),
        }
        options |= {"gates": 10 ** draw.uniform(-3, 1.2), "T": draw.choice((64, 100, 200, 500, 1000))}
        call = inputs(B=1, G=1, H=1, V=draw.choice((8, 64)), device="cpu", **options)
        (out, state), (wanted, last) = walked(call, True), walked(call, False)
        found.append((worst(off(out.bfloat16(), wanted)), worst(off(state, last)), options))
    return sorted(found, key=lambda each: -each[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", type=int, metavar="PROBLEMS")
    count = parser.parse_args().emulate
    if count is not None and count < 1:
        parser.error(f"argument --emulate: {count}: expected a number of problems above 0")
    if count:
        found = emulated(count)
        print(f"{count} problems, {sum(each[0] > 0.5 for each in found)} over 0.5 %; the worst:")
        for out, state, options in found[:5]:
            print(f"  out {out:.3f} %, state {state:.3f} %  {options}")
        print(f"  state {max(each[1] for each in found):.3f} % at most")
        return
    if not torch.cuda.is_available():
        sys.exit("one_bfloat16.py: there is no GPU here; --emulate PROBLEMS needs none")
    for shape in SHAPES:
        for alike in (0.0, 2.0):
            call = inputs(*shape, alike, "cuda")
            took = timed(call)
            few = {name: x[:1, :2048] for name, x in call.items()}
            exact = delta_rule(**{name: x.double() for name, x in few.items()}, backend="chunked")[0]
            error = off(delta_rule(**call, backend="triton")[0][:1, :2048], exact)
            print(
                f"{shape} keys {'alike' if alike else 'random'}: {took}, out {error:.3f} % off in its first 2048 tokens"
            )


if __name__ == "__main__":
    with torch.no_grad():
        main()
