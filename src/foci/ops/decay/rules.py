"""Launch configurations of the kernels that advance states chunk by chunk, and of those that read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from foci.core.tune import Config, Target, configure, side, target_of
from foci.ops.stretches import Costs, Cut

# Of walks on Hopper, by whether there are documents, and by gates, fitted to the times that an H100 took for cuts; per
# channel in both directions. Walks of documents make maps for TMA themselves, which others are given.
FORWARD = {
    False: {
        "": Costs(1.5, 9.4, 1.3, 0.9, 3.8),
        "token": Costs(2.1, 5.8, 1.5, 0.9, 1.2),
        "channel": Costs(2.7, 9.6, 0.8, 1.1, 7.5),
    },
    True: {
        "": Costs(1.3, 3.5, 1.6, 0.6, 0.4),
        "token": Costs(1.9, 4.2, 1.4, 0.8, 6.7),
        "channel": Costs(1.9, 4.7, 1.3, 0.6, 5.0),
    },
}
BACKWARD = {
    False: {"": Costs(3.7, 12.6, 0.8, 1.4, 6.5), "token": Costs(2.7, 6.0, 1.1, 1.0, 1.4)},
    True: {"": Costs(2.7, 5.6, 0.5, 1.9, 13.6), "token": Costs(4.8, 8.9, 0.4, 1.1, 13.1)},
}
WIDTHS = {"BLOCK_K": (16, 32, 64, 128), "BLOCK_V": (16, 32, 64, 128)}  # what `foci tune` may try


class Walk(NamedTuple):
    """The launch of a kernel whose programs each advance a block of the state through a sequence or stretch."""

    config: Config
    blocks: int  # programs (blocks of channels) per sequence or stretch
    cut: Cut


def walk(kernel: str, call: Any, cut: Callable[[int], Cut]) -> Walk:
    """The Walk of `linear_states` or `linear_dstates`; `cut(warps of a sequence)` gives its Cut."""
    *_, H, K, V, N = call.sizes
    key = call.v.dtype, K, V, call.per_channel
    config = configure(kernel, key, partial(walked, *key, N * H), target_of(call.v.device), WIDTHS)
    blocks = H * -(-K // config["BLOCK_K"]) * -(-V // config["BLOCK_V"])
    return Walk(config, blocks, cut(blocks * config.warps))


def read(kernel: str, call: Any) -> Config:
    """The configuration of `linear_out` or `linear_values`."""
    *_, K, V, _ = call.sizes
    key = call.v.dtype, K, V, call.per_channel
    return configure(kernel, key, partial(tokens, *key[:3]), target_of(call.v.device), WIDTHS)


def walked(dtype: torch.dtype, K: int, V: int, by_channel: bool, heads: int, target: Target) -> Config:
    """Small blocks, as each program is sequential over its tokens; smaller ones if few heads leave processors idle."""
    half, hopper = dtype == torch.bfloat16, target.arch == 90
    wide = half and hopper and K > 128 and not by_channel  # as measured on an H100
    k, v = side(K, 128 if wide else 64), side(V, 64)
    if 2 * heads * -(-K // k) * -(-V // v) < target.processors:
        v = min(v, 32)
    if dtype == torch.float32 and hopper:  # as measured on an H100
        return Config({"BLOCK_K": k, "BLOCK_V": v}, warps=4, stages=1)
    return Config({"BLOCK_K": k, "BLOCK_V": v}, warps=8 if dtype == torch.float32 else 4, stages=3 if half else 2)


def tokens(dtype: torch.dtype, K: int, V: int, target: Target) -> Config:
    """Blocks as wide as registers allow, since each block of columns recomputes A, or reads it again."""
    if dtype == torch.float16 and target.arch == 90:  # as measured on an H100
        return Config({"BLOCK_K": side(K, 64), "BLOCK_V": side(V, 128)}, warps=4, stages=1)
    small = target.shared < 80_000 or dtype != torch.bfloat16
    k, v = side(K, 32 if small else 64), side(V, 64 if small else 128)
    if v > 64 and target.arch == 90:  # as measured on an H200 and an H100
        return Config({"BLOCK_K": k, "BLOCK_V": v}, warps=4, stages=3)
    return Config({"BLOCK_K": k, "BLOCK_V": v}, warps=8 if v > 64 else 4, stages=2)
