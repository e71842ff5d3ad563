"""The speed of a rank and of the links between ranks, as values: measured on a group, or from a datasheet."""

from __future__ import annotations

from dataclasses import dataclass

from foci.ops.arguments import whole


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes `latency + n / bandwidth` seconds, while every rank sends one."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not self.latency >= 0 or not self.bandwidth > 0:
            raise ValueError(f"Link: latency must be at least 0 and bandwidth above 0, got {self}")

    def seconds(self, size: float) -> float:
        """The time of one message; 0 for 0 bytes, which are not sent."""
        return self.latency + size / self.bandwidth if size else 0.0


@dataclass(frozen=True)
class Links:
    """The links between ranks.

    `shift`: every rank sends to its neighbour at the same time, one step of a ring. `swap`: the all-to-all of Ulysses;
    its bytes are those that leave the rank. Both within a node: rank r is on node r // `node` (None: one node). `far`:
    a rank's link out of its node. `overlap`: the share of a transfer that computation hides, 1 if they do not slow each
    other; a CPU's cores do both. `agree`: seconds of the consistency check between ranks, before a call's first
    exchange and after its last.
    """

    shift: Link
    swap: Link
    node: int | None = None
    far: Link | None = None
    overlap: float = 1.0
    agree: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for name, link in (("shift", self.shift), ("swap", self.swap), ("far", self.far)):
            if not isinstance(link, Link) and (link is not None or name != "far"):
                raise TypeError(f"Links: {name} must be a Link, got {link!r:.200}")
        if self.node is not None:
            whole("Links", "node", self.node)
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"Links: overlap must lie in 0 .. 1, got {self.overlap}")
        if not self.agree >= 0:
            raise ValueError(f"Links: agree must not be negative, got {self.agree}")
        if self.node is not None and self.far is None:
            raise ValueError("Links: far must be given with node, got None")

    def inside(self, ranks: int, stride: int) -> int:
        """How many of `ranks` ranks whose numbers are `stride` apart share a node."""
        return ranks if self.node is None else max(1, min(ranks, self.node // stride))

    def shifting(self, size: float, ranks: int, stride: int) -> float:
        """Seconds in which each of `ranks` ranks sends `size` bytes to the next; the slowest hop counts."""
        if self.inside(ranks, stride) == ranks:
            return self.shift.seconds(size)
        assert self.far is not None
        return max(self.shift.seconds(size), self.far.seconds(size))

    def swapping(self, size: float, ranks: int, stride: int) -> float:
        """Seconds in which each of `ranks` ranks sends `size` bytes in all, evenly to the others."""
        inside = self.inside(ranks, stride)
        if inside == ranks or ranks == 1:
            return self.swap.seconds(size)
        assert self.far is not None
        outside = size * (ranks - inside) / (ranks - 1)
        return max(self.swap.seconds(size - outside), self.far.seconds(outside))


@dataclass(frozen=True)
class Compute:
    """The speed of one rank while all others compute too.

    `rate`: floating point operations a second of the operator's forward. `backward`: how many times longer its backward
    takes. `dense`: operations a second of the model's other products. `stream`: bytes a second of elementwise work, for
    the merge of two parts. `call`: seconds a call of the operator takes at least. `memory`: bytes a rank has.
    """

    rate: float
    dense: float
    stream: float
    memory: float
    backward: float = 2.5
    call: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("rate", "dense", "stream", "memory", "backward"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Compute: {name} must be above 0, got {getattr(self, name)}")
        if not self.call >= 0:
            raise ValueError(f"Compute: call must not be negative, got {self.call}")


@dataclass(frozen=True)
class Sheet:
    """A datasheet's figures: dense bf16 operations and bytes a second, memory, bytes a second one way to peers."""

    flops: float
    stream: float
    memory: float
    link: float
    of: str


# Peak figures of the makers' datasheets; nothing here was measured. NVLink and PCIe totals are halved: one way.
SHEETS = {
    "a100": Sheet(312e12, 2.039e12, 80e9, 300e9, "NVIDIA A100 80GB SXM: 312 TFLOP/s, 2039 GB/s, NVLink 600 GB/s"),
    "h100": Sheet(989e12, 3.35e12, 80e9, 450e9, "NVIDIA H100 SXM: 989 TFLOP/s dense, 3.35 TB/s, NVLink 900 GB/s"),
    "h800": Sheet(989e12, 3.35e12, 80e9, 200e9, "NVIDIA H800 SXM: an H100 with NVLink 400 GB/s"),
    "h200": Sheet(989e12, 4.8e12, 141e9, 450e9, "NVIDIA H200 SXM: 989 TFLOP/s dense, 4.8 TB/s, NVLink 900 GB/s"),
    "h20": Sheet(148e12, 4.0e12, 96e9, 450e9, "NVIDIA H20: 148 TFLOP/s, 4.0 TB/s, NVLink 900 GB/s"),
    "l20": Sheet(119.5e12, 0.864e12, 48e9, 32e9, "NVIDIA L20: 119.5 TFLOP/s, 864 GB/s, PCIe 4.0 x16 64 GB/s"),
    "l40": Sheet(181e12, 0.864e12, 48e9, 32e9, "NVIDIA L40: 181 TFLOP/s, 864 GB/s, PCIe 4.0 x16 64 GB/s"),
}
# What of a datasheet's peak is taken to be attained, the same for every GPU: an assumption, not a measurement.
ATTAINED_COMPUTE, ATTAINED_LINK = 0.5, 0.75
LATENCY, FAR_LATENCY = 20e-6, 30e-6
# One 400 Gbit/s network port for each GPU, the usual build of such nodes.
FAR_BANDWIDTH = 50e9


def preset(name: str, *, node: int | None = None) -> tuple[Links, Compute]:
    """Links and Compute from a maker's datasheet: `plan_parallel(shape, 16, *preset("h100", node=8))`.

    `name`: "a100", "h100", "h800", "h200", "h20", "l20" or "l40". Compute is taken at half the sheet's peak, links at
    three quarters, 20 us a message (30 us between nodes): one assumption for all, so compare splits with it, not
    machines. `node`: GPUs of a node; between nodes each GPU has 400 Gbit/s. Measure where you can.
    """
    if name not in SHEETS:
        raise ValueError(f"preset: name must be one of {', '.join(map(repr, SHEETS))}, got {name!r}")
    sheet = SHEETS[name]
    link = Link(LATENCY, sheet.link * ATTAINED_LINK)
    far = None if node is None else Link(FAR_LATENCY, FAR_BANDWIDTH * ATTAINED_LINK)
    return (
        Links(link, link, node=node, far=far, source=f"datasheet: {sheet.of}"),
        Compute(
            rate=sheet.flops * ATTAINED_COMPUTE,
            dense=sheet.flops * ATTAINED_COMPUTE,
            stream=sheet.stream * ATTAINED_LINK,
            memory=sheet.memory,
            call=10e-6,
            source=f"datasheet: {sheet.of}",
        ),
    )
