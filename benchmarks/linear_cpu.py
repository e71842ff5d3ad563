"""Linear attention, the delta rule and the scans on the CPU against transformers' torch code and FLA's naive chunks.

    python benchmarks/linear_cpu.py [--threads 1 2] [--only gdn kda rate native length scan compile] [--rounds 9]
                                    [--quick] [--fla fla_core-*.whl] [--out FILE.json]

One process, ours and theirs in turn; results must agree before they are timed. Every line prints the ratio it measured
beside its goal, and the exit code is 1 where one is missed. Machines are noisy: read the ratios, not the milliseconds,
and measure on an idle one. --quick shows that all of it runs, on small problems, and is no measurement; the rest takes
about a quarter of an hour for each number of threads. FLA's naive modules are read from its wheel, which is not
installed.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import types
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from arguments import above_0, file_to_write
from torch import Tensor

import foci
from foci.bench.measure import Sample, Way, interleave, ratio
from foci.bench.memory import peak_memory
from foci.check.compare import RECURRENT, difference, rms
from foci.core.device import machine
from foci.core.select import choose
from foci.ops import SPECS

Inputs = dict[str, Any]
Run = Callable[..., Tensor]

AGREE = 1e-4  # relative RMS difference that two float32 implementations may have
SECONDS = 20.0  # of timed runs, after which a comparison begins no further round (after three at least)
EPSILON = 1.05  # "not slower", as benchmarks/softmax_cpu.py has it: the noise of a median


@dataclass
class Bench:
    """What was asked for, and what was found."""

    rounds: int
    quick: bool
    fla: Path | None
    threads: int = 1
    records: list[dict[str, Any]] = field(default_factory=list)

    def size(self, real: int, quick: int) -> int:
        return quick if self.quick else real

    def time(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, Sample]:
        return interleave({name: Way(run) for name, run in runs.items()}, rounds=self.rounds, seconds=SECONDS)

    def record(self, line: str, value: float, goal: str, note: str = "") -> None:
        """`goal` is "<= x", ">= x" or "" for a figure that has none; small problems are not judged."""
        sign, _, limit = goal.partition(" ")
        met = self.quick or not goal or (value <= float(limit) if sign == "<=" else value >= float(limit))
        facts = {"line": line, "threads": self.threads, "value": value, "goal": goal, "met": met, "note": note}
        self.records.append(facts)
        print(f"{line:<62} {value:8.3f}   {goal:<8} {'' if met else 'MISSED':<8}{note}", flush=True)

    def gain(self, line: str, times: Mapping[str, Sample], theirs: str, ours: str, least: float | None) -> None:
        """How many times faster ours is."""
        found = ratio(times[theirs], times[ours])
        note = f"{found}; {1e3 * times[theirs].median:.2f} ms -> {1e3 * times[ours].median:.2f} ms"
        self.record(f"{line}: {theirs} / ours", found.median, "" if least is None else f">= {least}", note)

    def cost(self, line: str, times: Mapping[str, Sample], ours: str, other: str, most: float) -> None:
        """How much of another's time ours takes."""
        self.record(line, (found := ratio(times[ours], times[other])).median, f"<= {most}", str(found))


# Problems: arguments by name, drawn as trained models have them.


@dataclass(frozen=True)
class Kind:
    """An operator with gates of a rank: 0 none, 3 per token, 4 per channel."""

    name: str
    function: Callable[..., tuple[Tensor, Tensor | None]]
    spec: str
    gates: int

    def problem(self, B: int, T: int, H: int, D: int, dtype: torch.dtype = torch.float32) -> Inputs:
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        q, k = (torch.nn.functional.normalize(normal(B, T, H, D), dim=-1).to(dtype) for _ in range(2))
        made: Inputs = {"q": q, "k": k, "v": normal(B, T, H, D).to(dtype)}
        if self.spec == "delta":
            made["beta"] = normal(B, T, H).sigmoid().to(dtype)
        if self.gates:
            made["log_decay"] = torch.nn.functional.logsigmoid(3 + normal(*(B, T, H, D)[: self.gates]))
        return made

    def flops(self, inputs: Inputs) -> int:
        spec = SPECS[self.spec]
        assert spec.work is not None and spec.bind is not None
        return spec.work(spec.bind(**inputs)).flops

    def __call__(self, **inputs: Tensor) -> Tensor:
        return self.function(**inputs)[0]


SIMPLE_GLA = Kind("simple GLA", foci.linear_attention, "linear", 3)
GLA = Kind("GLA", foci.linear_attention, "linear", 4)
DELTA = Kind("delta rule", foci.delta_rule, "delta", 0)
GDN = Kind("Gated DeltaNet", foci.delta_rule, "delta", 3)
KDA = Kind("KDA", foci.delta_rule, "delta", 4)


def forward(run: Run, inputs: Inputs) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            return run(**inputs)

    return call


def trained(run: Run, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """Forward, and backward to every input."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    cotangent = torch.randn(forward(run, inputs)().shape, generator=torch.Generator().manual_seed(1))

    def call() -> tuple[Tensor, ...]:
        out = run(**leaves)
        return torch.autograd.grad(out, list(leaves.values()), cotangent.to(out.dtype))

    return call


STAGES: dict[str, Callable[[Run, Inputs], Callable[[], Any]]] = {"forward": forward, "forward+backward": trained}


def agree(what: str, ours: object, theirs: object, most: float = AGREE) -> None:
    """Nothing is timed that computes something else."""
    worst = max(rms(difference(x, y)) / rms(y) for x, y in zip(_listed(ours), _listed(theirs), strict=True))
    if not worst <= most:
        raise SystemExit(f"{what}: results differ by {worst:.1e} of their size, at most {most:.0e}: not timed")


def _listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


# Peers.


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of transformers without its choice of kernels: the torch code itself."""
    return getattr(function, "__wrapped__", function)


def in_their_words(function: Callable[..., Any]) -> Run:
    """A peer's delta rule, which calls the decay g, under our names."""

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        out: Tensor = function(q, k, v, g=log_decay, beta=beta)[0]
        return out

    return run


def peers(bench: Bench, kind: Kind) -> dict[str, Run]:
    """The chunked forms of others, by name."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    theirs = qwen.torch_chunk_gated_delta_rule if kind is GDN else kimi.chunk_kimi_delta_attention
    found = {"transformers": in_their_words(bare(theirs))}
    if bench.fla is not None:
        path, name = ("gated_delta_rule", "gated_delta_rule") if kind is GDN else ("kda", "kda")
        module = types.ModuleType(f"fla_{path}")
        source = zipfile.ZipFile(bench.fla).read(f"fla/ops/{path}/naive.py")
        exec(compile(source, f"fla/ops/{path}/naive.py", "exec"), module.__dict__)
        found["FLA naive"] = in_their_words(getattr(module, f"naive_chunk_{name}"))
    return found


# Figures.


def gdn(bench: Bench) -> None:
    """Gated DeltaNet, 16 heads of 128 x 128: prefill, training, one token."""
    for T in (256,) if bench.quick else (1024, 2048, 4096):
        _against_peers(bench, GDN, T, prefill=1.5, training=3.5)
    for B, least in ((1, 2.0), (8, 5.0)):
        _decode(bench, GDN, B, least)


def kda(bench: Bench) -> None:
    """Kimi Delta Attention, the same size; theirs holds [C, C, K] per chunk, so that longer ones do not fit here."""
    T = bench.size(1024, 128)
    _against_peers(bench, KDA, T, prefill=6, training=5)
    channel, token = (kind.problem(1, T, 16, 128) for kind in (KDA, GDN))
    times = bench.time({"KDA": forward(KDA, channel), "GDN": forward(GDN, token)})
    bench.cost(f"KDA T={T}, forward: KDA / our Gated DeltaNet", times, "KDA", "GDN", 1.5)

    spec = SPECS["delta"]
    assert spec.bind is not None
    call = spec.bind(**channel)
    backend = choose(spec, call).load()  # an op is opaque, its scratch would not show; C++ has a chunk's a thread
    cpu = torch.device("cpu")
    ours = peak_memory(lambda: backend.forward(call), cpu)
    theirs = peak_memory(forward(peers(bench, KDA)["transformers"], channel), cpu)
    note = f"{ours / 2**20:.0f} MiB, theirs {theirs / 2**20:.0f}, outputs included"
    bench.record(f"KDA T={T}, forward: temporaries / transformers'", ours / theirs, "<= 0.125", note)
    for B in (1, 8):
        _decode(bench, KDA, B, None)


def _against_peers(bench: Bench, kind: Kind, T: int, prefill: float, training: float) -> None:
    inputs, others = kind.problem(1, T, bench.size(16, 2), 128), peers(bench, kind)
    everyone: dict[str, Run] = {"ours": kind, **others}
    for (stage, make), least in zip(STAGES.items(), (prefill, training), strict=True):
        runs = {name: make(run, inputs) for name, run in everyone.items()}
        mine = runs["ours"]()
        for name in others:
            agree(f"{kind.name}, {stage}, {name}", mine, runs[name]())
        times = bench.time(runs)
        for name in others:
            bench.gain(f"{kind.name} T={T}, {stage}", times, name, "ours", least if name == "transformers" else None)


def _decode(bench: Bench, kind: Kind, B: int, least: float | None) -> None:
    """One token with a state: ours is written in place, theirs is a new one."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    theirs = bare(qwen.torch_recurrent_gated_delta_rule if kind is GDN else kimi.recurrent_kimi_delta_attention)
    tokens, state = kind.problem(B, 1, 16, 128), torch.randn(B, 16, 128, 128)
    one = {name: x[:, 0] for name, x in tokens.items()}
    q, k, v, beta, g = (tokens[name] for name in ("q", "k", "v", "beta", "log_decay"))

    def step() -> Tensor:
        return foci.delta_rule_step(**one, state=state)

    def their_step() -> Tensor:
        out: Tensor = theirs(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)[0]
        return out[:, 0]

    with torch.no_grad():
        right = their_step()  # first: ours writes the state
        agree(f"{kind.name}, one token, B={B}", step(), right)
        times = bench.time({"ours": _many(step, bench), "transformers": _many(their_step, bench)})
    bench.gain(f"{kind.name}, one token, B={B}", times, "transformers", "ours", least)


def _many(run: Callable[[], object], bench: Bench) -> Callable[[], None]:
    """So that the clock's own cost does not show."""

    def often() -> None:
        for _ in range(bench.size(50, 3)):
            run()

    return often


def rate(bench: Bench) -> None:
    """B1 H8 T4096 D128: the share of the rate of small batched products, backward / forward, bfloat16 / float32."""
    T = bench.size(4096, 256)
    goals = {SIMPLE_GLA: 0.70, DELTA: 0.65, GLA: 0.45, KDA: 0.45}
    a, b = torch.randn(T // 8, 64, 128), torch.randn(T // 8, 128, 128)  # as many as 8 heads have chunks of 64
    wide = {kind: kind.problem(1, T, 8, 128) for kind in goals}
    half = {kind: kind.problem(1, T, 8, 128, torch.bfloat16) for kind in goals}
    for kind in goals:
        rounded = {name: x.float() for name, x in half[kind].items()}
        agree(f"{kind.name}, bfloat16", forward(kind, half[kind])(), forward(kind, rounded)(), RECURRENT)
    runs = {f"{kind.name}, float32": forward(kind, wide[kind]) for kind in goals}
    runs |= {f"{kind.name}, bfloat16": forward(kind, half[kind]) for kind in goals}
    times = bench.time({"products": lambda: torch.bmm(a, b), **runs})
    fastest = 2 * a.numel() * b.shape[2] / times["products"].median
    print(f"{'':4}64 x 128 x 128 products: {fastest / 1e9:.0f} GFLOP/s", flush=True)
    for kind, least in goals.items():
        name, work = f"{kind.name}, float32", kind.flops(wide[kind])
        found = ratio(times["products"], times[name])  # paired by round
        share = found.median * work / (2 * a.numel() * b.shape[2])
        note = f"{work / times[name].median / 1e9:.0f} GFLOP/s, {1e3 * times[name].median:.1f} ms"
        bench.record(f"{name} T={T}, forward: share of the products' rate", share, f">= {least}", note)
    for kind in goals:
        least = 1.5 if kind is SIMPLE_GLA else 1 / EPSILON
        found = ratio(times[f"{kind.name}, float32"], times[f"{kind.name}, bfloat16"])
        bench.record(f"{kind.name} T={T}, forward: float32 / bfloat16", found.median, f">= {least:.3g}", str(found))
    for kind in goals:
        both = bench.time({"forward": forward(kind, wide[kind]), "both": trained(kind, wide[kind])})
        bench.cost(f"{kind.name}, float32 T={T}: forward+backward / forward", both, "both", "forward", 4.0)


def native(bench: Bench) -> None:
    """What the compiled backend is worth beside `chunked`: B1 H8 D128, and Mamba's scan."""
    T = bench.size(2048, 256)
    problems: list[tuple[str, Run, Inputs]] = [
        (kind.name, functools.partial(kind.function), kind.problem(1, T, 8, 128))
        for kind in (SIMPLE_GLA, GLA, DELTA, GDN, KDA)
    ]
    problems.append(("selective scan", foci.selective_scan, mamba_problem(bench.size(1536, 128), T)))
    for name, function, inputs in problems:
        ways = {b: functools.partial(_first, function, b) for b in ("native", "chunked")}
        for stage in STAGES if name != "selective scan" else ("forward",):
            _pair(bench, f"{name} T={T}", stage, ways, inputs, 1.5)


def _first(function: Callable[..., Any], backend: str, **inputs: Tensor) -> Tensor:
    out: Tensor = function(**inputs, backend=backend)[0]
    return out


def length(bench: Bench) -> None:
    """B1 H8 D128: time grows as T does, and is below softmax attention's from T = 2k up."""
    first, longest, crossing = (128, 512, 256) if bench.quick else (1024, 65536, 2048)
    lengths = [first << n for n in range((longest // first).bit_length())]
    for kind in (SIMPLE_GLA, DELTA, GLA, KDA):
        runs = {str(T): forward(kind, kind.problem(1, T, 8, 128)) for T in lengths}
        times = bench.time(runs)
        for T in lengths[1:]:
            found = ratio(times[str(T)], times[str(first)])
            goal = 1.1 if longest == T else None
            line = f"{kind.name}, time of T={T} / time of {first}, / {T // first}"
            bench.record(line, found.median * first / T, f"<= {goal}" if goal else "", str(found))
        for T in (T for T in lengths if crossing <= T <= 4 * crossing):
            made = kind.problem(1, T, 8, 128)
            q, k, v = made["q"], made["k"], made["v"]

            def attend(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return foci.attention(q, k, v, mask=foci.Causal())

            pair = bench.time({"ours": forward(kind, made), "softmax": forward(attend, {})})
            bench.gain(f"{kind.name} T={T}, forward", pair, "softmax", "ours", 1.0)


def scan(bench: Bench) -> None:
    """Mamba-1 against its loop over tokens, B1 T1024 D1536 N16; Mamba-2 (SSD), 24 heads of 64 x 128."""
    from transformers.models.mamba import modeling_mamba as mamba

    loop = bare(mamba.mamba_selective_scan)

    def by_token(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        out: Tensor = loop(*(y.mT for y in (x, dt)), A, *(y.mT for y in (B, C)))
        return out.mT

    def ours(**inputs: Any) -> Tensor:
        return foci.selective_scan(**inputs)[0]

    # A backward of theirs fills a tensor of all tokens' states for each token, so it is asked for fewer of them.
    D, lengths = bench.size(1536, 128), (bench.size(1024, 64), bench.size(256, 32))
    for stage, T in zip(STAGES, lengths, strict=True):
        _pair(bench, f"Mamba T={T}", stage, {"ours": ours, "token loop": by_token}, mamba_problem(D, T), 5.0)
    _ssd(bench)


def mamba_problem(D: int, T: int) -> Inputs:
    inputs = {name: torch.randn(1, T, size) for name, size in (("x", D), ("dt", D), ("B", 16), ("C", 16))}
    inputs["dt"] = torch.nn.functional.softplus(inputs["dt"] - 4)
    return inputs | {"A": -torch.arange(1.0, 17).repeat(D, 1)}


def _ssd(bench: Bench) -> None:
    from transformers.models.mamba2 import modeling_mamba2 as mamba2

    chunks = bare(mamba2.mamba2_chunk_scan)

    def theirs(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        out: Tensor = chunks(x, dt, A, B, C, chunk_size=256)
        return out

    def ours(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return foci.linear_attention(C, B, x * dt[..., None], log_decay=A * dt, scale=1.0)[0]

    T, H = bench.size(2048, 256), bench.size(24, 2)
    inputs = {name: torch.randn(1, T, 1, 128) for name in ("B", "C")}
    inputs |= {"x": torch.randn(1, T, H, 64), "dt": torch.nn.functional.softplus(torch.randn(1, T, H) - 4)}
    inputs["A"] = -torch.linspace(1, 16, H)
    for stage in STAGES:
        _pair(bench, f"SSD T={T}", stage, {"ours": ours, "transformers": theirs}, inputs, 1 / EPSILON)


def _pair(bench: Bench, line: str, stage: str, ways: dict[str, Run], inputs: Inputs, least: float) -> None:
    """Ours, the first of two ways, against the other."""
    runs = {name: STAGES[stage](way, inputs) for name, way in ways.items()}
    ours, theirs = runs
    agree(f"{line}, {stage}", runs[ours](), runs[theirs]())
    bench.gain(f"{line}, {stage}", bench.time(runs), theirs, ours, round(least, 3))


def compiled(bench: Bench) -> None:
    """torch.compile(fullgraph=True), Inductor, against eager, forward and trained."""
    T = bench.size(2048, 128)
    tokens = {name: torch.randn(1, T, 1024) for name in ("x", "dt", "log_decay")}
    tokens["dt"], tokens["log_decay"] = (torch.nn.functional.softplus(-tokens[n]) for n in ("dt", "log_decay"))
    scanned = {"x": tokens["x"], "log_decay": -tokens["log_decay"]}
    keys = {name: torch.randn(1, T, 16) for name in ("B", "C")}
    selected = {"x": tokens["x"], "dt": tokens["dt"], "A": -torch.rand(1024, 16), **keys}
    problems: list[tuple[str, Run, Inputs]] = [
        *((kind.name, kind, kind.problem(1, T, 8, 128)) for kind in (SIMPLE_GLA, GLA, DELTA, GDN, KDA)),
        ("scan", lambda **i: foci.scan(**i)[0], scanned),
        ("selective scan", lambda **i: foci.selective_scan(**i)[0], selected),
    ]
    for name, run, inputs in problems:
        torch.compiler.reset()
        fused = torch.compile(functools.partial(run), fullgraph=True)
        for stage, make in STAGES.items():
            runs = {"eager": make(run, inputs), "compiled": make(fused, inputs)}
            agree(f"{name}, compiled, {stage}", runs["compiled"](), runs["eager"]())
            bench.cost(f"{name} T={T}, {stage}: compiled / eager", bench.time(runs), "compiled", "eager", EPSILON)


FIGURES: dict[str, Callable[[Bench], None]] = {
    "gdn": gdn, "kda": kda, "rate": rate, "native": native, "length": length, "scan": scan, "compile": compiled,
}  # fmt: skip


def wheel() -> Path | None:
    """FLA's wheel where the tests have put it."""
    return next(Path(__file__).parents[1].glob(".pytest_cache/d/fla-core/*.whl"), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=above_0, nargs="+", default=[2])
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--rounds", type=above_0, default=9)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--fla", type=Path, default=wheel())
    parser.add_argument("--out", type=file_to_write)
    options = parser.parse_args()
    if options.fla is None:
        print("FLA is not timed: expected its wheel as --fla FILE.whl, or where the tests put it")
    elif not options.fla.is_file():
        parser.error(f"argument --fla: {options.fla}: expected FLA's wheel")
    bench = Bench(3 if options.quick else options.rounds, options.quick, options.fla)
    for bench.threads in options.threads:
        torch.set_num_threads(bench.threads)
        torch.manual_seed(0)
        print(f"\n{machine().line}\n{bench.threads} threads, {bench.rounds} interleaved rounds", flush=True)
        for name in options.only:
            print(f"\n{FIGURES[name].__doc__}", flush=True)
            FIGURES[name](bench)
            if options.out:
                facts = {"machine": machine().as_dict(), "quick": bench.quick, "records": bench.records}
                options.out.write_text(json.dumps(facts, indent=1) + "\n")
    missed = [f"\n  {r['line']} ({r['threads']} threads)" for r in bench.records if not r["met"]]
    goals = sum(bool(r["goal"]) for r in bench.records)
    found = f"{goals - len(missed)} of {goals} goals met" + (f"; missed:{''.join(missed)}" if missed else "")
    print(f"\n{'All of it runs; small problems are not judged' if bench.quick else found}")
    sys.exit(bool(missed) and not bench.quick)


if __name__ == "__main__":
    main()
