"""Spills of registers that are known, by operator, kernel and target, each with its reason; no other is let through.

How many bytes they are the table says (docs/kernels.md), and that they are no more by this Triton.
"""

from __future__ import annotations

from typing import Any

# On sm_90, which we tune for, one that was not measured beside what does not spill says so.
_TUNED = "its tiles are chosen for sm_90; smaller ones would compute dA more often"
_ELSEWHERE = "its tiles are chosen for sm_90; not measured here"
_MEASURED = "on an H200 or an H100 the fastest of the tiles that were tried, also beside those that do not spill"
_NEWER = "on an H200 four programs a processor are faster than three"
_WALK = "on an H200 as fast as a form without; of 256 channels other forms spill up to 564"
_BACK = "of 256 channels; in tiles of 64 columns 164"
_WIDE = "most of 256 channels, where ten other forms spilled 544 to 1132"
_FAR = "where rows are far, which few chunks have"
_LIMIT = "its tiles are chosen for sm_90, where they fill the registers"
_BY_WARPS = "most with several heads a key; on an H200 faster than two launches that spill less"
_TWICE = "most with gradients; 128 columns take 1.3 times as long as 64, which take turns"
_FLOAT32 = "of float32 by gates per channel; on an H100 the fastest of 6 to 15 tiles, elsewhere not timed"
SPILLS: dict[tuple[str, str, str], str] = {
    **{("softmax", kernel, "sm_90"): _MEASURED for kernel in ("_attend_kernel", "queries_kernel", "keys_kernel")},
    ("softmax", "queries_kernel", "sm_100"): _ELSEWHERE,
    **{("linear", "keys_kernel", target): _TUNED for target in ("sm_80", "sm_120")},
    ("linear", "keys_kernel", "sm_90"): _MEASURED,
    ("linear", "keys_kernel", "gfx942"): "its tiles were chosen before far rows, which few chunks have, were its own",
    ("linear", "pairs_kernel", "sm_90"): f"on an H100 the fastest of the tiles that were tried; most {_FAR}",
    ("linear", "pairs_kernel", "sm_120"): _ELSEWHERE,
    ("linear", "sides_kernel", "sm_90"): "of forms that spill 164 to 740 bytes the fastest on an H200",
    ("linear", "walk_kernel", "sm_90"): "most of 256 channels, where eight warps spill less and take longer on an H100",
    ("delta", "near_side_kernel", "sm_90"): f"{_MEASURED}; most {_FAR}",
    ("delta", "pairs_kernel", "sm_90"): _MEASURED,
    ("delta", "token_chunks_kernel", "sm_90"): _NEWER,
    ("delta", "token_walk_kernel", "sm_90"): _WALK,
    ("delta", "token_walk_back_kernel", "sm_90"): _BACK,
    ("delta", "wide_walk_kernel", "sm_90"): _WIDE,
    ("delta", "side_and_pairs_kernel", "sm_90"): _BY_WARPS,
    ("delta", "near_chunks_kernel", "sm_90"): f"most {_FAR}, by as many warps as others for the same bits",
    ("delta", "channel_walk_kernel", "sm_90"): _TWICE,
    ("delta", "token_chunks_kernel", "sm_120"): _ELSEWHERE,
    **{("delta", "near_side_kernel", target): _LIMIT for target in ("sm_80", "sm_120", "gfx942")},
    **{("delta", "walk_kernel", target): _LIMIT for target in ("sm_80", "sm_120")},
    ("delta", "walk_kernel", "sm_100"): _ELSEWHERE,
    ("delta", "walk_kernel", "sm_90"): _FLOAT32,
    **{("delta", "chunks_kernel", target): _FLOAT32 for target in ("sm_80", "sm_90", "sm_100", "sm_120")},
    **{("delta", "side_by_channel_kernel", target): _FLOAT32 for target in ("sm_80", "sm_90", "sm_120")},
    ("delta", "side_by_channel_kernel", "gfx942"): "of float32; not measured here",
    ("selective_scan", "backward_kernel", "sm_90"): "of packed documents; its tiles are the fastest of rows on an H100",
    ("selective_scan", "ends_kernel", "sm_100"): _ELSEWHERE,
    ("selective_scan", "backward_kernel", "sm_100"): _ELSEWHERE,
}


def outlived(rows: list[dict[str, Any]]) -> list[str]:
    """A reason for each entry of SPILLS that none of these rows needs."""
    spilled = {(row["operator"], row["kernel"], row["target"]) for row in rows if row.get("spills")}
    return [f"SPILLS: {', '.join(place)} spills no more: take it out" for place in SPILLS if place not in spilled]
