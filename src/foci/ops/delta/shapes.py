"""The problems of the delta rule as they occur in models: what is timed, and what a GPU is tuned for."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from torch import Tensor

from foci.ops.delta.cases import Delta
from foci.ops.draw import Draw
from foci.ops.recurrent import SIX

# Key and value heads of Qwen3.5 over ranks, and the lengths of the documents: FlashQLA's published H200 table.
QWEN = (
    (2, 8, (32768,)), (2, 8, (2048,)), (4, 16, (8192,) * 4), (16, 16, (8192,)), (16, 32, (32768,)), (16, 32, (8192,)),
    (16, 32, (2048,)), (16, 32, (16384,) * 2), (16, 32, (8192,) * 4), (16, 32, (4096,) * 8), (16, 32, (1024,) * 8),
    (16, 64, (32768,)), (16, 64, (4096,) * 8), (32, 32, (8192,)),
)  # fmt: skip
# B, T at 64 heads of 128: cuLA's table.
KIMI = ((1, 512), (1, 1024), (1, 4096), (1, 8192), (1, 16384), (2, 512), (2, 1024), (2, 4096), (2, 8192), (2, 16384))


def _qwen(G: int, H: int, lengths: tuple[int, ...]) -> Delta:
    offsets = tuple(accumulate(lengths, initial=0)) if len(lengths) > 1 else ()
    return Delta(
        f"Qwen GDN {lengths[0]}x{len(lengths)} {G}:{H}x128",
        B=1, T=sum(lengths), H=H, G=G, K=128, decay="token", offsets=offsets,
    )  # fmt: skip


def _slow(draw: Draw, *shape: int) -> Tensor:
    """Gates of a hundredth of the usual size: nothing is forgotten, so a piece cannot start from a warm-up."""
    return draw.gates(*shape) / 100


PROBLEMS = (
    *(Delta(f"GDN {B}x{T}x{H}x{D}", B=B, T=T, H=H, K=D, decay="token") for B, T, H, D in SIX),
    *(_qwen(*row) for row in QWEN),
    replace(_qwen(16, 32, (8192,)), name="Qwen GDN 8192x1 16:32x128, slow gates", gates=_slow),
    replace(_qwen(2, 8, (32768,)), name="Qwen GDN 32768x1 2:8x128, slow gates", gates=_slow),
    *(Delta(f"KDA {B}x{T}x64x128", B=B, T=T, H=64, K=128, decay="channel") for B, T in KIMI),
    Delta("DeltaNet 4x2048x16x128", B=4, T=2048, H=16, K=128),
    Delta("small GDN 1x256x4x64", B=1, T=256, H=4, K=64, decay="token"),
    Delta("small KDA 1x256x4x64", B=1, T=256, H=4, K=64, decay="channel"),
)
SHAPES = tuple(problem.shape for problem in PROBLEMS)
