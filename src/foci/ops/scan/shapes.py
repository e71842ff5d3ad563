"""The problems of the elementwise scan as they occur in models: what is timed, and what a GPU is tuned for."""

from __future__ import annotations

from foci.ops.draw import OnDevice
from foci.ops.scan.cases import case

SHAPES = tuple(
    case(f"{word}{B}x{T}x{D}", *said, by=OnDevice, B=B, T=T, D=D)
    for word, said, B, T, D in (
        ("", (), 8, 2048, 2048),
        ("", (), 1, 8192, 4096),
        ("", (), 1, 65536, 256),
        ("small ", ("small",), 1, 256, 256),
    )
)
