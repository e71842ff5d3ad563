"""What the GPU backend keeps for its backward: the states it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foci.core.tune import TARGETS, record_launches
from foci.ops.decay import gpu, rules
from foci.ops.decay.call import Call, bind


def call(dtype: torch.dtype = torch.float32, K: int = 8, V: int = 5, **options: Any) -> Call:
    q = torch.zeros(2, 70, 3, K, dtype=dtype)
    return bind(q, q, torch.zeros(2, 70, 3, V, dtype=dtype), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_state_at_every_chunks_start_is_kept_in_what_is_multiplied(dtype: torch.dtype) -> None:
    kept = gpu.kept(call(dtype))
    assert kept.shape == (2 * 2 + 2, 3, 8, 5)
    assert kept.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def test_what_is_kept_of_documents_and_without_an_order() -> None:
    q, v = torch.zeros(1, 70, 3, 8), torch.zeros(1, 70, 3, 5)
    assert gpu.kept(bind(q, q, v, offsets=torch.tensor([0, 1, 1, 70]))).shape[0] == 70 // 64 + 3 + 2
    assert gpu.kept(bind(q, q, v, causal=False)).shape[0] == 0


@pytest.mark.parametrize(
    "T, heads, few, stretches",
    [
        (4095, 1, 4, 0), (4096, 1, 4, 4), (8192, 8, 4, 8), (8192, 16, 4, 8), (8192, 32, 4, 8), (8192, 33, 4, 0),
        (65536, 8, 4, 16), (8192, 8, 2, 8), (8192, 9, 2, 0),
    ],
)  # fmt: skip
def test_few_heads_of_long_sequences_are_cut(T: int, heads: int, few: int, stretches: int) -> None:
    """On an H200 into as many stretches as fill it twice, of 16 chunks or more. A walk of up to 16 heads has 8 programs
    of 4 warps each, one of more has 4.
    """
    q = torch.empty(1, T, heads, 128, dtype=torch.bfloat16, device="meta")
    with record_launches(TARGETS["sm_90"]):
        found = gpu._walk("linear_states", bind(q, q, q), few).cut
    assert found.slots == stretches and found.tokens % (16 * 64) == 0


@pytest.mark.parametrize(
    "decay, shape, forward, backward",
    [
        ("", (1, 1024, 32, 128), {0: 26, 256: 30, 512: 28}, {0: 61, 256: 66, 512: 60}),
        ("", (1, 2048, 16, 128), {256: 35, 512: 30, 1024: 36}, {256: 73, 512: 63, 1024: 74}),
        ("", (1, 4096, 16, 128), {512: 56, 1024: 49}, {512: 117, 1024: 104}),
        ("", (1, 8192, 8, 128), {512: 63, 1024: 52}, {512: 130, 1024: 110, 2048: 134}),
        ("", (1, 8192, 32, 128), {0: 151, 1024: 170, 2048: 148, 4096: 142}, {0: 407, 1024: 372, 2048: 343, 4096: 332}),
        ("", (4, 2048, 16, 128), {0: 57}, {0: 154, 1024: 180}),
        (
            "", (2, 16384, 16, 128), {0: 289, 2048: 308, 4096: 280, 8192: 267},
            {0: 790, 1024: 770, 2048: 692, 4096: 674, 8192: 645},
        ),
        ("", (8, 1024, 8, 64), {0: 24, 256: 28, 512: 28}, {0: 56, 256: 58, 512: 56}),
        ("token", (1, 2048, 2, 128), {256: 23}, {256: 41}),
        ("token", (1, 2048, 16, 128), {256: 43, 512: 39}, {256: 80, 512: 74}),
        ("token", (1, 8192, 8, 128), {512: 74, 1024: 66}, {512: 140, 1024: 131}),
        ("token", (1, 16384, 4, 128), {512: 86, 1024: 73}, {512: 164, 1024: 142}),
        ("token", (4, 2048, 16, 128), {0: 70}, {0: 190, 512: 223, 1024: 212}),
        (
            "token", (2, 16384, 16, 128), {1024: 398, 2048: 360, 4096: 346, 8192: 385},
            {1024: 852, 2048: 795, 4096: 788, 8192: 816},
        ),
        ("token", (8, 1024, 8, 64), {0: 34, 256: 32, 512: 32}, {0: 76, 256: 62, 512: 62}),
        ("channel", (1, 2048, 16, 128), {256: 66, 512: 62, 1024: 74}, {0: 189, 256: 169, 512: 163, 1024: 178}),
        ("channel", (1, 8192, 8, 128), {512: 119, 1024: 112, 2048: 135}, {256: 352, 512: 311, 1024: 301, 2048: 331}),
        ("channel", (1, 16384, 4, 128), {512: 134, 1024: 116, 2048: 136}, {512: 320, 1024: 307, 2048: 335}),
        (
            "channel", (4, 2048, 16, 128), {0: 175, 256: 213, 512: 199, 1024: 188},
            {0: 546, 256: 598, 512: 572, 1024: 565},
        ),
        (
            "channel", (2, 16384, 16, 128), {0: 803, 1024: 766, 2048: 739, 4096: 724, 8192: 711},
            {0: 2334, 512: 2464, 1024: 2247, 2048: 2195, 4096: 2168, 8192: 2157},
        ),
    ],
)  # fmt: skip
def test_walks_are_cut_as_was_fastest_on_an_h100(
    decay: str, shape: tuple[int, ...], forward: dict[int, int], backward: dict[int, int]
) -> None:
    """Microseconds of all launches by tokens of a stretch, inference and backward: within 4 % of the least."""
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    g = {"": None, "token": torch.empty(shape[:3], device="meta"), "channel": torch.empty(shape, device="meta")}[decay]
    near_the_least(bind(q, q, q, log_decay=g), (forward, 1.04), (backward, 1.04))


def test_short_walks_and_those_of_many_heads_are_not_cut() -> None:
    with record_launches(TARGETS["sm_90"]):
        for shape in ((1, 256, 4, 64), (1, 8192, 96, 128)):
            q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            assert not any(gpu._cheapest(bind(q, q, q), costs).tokens for costs in (rules.FORWARD, rules.BACKWARD))


def near_the_least(call: Call, *measured: tuple[dict[int, int], float]) -> None:
    """The cuts that are chosen, forward and backward, took at most so many times the least that was measured."""
    costs = rules.FORWARD, rules.FORWARD if call.per_channel else rules.BACKWARD
    with record_launches(TARGETS["sm_90"]):
        for (times, most), each in zip(measured, costs, strict=True):
            found = gpu._cheapest(call, each).tokens
            assert times.get(found, 9999) <= most * min(times.values()), found


@pytest.mark.parametrize(
    ("decay", "shape", "forward", "backward"),
    [
        ("", (4, 1024, 8), {0: 35, 256: 48, 512: 43}, {0: 84, 256: 93, 512: 94}),
        ("", (8, 1024, 8), {0: 46, 256: 81, 512: 71}, {0: 114, 256: 169, 512: 140}),
        ("", (2, 4096, 8), {0: 98, 256: 89, 512: 67, 1024: 69, 2048: 73}, {512: 139, 1024: 133, 2048: 146}),
        ("", (6, 3072, 8), {0: 91, 512: 134, 1024: 125}, {0: 232, 512: 283, 1024: 253, 2048: 267}),
        ("", (3, 8192, 16), {0: 211, 2048: 273, 4096: 239}, {0: 571, 1024: 612, 2048: 580, 4096: 555}),
        ("", (1, 8192, 8), {256: 104, 512: 69, 1024: 70, 2048: 73}, {512: 151, 1024: 136, 2048: 150}),
        ("token", (8, 1024, 8), {0: 58, 256: 96, 512: 85}, {0: 142, 256: 175, 512: 163}),
        ("token", (4, 2048, 8), {0: 98, 256: 105, 512: 87, 1024: 93}, {0: 250, 256: 183, 512: 165, 1024: 182}),
        ("token", (1, 8192, 8), {512: 82, 1024: 88}, {512: 156}),
        ("token", (4, 1024, 8), {0: 50, 256: 57}, {256: 98}),
        ("token", (3, 8192, 16), {0: 311, 2048: 346}, {2048: 656, 4096: 670}),
        ("token", (2, 16384, 8), {512: 311, 1024: 243, 2048: 245, 4096: 312}, {1024: 481, 2048: 443, 4096: 593}),
        ("channel", (3, 2048, 4), {0: 99, 256: 65, 512: 68}, {0: 192, 256: 155, 512: 146}),
        ("channel", (8, 2048, 4), {0: 140, 256: 153, 512: 135, 1024: 141}, {0: 344, 512: 342, 1024: 340}),
        ("channel", (2, 16384, 8), {1024: 437, 2048: 437, 4096: 466}, {1024: 1234, 2048: 1198, 4096: 1170}),
    ],
)
def test_documents_are_cut_as_was_fastest_on_an_h100(
    decay: str, shape: tuple[int, ...], forward: dict[int, int], backward: dict[int, int]
) -> None:
    """As above, of (documents, their tokens in the mean, heads): within 5 % of the least, two backwards within 12 %."""
    N, T, H = shape
    q = torch.empty(1, N * T, H, 128, dtype=torch.bfloat16, device="meta")
    g = {"": None, "token": torch.empty(1, N * T, H, device="meta"), "channel": q}[decay]
    call = bind(q, q, q, log_decay=g, offsets=torch.empty(N + 1, dtype=torch.int64, device="meta"))
    near_the_least(call, (forward, 1.05), (backward, 1.12 if shape in ((4, 1024, 8), (3, 2048, 4)) else 1.05))
