"""benchmarks/kernels_races.py: it sees a loop that overwrites what a product still reads, and lets others be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.kernels_races import races

ROOT = Path(__file__).parents[1]
SCRIPT = '''"""A product and a sum of the same tiles; with AWAITED the next are not loaded before the product."""
import torch, triton, triton.language as tl
from foci.core.tune import Config, launch
from foci.tiles.memory import awaited

@triton.jit
def both(x_ptr, y_ptr, out_ptr, sums_ptr, K, AWAITED: tl.constexpr):
    r = tl.arange(0, 64)
    product, total = tl.zeros([64, 64], tl.float32), tl.zeros([64], tl.float32)
    for k in range(0, K, 64):
        x = tl.load(x_ptr + r[:, None] * K + k + r[None, :])
        y = tl.load(y_ptr + r[:, None] * K + k + r[None, :])
        total += tl.sum(x.to(tl.float32) * y, 1)
        product = tl.dot(x, tl.trans(y), product)
        if AWAITED:
            product = awaited(product, k < K)
    tl.store(out_ptr + r[:, None] * 64 + r[None, :], product)
    tl.store(sums_ptr + r, total)

x = torch.empty(64, 256, dtype=torch.bfloat16, device="meta")
out, sums = (torch.empty(64, n, device="meta") for n in (64, 1))
launch(both, (1,), x, x.clone(), out, sums, 256, AWAITED={awaited}, config=Config({{}}, 4, 3))
'''
# Two slots; tiles go to the second one first, as one is there already.
LOOP = """
    %x = ttg.local_alloc : () -> !ttg.memdesc<{slots}x64x64xbf16, #shared, #smem, mutable>
    %at = ttg.memdesc_index %x[%c0] : !ttg.memdesc<{slots}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
    %t = ttg.async_copy_global_to_local %p, %at mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>
    %sum = scf.for %i = %c0 to %K step %c64 iter_args(%acc = %zero) -> (tensor<64x64xf32>) : i32 {{
      %here = ttg.memdesc_index %x[%now] : !ttg.memdesc<{slots}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %turned = ttg.memdesc_trans %here {{order = array<i32: 1, 0>}} : !ttg.memdesc<64x64xbf16>
      %a = arith.truncf %q : tensor<64x64xf32> to tensor<64x64xbf16>
      %d = ttng.warp_group_dot {left}, %turned, %acc {{isAsync = {runs}}} : !ttg.memdesc<64x64xbf16>
      %w:2 = ttng.warp_group_dot_wait %d, %turned {{pendings = {pending} : i32}} : tensor<64x64xf32>
      %next = ttg.memdesc_index %x[%then] : !ttg.memdesc<{slots}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %u = ttg.async_copy_global_to_local %p2, %next mask %m2 : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>
      scf.yield %w#0 : tensor<64x64xf32>
    }}
"""
AS_USUAL = {"slots": 2, "left": "%here", "runs": "true", "pending": 1}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"slots": 1}, ["%d may still read %x when the next tile is copied there"]),
        ({"slots": 1, "pending": 0}, []),
        ({"slots": 1, "runs": "false"}, []),
        ({"slots": 3, "pending": 3}, ["%d may still read %x when the next tile is copied there"]),
        ({"left": "%a"}, ["%d may still read %a when the next round makes it anew"]),
        ({"left": "%a", "pending": 0}, []),
    ],
)
def test_what_a_product_under_way_reads_may_not_be_written(changed: dict[str, object], found: list[str]) -> None:
    assert races(LOOP.format(**AS_USUAL | changed)) == found


def test_a_name_stands_for_something_else_in_other_braces() -> None:
    """The second loop's tiles lie elsewhere, though their views have the first one's names."""
    first, second = LOOP.format(**AS_USUAL), LOOP.format(**AS_USUAL).replace("%x", "%y").replace("%at", "%there")
    assert races(first + second) == []
    assert len(races(LOOP.format(**AS_USUAL | {"slots": 1}) + second)) == 1


def test_what_is_stored_in_a_round_is_overwritten_in_the_next() -> None:
    stored = "%s = ttg.local_alloc %v : (tensor<64x64xbf16>) -> !ttg.memdesc<64x64xbf16, #shared, #smem>"
    loop = LOOP.format(**AS_USUAL | {"left": "%s"}).replace("      %a =", f"      {stored}\n      %a =")
    assert races(loop) == ["%d may still read %s when the next tile is copied there"]


@pytest.mark.parametrize("awaited", [False, True])
def test_triton_has_a_slot_too_few_for_a_tile_that_is_read_twice_and_awaited_mends_it(
    tmp_path: Path, awaited: bool
) -> None:
    (tmp_path / "planted.py").write_text(SCRIPT.format(awaited=awaited))
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--target", "sm_90", "--script"]
    done = subprocess.run([*command, str(tmp_path / "planted.py")], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == (0 if awaited else 1), done.stdout + done.stderr
    assert ("may still read" in done.stdout) == (not awaited)
