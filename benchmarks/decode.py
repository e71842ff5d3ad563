"""How much of a copy's bandwidth decoding reaches: states read and written, keys and values read, one token a row.

    python benchmarks/decode.py [--device cuda] [--json PATH]

Right before fast: every answer, and every state that is written, is compared with float64 first. `share`: bytes a
second over those of a copy that is timed in the same run. Memory that is read lies in no cache: it is larger than one,
and something else has filled that before every call, by a write, as in `foci bench`, or (`clean`) by a read, as weights
do before a step of a model. What was written goes to memory during the call: on an H200 50 MB, beside the 268 that one
row of 65536 keys reads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from arguments import file_to_write
from errors import worst
from torch import Tensor
from torch.nn.functional import normalize

import foci
from foci.bench.ceilings import ceilings
from foci.bench.measure import Way, clock_on, host_seconds, interleave
from foci.ops.softmax.paged import attention_paged

WRONG = 5e-3  # relative RMS against float64: the budget of half precision


@dataclass(frozen=True)
class Step:
    """One kind of decoding: `run` does it, `exact` gives its answer in float64, `moved` bytes at least are moved.

    Of what has a `state`, `run` writes it in place, and `exact` gives it as well.
    """

    name: str
    run: Callable[[], Tensor]
    exact: Callable[[], tuple[Tensor, ...]]
    moved: int
    state: Tensor | None = None


@dataclass(frozen=True)
class Row:
    """What was measured; times in microseconds."""

    name: str
    gpu_us: float
    host_us: float
    share: float
    error: float
    clean_us: float
    clean_share: float


def recurrent(device: torch.device, B: int, H: int, K: int) -> Iterator[Step]:
    """States [B,H,K,K] in float32, tokens in bfloat16."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    q, v = (draw(B, H, K).bfloat16() for _ in range(2))
    k = normalize(draw(B, H, K), dim=-1).bfloat16()
    beta, state = draw(B, H).sigmoid(), draw(B, H, K, K)
    for name, gates in (("token", -draw(B, H).exp()), ("channel", -draw(B, H, K).exp())):

        def whole(call: Callable[..., Any], *given: Tensor, gates: Tensor = gates) -> tuple[Tensor, ...]:
            tokens, start = [x[:, None].double() for x in given], state.double()
            out, final = call(*tokens, log_decay=gates[:, None].double(), state=start, return_state=True)
            return out[:, 0], final

        start = state.clone()
        yield Step(
            f"linear attention, decay per {name}",
            lambda s=start, g=gates: foci.linear_attention_step(q, k, v, s, log_decay=g),  # type: ignore[misc]
            lambda whole=whole: whole(foci.linear_attention, q, k, v),  # type: ignore[misc]
            2 * state.nbytes,
            start,
        )
        start = state.clone()
        yield Step(
            f"delta rule, decay per {name}",
            lambda s=start, g=gates: foci.delta_rule_step(q, k, v, beta, s, log_decay=g),  # type: ignore[misc]
            lambda whole=whole: whole(foci.delta_rule, q, k, v, beta),  # type: ignore[misc]
            2 * state.nbytes,
            start,
        )


def softmax(device: torch.device, B: int, S: int, H: int, G: int, K: int, page: int = 64) -> Iterator[Step]:
    """Caches [B,S,G,K] in bfloat16, whole and in pages."""
    q = torch.randn(B, 1, H, K, device=device).bfloat16()
    k, v = (torch.randn(B, S, G, K, device=device).bfloat16() for _ in range(2))
    pages = [x.view(-1, page, G, K) for x in (k, v)]
    table = torch.arange(B * S // page, dtype=torch.int32, device=device).view(B, -1)
    lengths = torch.full((B,), S, dtype=torch.int32, device=device)

    def exact() -> tuple[Tensor, ...]:
        rows = zip(q.split(1), k.split(1), v.split(1), strict=True)  # one at a time: all of it may be much
        return (torch.cat([foci.attention(*(x.double() for x in row)) for row in rows]),)

    def whole() -> Tensor:
        return foci.attention(q, k, v)

    def paged() -> Tensor:
        return attention_paged(q, *pages, table, lengths)

    name = f"softmax, {B} rows of {S} keys"
    yield Step(name, whole, exact, k.nbytes + v.nbytes)
    yield Step(f"{name} in pages", paged, exact, k.nbytes + v.nbytes)


def measure(step: Step, device: torch.device, copied: float) -> Row:
    """Bytes a second over `copied`, or what is wrong."""
    with torch.no_grad():
        truths, found = step.exact(), [step.run(), *([] if step.state is None else [step.state])]
        pairs = zip(found, truths, strict=True)
        error = worst(*(float((x.double() - true).norm() / true.norm()) for x, true in pairs))
        if not error <= WRONG:
            raise ValueError(f"off by {error:.2g}: no time is given for it")
        taken, clean = (
            interleave({"it": Way(step.run)}, rounds=15, seconds=0.5, clock=clock_on(device, clean=clean))["it"].median
            for clean in (False, True)
        )
        host = host_seconds(step.run)
    shares = [step.moved / seconds / copied for seconds in (taken, clean)]
    return Row(step.name, taken * 1e6, host * 1e6, shares[0], error, clean * 1e6, shares[1])


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    words.add_argument("--json", type=file_to_write)
    given = words.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("decode.py: it needs a GPU, and there is none here; --device cpu does without one")
    device = torch.device(given.device)
    large = device.type == "cuda"
    copied = ceilings(torch.bfloat16 if large else torch.float32, device).bytes
    print(f"{'a copy moves':<44}{copied / 1e9:8.0f} GB/s")
    steps = [*recurrent(device, 64 if large else 1, 32 if large else 2, 128)]
    for B, S in ((64, 8192), (1, 65536)) if large else ((1, 256),):
        steps += softmax(device, B, S, 32, 8, 128)
    rows = []
    for step in steps:
        try:
            rows.append(measure(step, device, copied))
        except Exception as error:  # one that fails must not end the others
            print(f"{step.name:<44}-  {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        row = rows[-1]
        times = f"{row.gpu_us:8.1f} us, {row.share:4.0%} of a copy, clean {row.clean_us:.1f} us, {row.clean_share:.0%}"
        print(f"{row.name:<44}{times}, host {row.host_us:.0f} us", flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if len(rows) < len(steps):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
