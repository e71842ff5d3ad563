"""What plan_parallel's model says of the speeds that other projects publish: forecast beside figure, row by row.

    python benchmarks/parallel_published.py

A GPU's rate is fitted to one row of a table at most (marked "fit"), its links are the datasheet's at 75 %, and every
other row is left out of the fit. Rows marked "sheet" are forecast from the datasheet alone. Nothing is measured here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from foci.parallel.forecast import forecast
from foci.parallel.links import Compute, preset
from foci.parallel.split import Split
from foci.parallel.workload import Rest, Shape


@dataclass(frozen=True)
class Row:
    """A published time in seconds and the split it was taken with."""

    name: str
    split: Split
    seconds: float


@dataclass(frozen=True)
class Table:
    """Rows of one source on one GPU. `fit`: the rows whose time the rate (and the backward's factor) comes from."""

    source: str
    gpu: str
    shape: Shape
    rows: tuple[Row, ...]
    fit: Row | None = None
    backward: float | None = None


D = 3072  # FLUX.1 and HunyuanVideo: 24 heads of 128; each block multiplies a token by 12 D^2 weights


def dit(tokens: int, layers: int, steps: int) -> Shape:
    return Shape(tokens, 24, 128, rest=Rest(layers=layers, flops=2 * layers * 12 * D * D, steps=steps))


FLUX, VIDEO = 57, 60
ONE = Split()


def u(n: int) -> Split:
    return Split(n)


def r(n: int, order: str = "plain") -> Split:
    return Split(1, n, order)


def flux_h100(kind: str, column: tuple[float, ...]) -> Table:
    """xDiT docs/performance/flux.md, FLUX.1-dev 1024 px, 28 steps."""
    alone, u2, r2, u2r2, u4, r4 = column
    rows = (Row("U2", u(2), u2), Row("R2", r(2), r2), Row("U2 x R2", Split(2, 2), u2r2), Row("U4", u(4), u4),
            Row("R4", r(4), r4))  # fmt: skip
    return Table(f"xDiT, FLUX.1-dev 1024, {kind}", "h100", dit(4608, FLUX, 28), rows, Row("1 GPU", ONE, alone))


def video(gpu: str, wide: dict[int, float], square: dict[int, float]) -> Table:
    """xDiT docs/performance/hunyuanvideo.md, 129 frames, 50 steps; both resolutions are 118,800 tokens."""
    rows = [Row(f"1280x720 U{n}", u(n), s) for n, s in wide.items() if n > 1]
    rows += [Row(f"960x960 U{n}", u(n), s) for n, s in square.items() if n > 1]  # U1 is the fit again
    shape = dit(118800 + 256, VIDEO, 50)
    return Table("xDiT, HunyuanVideo", gpu, shape, tuple(rows), Row("1280x720 1 GPU", ONE, wide[1]))


def ring_flash(gpu: str, forward: tuple[float, ...], both: tuple[float, ...]) -> Iterator[Table]:
    """ring-flash-attention README, batch API, iterations a second; the first column is its flash_attn / 8."""
    orders = ("plain", "zigzag", "stripe")
    shape = Shape(65536, 32, 128, G=8, causal=True)
    for backward, (ideal, *rates) in ((False, forward), (True, both)):
        rows = tuple(Row(f"R8 {order}", r(8, order), 1 / rate) for order, rate in zip(orders, rates, strict=True))
        factor = forward[0] / both[0] - 1  # the backward's seconds over the forward's, both without any exchange
        name = "forward and backward" if backward else "forward"
        fit = Row("flash_attn / 8", ONE, 8 / ideal)
        yield Table(f"ring-flash-attention, {name}", gpu, replace(shape, backward=backward), rows, fit, factor)


def yunchang() -> Iterator[Table]:
    """Iterations a second on 8 A100; forward with a causal mask, heads of 128 where the source names none."""
    for name, shape, fit, rows in (
        ("128K, 32 heads of 32", Shape(2**17, 32, 32, causal=True), Row("U8", u(8), 1 / 15.9),
         (Row("U4 x R2 zigzag", Split(4, 2, "zigzag"), 1 / 16.0), Row("R8 plain", r(8), 1 / 7.9),
          Row("R8 zigzag", r(8, "zigzag"), 1 / 13.2))),
        ("128K, 8 heads of 128", Shape(2**17, 8, 128, causal=True), Row("U8", u(8), 1 / 21.0),
         (Row("U4 x R2 zigzag", Split(4, 2, "zigzag"), 1 / 21.9),
          Row("R8 plain, slowest published", r(8), 1 / 7.8), Row("R8 plain, fastest published", r(8), 1 / 11.3))),
        ("32K", Shape(2**15, 32, 128, causal=True), Row("U8", u(8), 1 / 91.4),
         (Row("R8 zigzag", r(8, "zigzag"), 1 / 59.8),)),
    ):  # fmt: skip
        yield Table(f"yunchang, {name}", "a100", shape, rows, fit)


def cache_dit() -> Iterator[Table]:
    """cache-dit, FLUX.1-dev 1024; 50 steps on the H100. The L20's are not given: 28, since 50 would pass its peak."""
    yield Table("cache-dit, FLUX.1-dev", "h100", dit(4608, FLUX, 50), (Row("U2", u(2), 6.04),), Row("1 GPU", ONE, 9.30))
    rows = (Row("U2", u(2), 13.80), Row("U4", u(4), 8.28), Row("R4", r(4), 9.16), Row("U2 x R2", Split(2, 2), 8.55))
    yield Table("cache-dit, FLUX.1-dev", "l20", dit(4608, FLUX, 28), rows, Row("1 GPU", ONE, 23.56))


def schnell() -> Iterator[Table]:
    """xDiT, FLUX.1-schnell, 4 steps, compiled: no figure for one GPU, so from the datasheet alone."""
    small, large = dit(4096 + 256, FLUX, 4), dit(16384 + 256, FLUX, 4)
    yield Table("xDiT, FLUX.1-schnell 1024", "a100", small, (Row("U8", u(8), 0.82),))
    yield Table("xDiT, FLUX.1-schnell 2048", "a100", large, (Row("U8", u(8), 2.4),))
    yield Table("xDiT, FLUX.1-schnell 1024", "l40", small, (Row("U2 x R2", Split(2, 2), 1.41),))
    yield Table("xDiT, FLUX.1-schnell 2048", "l40", large, (Row("8 GPUs, taken as U8", u(8), 3.67),))


def tables() -> Iterator[Table]:
    yield flux_h100("compiled", (4.30, 2.68, 2.60, 1.80, 1.63, 1.98))
    yield flux_h100("eager", (6.71, 4.38, 5.31, 5.19, 4.24, 5.11))
    yield from schnell()
    yield video("h100", {1: 1904.08, 2: 925.04, 4: 514.08, 8: 337.58}, {1: 1735.01, 2: 934.09, 3: 645.45, 6: 367.02})
    yield video(
        "h20", {1: 6639.17, 2: 3400.55, 4: 1762.86, 8: 940.97}, {1: 6621.46, 2: 3400.55, 3: 2310.48, 6: 1214.67}
    )
    yield video("l20", {1: 6043.88, 2: 3271.44, 4: 2080.05}, {1: 6039.08, 2: 3260.62, 3: 2284.74})
    yield from ring_flash("h800", (73.9, 38.5, 63.0, 55.0), (19.3, 10.4, 17.4, 16.0))
    yield from ring_flash("a100", (46.7, 24.0, 38.2, 32.5), (11.8, 6.2, 10.6, 9.75))
    yield from yunchang()
    yield from cache_dit()


def fitted(table: Table) -> Compute:
    """The preset, its rate scaled so that the row of the fit comes out: one number (and the backward's factor)."""
    links, compute = preset(table.gpu)
    if table.backward is not None:
        compute = replace(compute, backward=table.backward)
    if table.fit is None:
        return compute
    for _ in range(40):  # time is not quite proportional to 1 / rate: what is fixed stays
        told = forecast(table.shape, table.fit.split, links, compute).seconds
        scale = told / table.fit.seconds
        compute = replace(compute, rate=compute.rate * scale, dense=compute.dense * scale)
    return compute


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.parse_args()
    print("| source | GPU | rate | split: published → forecast (off) |\n|---|---|---|---|")
    missed = []
    for table in tables():
        links, _ = preset(table.gpu)
        compute = fitted(table)
        fit = "sheet" if table.fit is None else f"{compute.rate / 1e12:.0f} TFLOP/s from {table.fit.name}"
        shown = []
        for row in table.rows:
            told = forecast(table.shape, row.split, links, compute).seconds
            missed.append(told / row.seconds - 1)
            unit, scale = ("ms", 1e3) if row.seconds < 0.5 else ("s", 1)
            off = f"{missed[-1]:+.0%}".replace("-", "−")
            shown.append(f"{row.name}: {row.seconds * scale:.4g} → {told * scale:.4g} {unit} ({off})")
        print(f"| {table.source} | {table.gpu.upper()} | {fit} | {'; '.join(shown)} |")
    sizes = sorted(abs(off) for off in missed)
    within = {bound: sum(size <= bound for size in sizes) for bound in (0.1, 0.2, 0.35)}
    print(
        f"\n{len(sizes)} rows left out of every fit: median off by {median(sizes):.0%}, worst {max(sizes):.0%}; ",
        end="",
    )
    print(", ".join(f"{count} within {bound:.0%}" for bound, count in within.items()))


if __name__ == "__main__":
    main()
