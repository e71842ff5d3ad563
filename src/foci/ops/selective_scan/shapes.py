"""The problems of the selective scan as they occur in models: what is timed, and what a GPU is tuned for."""

from __future__ import annotations

from foci.ops.draw import OnDevice
from foci.ops.selective_scan.cases import case

SHAPES = tuple(
    case(f"{word}{B}x{T}x{D}x16", *said, by=OnDevice, B=B, T=T, D=D, K=16, skip=True)
    for word, said, B, T, D in (
        ("Mamba 130m ", (), 8, 2048, 1536),
        ("Mamba 2.8b ", (), 1, 2048, 5120),
        ("Mamba 2.8b ", (), 1, 16384, 5120),
        ("small ", ("small",), 1, 256, 256),
    )
)
