"""Spills of registers that are known, by operator, kernel and target, each with its reason; no other is let through."""

from __future__ import annotations

from typing import Any

# On sm_90, which we tune for, one that was not measured beside what does not spill says so.
_TUNED = "its tiles are chosen for sm_90, where nothing spills; smaller ones would compute dA more often"
_MEASURED = "on an H200 the fastest of the tiles that were tried, also beside those that do not spill"
_NEWER = "36 bytes at most, 40 without gradients: there on an H200 four programs a processor are faster than three"
_WALK = "132 bytes at most: on an H200 as fast as a form without; with 256 channels 308, other forms up to 564"
_BACK = "of 256 channels: 80 bytes, 440 without gates; in tiles of 64 columns 164"
_WIDE = "112 bytes at most; with 256 channels 660, by Triton 3.6 544, where ten other forms spilled 544 to 1132"
_FAR = "where rows are far, which few chunks have"
_LIMIT = "its tiles are chosen for sm_90, where they fill the registers"
_BY_WARPS = "1428 bytes at most, 436 with one head a key; on an H200 faster than two launches that spill less"
_TWICE = "8 bytes with 128 columns: on a GPU 1.3 times as long as 64, which take turns; 80 with gradients, by 3.6 4"
SPILLS: dict[tuple[str, str, str], str] = {
    **{("softmax", kernel, "sm_90"): _MEASURED for kernel in ("_attend_kernel", "queries_kernel", "keys_kernel")},
    ("softmax", "queries_kernel", "sm_100"): "12 bytes at most",
    **{("linear", "keys_kernel", target): _TUNED for target in ("sm_80", "sm_120")},
    ("linear", "keys_kernel", "sm_90"): _MEASURED,
    ("linear", "keys_kernel", "gfx942"): "its tiles were chosen before far rows, which few chunks have, were its own",
    ("linear", "pairs_kernel", "sm_90"): f"28 bytes at most, {_FAR}: in return as many programs run at once",
    ("linear", "pairs_kernel", "sm_120"): "16 bytes at most",
    ("linear", "sides_kernel", "sm_90"): "of forms that spill 164 to 740 bytes the fastest on an H200",
    ("linear", "walk_kernel", "sm_90"): "60 bytes at most; of three tiles that were tried on an H200 the fastest",
    **{("delta", kernel, "sm_90"): _MEASURED for kernel in ("near_side_kernel", "pairs_kernel")},
    ("delta", "token_chunks_kernel", "sm_90"): _NEWER,
    ("delta", "token_walk_kernel", "sm_90"): _WALK,
    ("delta", "token_walk_back_kernel", "sm_90"): _BACK,
    ("delta", "wide_walk_kernel", "sm_90"): _WIDE,
    ("delta", "side_and_pairs_kernel", "sm_90"): _BY_WARPS,
    ("delta", "near_chunks_kernel", "sm_90"): "16 bytes; 1016 where rows are far, by as many warps for the same bits",
    ("delta", "channel_walk_kernel", "sm_90"): _TWICE,
    ("delta", "token_chunks_kernel", "sm_120"): "28 bytes at most",
    **{("delta", "near_chunks_kernel", target): _FAR for target in ("sm_80", "sm_120")},
    **{("delta", "near_side_kernel", target): _LIMIT for target in ("sm_80", "sm_100", "sm_120", "gfx942")},
    **{("delta", "walk_kernel", target): _LIMIT for target in ("sm_80", "sm_120")},
    ("delta", "walk_kernel", "sm_100"): "40 bytes at most, of gates per channel",
    ("selective_scan", "forward_kernel", "sm_90"): "4 bytes, of packed documents without gradients; not timed",
}


def outlived(rows: list[dict[str, Any]]) -> list[str]:
    """A reason for each entry of SPILLS that none of these rows needs."""
    spilled = {(row["operator"], row["kernel"], row["target"]) for row in rows if row.get("spills")}
    return [f"SPILLS: {', '.join(place)} spills no more: take it out" for place in SPILLS if place not in spilled]
