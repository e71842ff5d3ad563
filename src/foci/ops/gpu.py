"""What the Triton backends of all operators refuse, and how many chunks they go through."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foci.core.tune import interpreting
from foci.ops.arguments import short

CHUNK = 64  # tokens a chunk of the recurrences has in every kernel
WIDEST = 512
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsuitable(like: Tensor, sizes: Sequence[int], widths: Sequence[int]) -> list[str]:
    """What speaks against a call on a GPU: its device, dtype, a size of 0, heads wider than WIDEST."""
    found = []
    if like.device.type != "cuda" and not (interpreting() and like.device.type == "cpu"):
        found.append(f"it needs a GPU, the tensors are on {like.device.type}")
    if like.dtype not in DTYPES:
        found.append(f"{short(like.dtype)} is not supported")
    if interpreting() and like.dtype == torch.bfloat16:
        found.append("Triton's interpreter computes bfloat16 wrongly")
    if 0 in sizes:
        found.append("there is nothing to compute: a size is 0")
    if max(widths) > WIDEST:
        found.append(f"heads wider than {WIDEST} are not supported")
    return found


def chunks(T: int, B: int, offsets: Tensor | None) -> int:
    """Chunks of all rows; of packed documents, whose lengths only the GPU knows, at most so many."""
    if offsets is None:
        return B * -(-T // CHUNK)
    return T // CHUNK + offsets.shape[0] - 1
