"""Shared by the Triton backends of all operators: reasons to refuse a call, chunk counts, moving offsets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foci.core.assembler import HOPPER, refusal
from foci.core.device import imported, installed
from foci.core.errors import Unsupported
from foci.core.tune import Target, interpreting, target_of
from foci.ops.arguments import alone, documents, short

CHUNK = 64  # tokens of a chunk in every kernel of the recurrences
WIDEST = 512  # channels of a head at most
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsuitable(like: Tensor, sizes: Sequence[int], widths: Sequence[int]) -> list[str]:
    """Reasons against a call on a GPU: its device, dtype, a size of 0, heads wider than WIDEST."""
    found = []
    if like.device.type == "cuda":
        found += _unsuitable(target_of(like.device))
    elif not (interpreting() and like.device.type == "cpu"):
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


def _unsuitable(target: Target) -> list[str]:
    """Reasons against a GPU: it is too old, or no kernel is assembled right for it."""
    if target.kind == "cuda" and target.arch < 80:
        return [f"sm_{target.arch} is older than sm_80, the oldest that kernels are compiled and tested for"]
    wrong = target.kind == "cuda" and target.arch == HOPPER and imported("triton") and refusal()
    return [wrong] if wrong else []


def chunks(T: int, B: int, offsets: Tensor | None) -> int:
    """The number of chunks of all rows; for packed documents, whose lengths are on the GPU, an upper bound."""
    if offsets is None:
        return B * -(-T // CHUNK)
    return T // CHUNK + offsets.shape[0] - 1


def placed(operator: str, offsets: Tensor | None, like: Tensor) -> Tensor | None:
    """Offsets, contiguous, on the device of `like` [B,T,..]; those on the CPU are checked, without a sync."""
    if offsets is None:
        return None
    if offsets.device.type == "cpu":
        documents(operator, offsets, like.shape[1])
    return brought(operator, "offsets", offsets, like.device)


def brought(operator: str, name: str, x: Tensor, device: torch.device) -> Tensor:
    """x, contiguous, on the device. Not in CUDA graph capture: replays would copy from the same host memory."""
    if x.device == device:
        return x.contiguous()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            f"{operator}: backend 'triton' cannot be captured in a CUDA graph",
            [f"{name} is on {x.device}"],
            f"put {name} on {device} before",
        )
    # Pageable memory is staged before the call returns; pinned memory would be read later, when it may have changed.
    return x.to(device, non_blocking=not x.is_pinned()).contiguous()


def can_step(state: Tensor) -> bool:
    """Whether a kernel may update this state in a step: float32 on a GPU, and no trace, mode or transform."""
    fits = state.device.type == "cuda" and state.dtype == torch.float32 and state.numel() > 0
    return fits and max(state.shape[2:], default=0) <= WIDEST and alone(state) and installed("triton")
