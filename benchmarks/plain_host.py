"""What a call of plain attention costs a GPU's host, by foci and by what it hands to torch. Run it by hand.

    python benchmarks/plain_host.py

Bfloat16, causal, 8 rows of 512 tokens and 4 heads of 128: so little that the host is waited for. Microseconds a call of
30 in a row, the ways in a random order, medians of 25 such rows and the least. `op` is torch's cuDNN op as foci asks
for it, `hook` the same with the hook that lays its gradient out (docs/softmax.md, *Backends*), `SDPA` torch's function
held to cuDNN; `nothing` is an autograd.Function that computes nothing.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import foci
from foci.ops.softmax.aten_cuda import _contiguous_aligned

SHAPE, IN_A_ROW, ROWS = (8, 512, 4, 128), 30, 25


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dout, dout, dout


def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, *_ = torch._scaled_dot_product_cudnn_attention(q, k, v, None, torch.is_grad_enabled(), 0.0, True, False)
    return out.transpose(1, 2)


def hook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = op(q, k, v)
    out.register_hook(_contiguous_aligned)
    return out


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return foci.attention(q, k, v, mask=foci.Causal())


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return foci.attention_with_lse(q, k, v, mask=foci.Causal())[0]


WAYS: dict[str, Callable[..., Tensor]] = {
    "op": op, "hook": hook, "SDPA": sdpa, "foci": ours, "foci with its lse": with_lse, "nothing": Nothing.apply,
}  # fmt: skip


def tasks() -> dict[tuple[str, str], Callable[[], object]]:
    """By way and direction: forward without gradients, forward with, and both."""
    plain, leaves = ([torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in "qkv"] for _ in range(2))
    dout = torch.randn_like(plain[0])
    for leaf in leaves:
        leaf.requires_grad_()

    def inference(way: Callable[..., Tensor]) -> None:
        with torch.no_grad():
            way(*plain)

    found: dict[tuple[str, str], Callable[[], object]] = {}
    for name, way in WAYS.items():
        if name not in ("hook", "nothing"):
            found[name, "forward"] = lambda way=way: inference(way)
        found[name, "training forward"] = lambda way=way: way(*leaves)
        found[name, "both"] = lambda way=way: torch.autograd.grad(way(*leaves), leaves, dout)
    return found


def microseconds(task: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(IN_A_ROW):
        task()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / IN_A_ROW * 1e6


def main() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        asked = tasks()
        for task in asked.values():
            for _ in range(8):
                task()
        times: dict[tuple[str, str], list[float]] = {name: [] for name in asked}
        for _ in range(ROWS):
            for name in random.sample([*asked], len(asked)):
                times[name].append(microseconds(asked[name]))
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, microseconds: median (least)")
    for (way, direction), row in times.items():
        print(f"{way:20}{direction:20}{statistics.median(row):7.0f} ({min(row):.0f})")


if __name__ == "__main__":
    main()
