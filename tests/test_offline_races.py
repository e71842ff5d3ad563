"""benchmarks/kernels_races.py: it sees a loop that overwrites what a product still reads, and lets others be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import kernels_compile
import pytest
from kernels_races import races

from foci.core.tune import TARGETS, Launch

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
VIEW = "!ttg.memdesc<64x64xbf16, #shared, #smem, mutable>"
COPY = f"%u = ttg.async_copy_global_to_local %p, %next mask %m : tensor<64x64x!tt.ptr<bf16>> -> {VIEW}"
WAIT = "%w:2 = ttng.warp_group_dot_wait %d, %turned {{pendings = {pending} : i32}} : tensor<64x64xf32>, " + VIEW
DOT = "%d = ttng.warp_group_dot {left}, %turned, %acc {{isAsync = {runs}}} : {kind} * " + VIEW + " -> tensor<64x64xf32>"
# The tile of the first round is there before it; each round loads the next one's, to the slot behind its own.
LOOP = f"""
    %c0 = arith.constant 0 : i32 loc(#loc1)
    %c1 = arith.constant 1 : i32
    %slots = arith.constant {{slots}} : i32
    %x = ttg.local_alloc : () -> !ttg.memdesc<{{slots}}x64x64xbf16, #shared, #smem, mutable> loc("x"(#loc2))
    %at = ttg.memdesc_index %x[%c0] : !ttg.memdesc<{{slots}}x64x64xbf16> -> {VIEW}
    %t = ttg.async_copy_global_to_local %p, %at mask %m : tensor<64x64x!tt.ptr<bf16>> -> {VIEW}
    %sum:2 = scf.for %i = %c0 to %K step %c1 iter_args(%acc = %zero, %now = %c0) -> (tensor<64x64xf32>, i32) : i32 {{{{
      %here = ttg.memdesc_index %x[%now] : !ttg.memdesc<{{slots}}x64x64xbf16> -> {VIEW}
      %turned = ttg.memdesc_trans %here {{{{order = array<i32: 1, 0>}}}} : {VIEW} -> {VIEW}
      %a = arith.truncf %q : tensor<64x64xf32> to tensor<64x64xbf16>
      {DOT}
      {WAIT}
      %sooner = arith.addi %now, %c1 : i32
      %over = arith.cmpi sge, %sooner, %slots : i32
      %then = arith.select %over, %c0, %sooner : i32
      %next = ttg.memdesc_index %x[%then] : !ttg.memdesc<{{slots}}x64x64xbf16> -> {VIEW}
      {COPY}
      scf.yield %w#0, %then : tensor<64x64xf32>, i32 loc(#loc3)
    }}}} loc(#loc4)
"""
AS_USUAL = {"slots": 2, "left": "%here", "kind": VIEW, "runs": "true", "pending": 1}
OVERWRITTEN = ["%d may still read %x when other bytes are written there"]


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"slots": 1}, OVERWRITTEN),
        ({"slots": 1, "pending": 0}, []),
        ({"slots": 1, "runs": "false"}, []),
        ({"slots": 3, "pending": 2}, []),
        ({"slots": 3, "pending": 3}, OVERWRITTEN),
        ({"left": "%a", "kind": "tensor<64x64xbf16>"}, ["%d may still read %a when it is made anew"]),
        ({"left": "%a", "kind": "tensor<64x64xbf16>", "pending": 0}, []),
        ({"left": "%b"}, ["%d reads %b, of which it is not known where it lies"]),
    ],
)
def test_what_a_product_under_way_reads_may_not_be_written(changed: dict[str, object], found: list[str]) -> None:
    assert races(LOOP.format(**AS_USUAL | changed)) == found


@pytest.mark.parametrize(
    "written",
    [
        f"ttg.local_store %v, %next : tensor<64x64xbf16> -> {VIEW}",
        f"ttng.async_tma_copy_global_to_local %map[%i, %i] %next, %barrier, %true : !tt.tensordesc<bf16> -> {VIEW}",
        f"ttng.async_tma_gather %map[%rows, %i] %next, %barrier, %true : !tt.tensordesc<bf16> -> {VIEW}",
        "ttg.local_dealloc %x : !ttg.memdesc<1x64x64xbf16, #shared, #smem, mutable>",
        f"%part = ttg.memdesc_subslice %next[0, 32] : {VIEW} -> {VIEW}\n" + COPY.replace("%next", "%part"),
        f"%some = arith.select %unknown, %next, %next : {VIEW}\n" + COPY.replace("%next", "%some"),
        f"scf.for %j = %c0 to %K step %c1  : i32 {{\n{COPY}\n}}",
        f"%g = scf.while (%h = %c0) : (i32) -> i32 {{\n{COPY}\nscf.condition(%b) %h : i32\n}} do {{\nscf.yield %h\n}}",
        f"scf.if %unknown {{\n{COPY}\n}}",
    ],
)
def test_however_it_is_written(written: str) -> None:
    """By a copy, a store or TMA, of all or a part, in a loop within the loop, or only now and then."""
    for slots, found in ((1, OVERWRITTEN), (2, [])):
        if "dealloc" not in written or slots == 1:
            assert races(LOOP.replace(COPY, written.replace("{", "{{").replace("}", "}}")).format(
                **AS_USUAL | {"slots": slots}
            )) == found  # fmt: skip


def test_a_wait_that_is_not_always_come_by_is_none() -> None:
    waited = WAIT.format(pending=0)
    branches = [f"{waited.replace('%w:2', '%v:2')}\nscf.yield %v#0, %v#1 : i32", "scf.yield %d, %turned : i32"]
    now_and_then = "%w:2 = scf.if %unknown -> (i32) {\n" + "\n} else {\n".join(branches) + "\n}"
    loop = LOOP.format(**AS_USUAL | {"slots": 1, "pending": 0})
    assert waited in loop
    assert races(loop.replace(waited, now_and_then)) == OVERWRITTEN
    assert races(loop.replace(waited, f"%unknown = arith.constant true\n{now_and_then}")) == []


def test_what_a_loop_hands_on_from_round_to_round_is_followed() -> None:
    """A tile's view, and registers, which the end of a round writes."""
    handed = "iter_args(%acc = %zero, %view = %at, %now = %c0)"
    loop = LOOP.replace("iter_args(%acc = %zero, %now = %c0)", handed).replace(
        "yield %w#0, %then", "yield %w#0, %next, %then"
    )
    tile = loop.replace("memdesc_trans %here", "memdesc_trans %view")
    assert races(tile.format(**AS_USUAL | {"left": "%view"})) == []
    assert races(tile.format(**AS_USUAL | {"left": "%view", "slots": 1})) == OVERWRITTEN
    registers = LOOP.replace("%acc = %zero,", "%acc = %zero, %q_now = %q,").replace("yield %w#0,", "yield %w#0, %a,")
    told = races(registers.format(**AS_USUAL | {"left": "%q_now", "kind": "tensor<64x64xbf16>"}))
    assert told == ["%d may still read %q_now when it is made anew"]


def test_behind_a_loop_products_may_be_under_way() -> None:
    copied = COPY.replace("%u", "%late").replace("%next", "%at")
    behind = f"    {copied}\n" + f"    {copied.replace('%at', '%other')}\n"
    other = f"    %other = ttg.memdesc_index %x[%c1] : !ttg.memdesc<2x64x64xbf16> -> {VIEW}\n"
    assert races(LOOP.format(**AS_USUAL) + other + behind) == OVERWRITTEN


START = LOOP.split("    %sum:2")[0].format(**AS_USUAL | {"slots": 1})  # one buffer of one tile, %at
BEGUN = START + DOT.format(**AS_USUAL | {"left": "%at"}).replace("%turned", "%at") + "\n"
AGAIN = COPY.replace("%next", "%at") + "\n"
DONE = "%w:2 = ttng.warp_group_dot_wait %d, %at {pendings = 0 : i32} : tensor<64x64xf32>\n"


@pytest.mark.parametrize(
    ("behind", "found"),
    [
        (DONE + AGAIN, []),
        ("scf.for %i = %c0 to %K step %c1  : i32 {\n" + DONE + "}\n" + AGAIN, OVERWRITTEN),  # it may have no round
        ("scf.for %i = %c0 to %c1 step %c1  : i32 {\n" + DONE + "}\n" + AGAIN, []),  # it has one
        ("scf.if %c {\n" + DONE + "}\nscf.if %c {\n" + AGAIN + "}\n", []),  # where one is, the other is
        (DONE.replace("= 0", "= 1") + AGAIN.replace("%at", "%w#1"), OVERWRITTEN),  # a wait hands on what it waits for
        (f"%g = scf.while (%h = %at) : ({VIEW}) -> {VIEW} {{\nscf.condition(%b) %h\n}} do {{\n^bb0(%z: {VIEW}):\n"
         + AGAIN.replace("%at", "%z") + "scf.yield %z\n}\n", OVERWRITTEN),
        (AGAIN.replace("%at", "%there"), ["%d may still read %there, of which it is not known where it lies"]),
        ("%n = arith.constant -1 : i32\n%b = arith.cmpi ugt, %n, %c1 : i32\n"
         "scf.if %b {\n" + AGAIN + "}\n", OVERWRITTEN),
        ("%n = arith.constant -1 : i32\n%o = arith.constant 2 : i32\n%r = arith.remsi %n, %o : i32\n"
         "%b = arith.cmpi sgt, %r, %c0 : i32\nscf.if %b {\n" + AGAIN + "}\n", []),
        ('scf.if %c {\n%y = arith.constant 1 : i32 loc("a)(b"(#l))\n} loc("a(b/c.py":1:2)\n' + AGAIN, OVERWRITTEN),
    ],
)  # fmt: skip
def test_what_is_behind_a_product(behind: str, found: list[str]) -> None:
    assert races(BEGUN + behind) == found


def test_a_ring_of_many_slots_is_gone_through_to_its_end() -> None:
    assert races(LOOP.format(**AS_USUAL | {"slots": 6, "pending": 5})) == []
    assert races(LOOP.format(**AS_USUAL | {"slots": 6, "pending": 6})) == OVERWRITTEN


def test_a_name_stands_for_something_else_in_other_braces() -> None:
    """The second loop's tiles lie elsewhere, though their views have the first one's names."""
    first, second = LOOP.format(**AS_USUAL), LOOP.format(**AS_USUAL).replace("%x", "%y").replace("%at", "%there")
    assert races(first + second) == []
    assert len(races(LOOP.format(**AS_USUAL | {"slots": 1}) + second)) == 1


def test_parts_that_run_beside_each_other_are_walked_one_by_one() -> None:
    """Memory is handed to them by place; names inside are no others', and are forgotten behind."""
    head, body = LOOP.format(**AS_USUAL | {"slots": 1}).split("    %at =")
    part = "%at =" + body.replace("%x", "%arg0") + "ttg.warp_return\n"
    beside = "ttg.warp_specialize(%x, %K) attributes {a = 1}\ndefault {\nttg.warp_yield\n}\n"
    beside += f"partition0(%arg0: {VIEW} loc(#loc), %K: i32 loc(#loc)) num_warps(4) {{\n{part}}} : (i32) -> ()\n"
    assert races(head + beside) == OVERWRITTEN
    assert races(head + "%given = " + beside) == OVERWRITTEN
    assert races(head + beside.replace(part, "ttg.warp_return\n") + "%at =" + body) == OVERWRITTEN


def test_what_is_stored_in_a_round_is_overwritten_in_the_next() -> None:
    stored = f"%s = ttg.local_alloc %v : (tensor<64x64xbf16>) -> {VIEW}"
    loop = LOOP.format(**AS_USUAL | {"left": "%s"}).replace("      %a =", f"      {stored}\n      %a =")
    assert races(loop) == ["%d may still read %s when other bytes are written there"]


def test_another_search_is_asked_of_all_kernels_for_hopper_and_of_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(SimpleNamespace(cache_key="its source"), (1, 1, 1), (), {})
    before = {name: kernels_compile.identity(launch, target) for name, target in TARGETS.items()}
    monkeypatch.setattr(kernels_compile, "SEARCH", "another")
    changed = {name for name, target in TARGETS.items() if kernels_compile.identity(launch, target) != before[name]}
    assert changed == {"sm_90"}


@pytest.mark.parametrize("awaited", [False, True])
def test_triton_has_a_slot_too_few_for_a_tile_that_is_read_twice_and_awaited_mends_it(
    tmp_path: Path, awaited: bool
) -> None:
    (tmp_path / "planted.py").write_text(SCRIPT.format(awaited=awaited))
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--target", "sm_90", "--script"]
    done = subprocess.run([*command, str(tmp_path / "planted.py")], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == (0 if awaited else 1), done.stdout + done.stderr
    assert ("may still read" in done.stdout) == (not awaited)
