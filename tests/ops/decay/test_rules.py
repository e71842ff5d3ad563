"""How walks and readings are configured: by either direction alike, by few heads, and by a table in place of a rule."""

from __future__ import annotations

import pytest
import torch

from foci.core import tune
from foci.core.tune import TARGETS, Config
from foci.ops.decay import rules
from foci.ops.decay.call import Call, bind
from foci.ops.stretches import Cut

HOPPER = TARGETS["sm_90"]


def of(K: int, V: int, H: int = 4, by_channel: bool = False, dtype: torch.dtype = torch.bfloat16) -> Call:
    q, v = (torch.empty(2, 70, H, width, dtype=dtype, device="meta") for width in (K, V))
    return bind(q, q, v, log_decay=torch.empty(2, 70, H, *((K,) if by_channel else ()), device="meta"))


def test_a_walk_says_how_many_programs_have_a_sequence_and_how_many_warps_decide_on_the_cut() -> None:
    asked: list[int] = []

    def cut(warps: int) -> Cut:
        asked.append(warps)
        return Cut(0, 2, 0)

    with tune.record_launches(HOPPER):
        config, blocks, found = rules.walk("linear_states", of(128, 72, H=64), cut)
    assert (config["BLOCK_K"], config["BLOCK_V"]) == (64, 64) and blocks == 64 * 2 * 2
    assert asked == [blocks * config.warps] and found == Cut(0, 2, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_few_heads_walk_narrower_blocks_and_none_is_wider_than_a_head(dtype, target: tune.Target) -> None:
    for by_channel in (False, True):
        many, few = (rules.walked(dtype, 128, 128, by_channel, heads, target) for heads in (1000, 1))
        assert few["BLOCK_V"] == 32 < many["BLOCK_V"] and few["BLOCK_K"] == many["BLOCK_K"]
        narrow = rules.walked(dtype, 16, 20, by_channel, 1000, target), rules.tokens(dtype, 16, 20, target)
        assert all(config["BLOCK_K"] == 16 and config["BLOCK_V"] == 32 for config in narrow)


def test_256_channels_are_walked_128_at_once_on_hopper_but_for_gates_per_channel() -> None:
    """As they took less time on an H100: docs/benchmarks.md."""
    assert rules.walked(torch.bfloat16, 256, 512, False, 16, HOPPER)["BLOCK_K"] == 128
    assert rules.walked(torch.bfloat16, 256, 512, True, 16, HOPPER)["BLOCK_K"] == 64
    assert rules.walked(torch.bfloat16, 256, 512, False, 16, TARGETS["sm_100"])["BLOCK_K"] == 64


@pytest.mark.parametrize("kernel", ["linear_out", "linear_values"])
def test_readings_of_either_direction_have_one_rule_and_tables_of_their_own(kernel: str) -> None:
    chosen = Config({"BLOCK_K": 16, "BLOCK_V": 16}, 2, 1)
    with tune.record_launches(HOPPER), tune.override_configs({(kernel, "torch.bfloat16,128,64,True"): chosen}) as asked:
        assert rules.read(kernel, of(128, 64, by_channel=True)) is chosen
        assert rules.read(kernel, of(128, 64)) == rules.tokens(torch.bfloat16, 128, 64, HOPPER)
    assert {key for _, key in asked} == {"torch.bfloat16,128,64,True", "torch.bfloat16,128,64,False"}
