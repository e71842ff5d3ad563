"""Softmax attention on the CPU against torch's, in one process and in turn: time, call cost, memory, skipped blocks.

    python benchmarks/softmax_cpu.py [--threads 2] [--rounds 9] [--out FILE.json] [--only time call memory blocks]

Every line prints the ratio it measured beside its goal. Machines are noisy: read the ratios, not the milliseconds. The
exit code is 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from arguments import above_0, file_to_write
from torch import Tensor

import foci
from foci.bench.measure import Way, interleave, ratio
from foci.check.compare import compare, difference
from foci.core.device import machine

B, H, K = 1, 8, 64
RECORDS: list[dict[str, object]] = []


def record(line: str, value: float, goal: str, met: bool, note: str = "") -> None:
    RECORDS.append({"line": line, "value": value, "goal": goal, "met": met, "note": note})
    print(f"{line:<58} {value:8.3f}   goal {goal:<12} {'met' if met else 'MISSED'}   {note}", flush=True)


def leaves(T: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, T, H, K, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def eager(
    q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What a user writes by hand."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    z = q @ k.transpose(-1, -2) * K**-0.5
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if bias is not None:
        z = z + bias
    return (z.softmax(-1) @ v).transpose(1, 2), z.logsumexp(-1).transpose(1, 2)


def backward(run: Callable[[], tuple[Tensor, ...]], inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Callable:
    return lambda: torch.autograd.grad(run(), inputs, grads)


def against_sdpa(rounds: int) -> None:
    """The plain kernel behind our contract must cost what torch's costs."""
    for dtype in (torch.float32, torch.bfloat16):
        for causal in (False, True):
            q, k, v = leaves(2048, dtype)
            mask = foci.Causal() if causal else None
            ours = lambda: foci.attention(q, k, v, mask=mask)  # noqa: B023, E731
            theirs = lambda: sdpa(q, k, v, causal)  # noqa: B023, E731
            name = f"{str(dtype)[6:]} {'causal' if causal else 'plain'}"
            grad = (torch.randn_like(q),)
            pairs = {
                "forward": (ours, theirs),
                "forward+backward": tuple(
                    backward(lambda f=f: (f(),), (q, k, v), grad) for f in (ours, theirs)
                ),
            }  # fmt: skip
            for stage, (mine, other) in pairs.items():
                with torch.set_grad_enabled(stage != "forward"):
                    times = interleave({"ours": Way(mine), "theirs": Way(other)}, rounds=rounds)
                measured = ratio(times["ours"], times["theirs"])
                goal = 1.05
                record(
                    f"{name}, {stage}: time / SDPA",
                    measured.median,
                    f"<= {goal}",
                    measured.median <= goal,
                    str(measured),
                )
            if dtype == torch.bfloat16:
                bfloat16_errors(name, q, k, v, causal)


def bfloat16_errors(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """The error budget of half precision: lse within 2e-4, out no worse than a plain bfloat16 computation."""
    mask = foci.Causal() if causal else None
    with torch.no_grad():
        out, lse = foci.attention_with_lse(q, k, v, mask=mask)
        true_out, true_lse = foci.attention_with_lse(q.double(), k.double(), v.double(), mask=mask, backend="reference")
        z = q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2) * K**-0.5
        if causal:
            z = z.masked_fill(~torch.ones(z.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        plain = (z.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)
    error = (lse - true_lse).abs().max().item()
    record(f"{name}: |lse - float64|", error * 1e4, "<= 2 (1e-4)", error <= 2e-4)
    share = compare(out, true_out, difference(plain, true_out), q.dtype).share
    record(f"{name}: error of out / budget", share, "<= 1", share <= 1)


def against_eager(rounds: int) -> None:
    """What torch's fused kernels refuse, against what a user would write by hand."""
    q, k, v = leaves(2048)
    T = q.shape[1]
    out_grad, lse_grad = torch.randn_like(q), torch.randn(B, T, H)
    bias = torch.randn(1, H, T, T).requires_grad_()
    cases: list[tuple[str, Callable, Callable, tuple[Tensor, ...], tuple[Tensor, ...], float]] = [
        (
            "softcap + lse",
            lambda: foci.attention_with_lse(q, k, v, softcap=30.0),
            lambda: eager(q, k, v, softcap=30.0),
            (q, k, v), (out_grad, lse_grad), 2.0,
        ),
        (
            "bias with gradient",
            lambda: (foci.attention(q, k, v, bias=bias),),
            lambda: eager(q, k, v, bias=bias)[:1],
            (q, k, v, bias), (out_grad,), 1.3,
        ),
    ]  # fmt: skip
    for name, ours, theirs, inputs, grads, goal in cases:
        ways = {"ours": Way(backward(ours, inputs, grads)), "eager": Way(backward(theirs, inputs, grads))}
        times = interleave(ways, rounds=max(3, rounds // 2))
        gain = ratio(times["eager"], times["ours"])
        record(f"{name}, forward+backward: eager / time", gain.median, f">= {goal}", gain.median >= goal, str(gain))


def call_cost(rounds: int) -> None:
    """Microseconds a call costs more than SDPA's on tensors too small to matter, both given [B, T, H, K]."""
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    calls = {
        "ours": lambda: foci.attention(q, k, v),
        "sdpa": lambda: sdpa(q, k, v, False),
        "heads first": lambda: F.scaled_dot_product_attention(*heads_first),
    }

    def many(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(1000):
                call()

        return run

    with torch.no_grad():
        times = interleave({name: Way(many(call)) for name, call in calls.items()}, rounds=rounds * 3)
    ours, theirs, bare = (times[name].median * 1e3 for name in calls)
    note = f"{ours:.1f} against {theirs:.1f}; SDPA on tensors that are heads first already: {bare:.1f}"
    record("tiny tensors: us a call above SDPA", ours - theirs, "<= 20", ours - theirs <= 20, note)


def _peak(kind: str, T: int, queue: multiprocessing.Queue) -> None:
    q, k, v = leaves(T)
    grads = torch.randn_like(q), torch.randn(B, T, H)
    small = [x[:, :64].detach().requires_grad_() for x in (q, k, v)]
    run = (
        (lambda *x: foci.attention_with_lse(*x, softcap=30.0))
        if kind == "ours"
        else (lambda *x: eager(*x, softcap=30.0))
    )
    torch.autograd.grad(run(*small), small, [g[:, :64] for g in grads])  # libraries load their buffers
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.autograd.grad(run(q, k, v), (q, k, v), grads)
    queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def peak_memory(kind: str, T: int) -> int:
    """Bytes by which a fresh process grew during one forward and backward."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_peak, args=(kind, T, queue))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"measuring {kind} at T={T} ended with exit code {process.exitcode}")
    return int(queue.get())


def memory() -> None:
    """Peak growth at T = 16384 with softcap against eager's, which is quadratic and measured where it fits."""
    small, large = peak_memory("eager", 2048), peak_memory("eager", 4096)
    need = large * (16384 / 4096) ** 2
    ours = peak_memory("ours", 16384)
    seen = f"eager {small / 2**20:.0f} MiB at 2048, {large / 2**20:.0f} at 4096"
    note = f"ours {ours / 2**20:.0f} MiB; {seen}, so {need / 2**30:.1f} GiB"
    record("softcap T=16384, forward+backward: peak / eager's need", ours / need, "<= 0.1", ours / need <= 0.1, note)


def blocks(rounds: int) -> None:
    """Time against the share of pairs that a mask leaves alive; all on `chunked`."""
    T, reach = 16384, 1024
    q, k, v = leaves(T)
    grad = (torch.randn_like(q),)
    masks = {"full": None, "causal": foci.Causal(), "window 1024": foci.Causal() & foci.Window(reach - 1, None)}
    live = {"full": 1.0, "causal": (T + 1) / (2 * T), "window 1024": (reach * T - reach * (reach - 1) / 2) / T**2}
    runs = {
        name: Way(backward(lambda m=m: (foci.attention(q, k, v, mask=m, backend="chunked"),), (q, k, v), grad))
        for name, m in masks.items()
    }  # fmt: skip
    times = interleave(runs, rounds=max(1, rounds // 4))
    for name in ("causal", "window 1024"):
        share = ratio(times[name], times["full"])
        excess = share.median / live[name]
        record(
            f"{name} of 16384, forward+backward: time share / live share", excess, "<= 1.5", excess <= 1.5,
            f"time {share.median:.3f}, live {live[name]:.3f}",
        )  # fmt: skip


FIGURES = ("time", "call", "memory", "blocks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=above_0, default=2)
    parser.add_argument("--rounds", type=above_0, default=9)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=FIGURES)
    parser.add_argument("--out", type=file_to_write)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{machine().line}\nB{B} H{H} T2048 K{K}, {options.threads} threads, {options.rounds} interleaved rounds\n")
    wanted = options.only
    if "time" in wanted:
        against_sdpa(options.rounds)
        against_eager(options.rounds)
    if "call" in wanted:
        call_cost(options.rounds)
    if "memory" in wanted:
        memory()
    if "blocks" in wanted:
        blocks(options.rounds)
    if options.out:
        options.out.write_text(json.dumps({"machine": machine().as_dict(), "records": RECORDS}, indent=1) + "\n")
    missed = [r["line"] for r in RECORDS if not r["met"]]
    print(f"\n{len(RECORDS) - len(missed)} of {len(RECORDS)} goals met" + (f"; missed: {missed}" if missed else ""))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
