"""The problems of linear attention as they occur in models: what is timed, and what a GPU is tuned for."""

from __future__ import annotations

from foci.ops.decay.cases import Linear
from foci.ops.recurrent import SIX

_NAMES = {"channel": "GLA", "token": "simple GLA", "head": "RetNet"}
PROBLEMS = (
    *(
        Linear(f"{name} {B}x{T}x{H}x{D}", B=B, T=T, H=H, K=D, decay=decay)
        for decay, name in _NAMES.items()
        for B, T, H, D in SIX
    ),
    Linear("SSD 2x4096x64:1x128x64", B=2, T=4096, H=64, G=1, K=128, V=64, decay="token"),
    Linear("RWKV-6 4x2048x32x64", B=4, T=2048, H=32, K=64, decay="channel", bonus=True),
    Linear("Sana 2x1024x70x32", B=2, T=1024, H=70, K=32, causal=False),
    Linear(
        "packed GLA 8x2048 16x128", B=1, T=16384, H=16, K=128, decay="channel", offsets=tuple(range(0, 16385, 2048))
    ),
    Linear("small simple GLA 1x256x4x64", B=1, T=256, H=4, K=64, decay="token"),
    Linear("small GLA 1x256x4x64", B=1, T=256, H=4, K=64, decay="channel"),
)
SHAPES = tuple(problem.shape for problem in PROBLEMS)
