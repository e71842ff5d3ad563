"""The selective scan in C++, vectorised over channels, if there is a compiler; its backward is chunked.py's."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from foci.ops import native
from foci.ops.arguments import documents, ends
from foci.ops.native import View
from foci.ops.selective_scan.call import NAME, Call, rates
from foci.ops.selective_scan.chunked import backward

__all__ = ["backward", "forward", "reasons"]

_MOST = 1024  # maximum state size K: states of at most sixteen channels are on a thread's stack
_VIEWS, _POINTERS = ("x", "dt", "b", "c", "out"), ("A", "skip", "state")


class Selective(ctypes.Structure):
    """The arguments of one call; the layout is the struct in native_scan.h."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("B", "T", "D", "K", "N", "dtype", "threads")),
        ("offsets", ctypes.c_void_p),
        *((name, View) for name in _VIEWS),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


def reasons(call: Call) -> list[str]:
    found = native.unsuitable(call.x, call.sizes)
    if call.sizes[3] > _MOST:
        found.append(f"K={call.sizes[3]} is above {_MOST}")
    return found or native.unavailable()


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T;  y_t = h_t C_t + skip x_t: y [B,T,D], the last h [call.ends,D,K]."""
    B, T, D, K, N = call.sizes
    documents(NAME, call.offsets, T)
    x = native.rows(call.x)
    dt, b, c = (native.rows(each.float()) for each in (call.dt, call.B, call.C))
    A = rates(call.A, torch.float32).t().contiguous()
    skip = None if call.skip is None else call.skip.float().contiguous()
    offsets = None if call.offsets is None else call.offsets.long().contiguous()
    state = x.new_zeros(N, K, D, dtype=torch.float32)
    if call.state is not None:
        state.copy_(call.state.transpose(1, 2))
    out = torch.empty(B, T, D, dtype=call.x.dtype, device="cpu")
    views = zip(_VIEWS, (View(y.data_ptr(), *y.stride()[:2], 0) for y in (x, dt, b, c, out)), strict=True)
    pointers = zip(_POINTERS, map(native.pointer, (A, skip, state)), strict=True)
    job = Selective(
        B=B, T=T, D=D, K=K, N=N, dtype=native.DTYPES[x.dtype], threads=torch.get_num_threads(),
        offsets=native.pointer(offsets), **dict(views), **dict(pointers),
    )  # fmt: skip
    native.library().foci_selective_forward(ctypes.byref(job))
    return out, ends(call, state.transpose(1, 2)).contiguous()
