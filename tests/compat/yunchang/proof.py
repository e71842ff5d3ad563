"""A function or layer of yunchang's on every rank against foci.attention in one process: outputs and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import foci
from foci.compat.yunchang.orders import EXTRACT_FUNC_DICT

DROPS = 9  # the generator where dropout draws its seed
NAMES = ("q", "k", "v", "alibi_slopes")


def draw(T: int = 10, H: int = 4, G: int = 2, alibi: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(5)
    tensors = [torch.randn(2, T, heads, 4, dtype=torch.float64) for heads in (H, G, G)]
    if alibi:
        tensors.append(torch.rand(H, dtype=torch.float64))
    return dict(zip(NAMES, tensors, strict=False))


def whole(inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """out, lse [B,H,T] and gradients of one process."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    T = leaves["q"].shape[1]
    left, right = options.get("window_size", (-1, -1))
    mask: Any = foci.Causal() if options.get("causal") else None
    if (left, right) != (-1, -1):
        window = foci.Window(None if left == -1 else left, None if right == -1 else right)
        mask = window if mask is None else mask & window
    bias = None
    if "alibi_slopes" in leaves:
        place = torch.arange(T)
        bias = -leaves["alibi_slopes"][:, None, None] * (place[:, None] - place).abs()
    torch.manual_seed(DROPS)
    out, lse = foci.attention_with_lse(
        leaves["q"], leaves["k"], leaves["v"], mask=mask, bias=bias, softcap=options.get("softcap") or None,
        scale=options.get("softmax_scale"), dropout=options.get("dropout_p", 0.0),
    )  # fmt: skip
    out.sin().sum().backward()
    return out.detach(), lse.detach().transpose(1, 2), {name: x.grad for name, x in leaves.items()}  # type: ignore[misc]


def mine(inputs: dict[str, Tensor], order: str, rank: int, size: int, rd: int, ud: int) -> dict[str, Tensor]:
    cut = EXTRACT_FUNC_DICT[order]
    return {
        name: (x if name == "alibi_slopes" else cut(x, rank, size, rd, ud)).clone().requires_grad_()
        for name, x in inputs.items()
    }


def compare(found: list[Any], inputs: dict[str, Tensor], options: dict[str, Any], order: str, rd: int, ud: int) -> None:
    """`found`: (out, gradients by name) of every rank."""
    out, _, gradients = whole(inputs, options)
    cut = EXTRACT_FUNC_DICT[order]
    for rank, (ours, theirs) in enumerate(found):
        torch.testing.assert_close(ours, cut(out, rank, rd * ud, rd, ud), rtol=1e-9, atol=1e-9)
        for name, gradient in gradients.items():
            expected = gradient if name == "alibi_slopes" else cut(gradient, rank, rd * ud, rd, ud)
            torch.testing.assert_close(theirs[name], expected, rtol=1e-9, atol=1e-9, msg=f"{name} on rank {rank}")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "softcap": 3.0},
    {"causal": True, "window_size": (3, 0), "deterministic": True},
    {"window_size": (2, 1), "softmax_scale": 0.3, "dropout_p": 0.3},
]
