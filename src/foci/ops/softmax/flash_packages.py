"""How the FlashAttention 2, 3 and 4 packages are called: taken from their sources, not tested here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from foci.core.device import constant, installed
from foci.ops.softmax.call import Call

Grads = tuple[Tensor, Tensor, Tensor]


class Asked(NamedTuple):
    """A call in the packages' terms: q, k, v [B,T,H,D], window sides with None for no bound, causal bottom-right."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def window(self) -> tuple[int, int]:
        """(left, right), -1 for no bound."""
        return -1 if self.left is None else self.left, -1 if self.right is None else self.right


class Package:
    """One package: `asks` are the functions it must have, with the arguments that these must take.

    `forward` returns out and lse [B,H,T]; `backward` takes such an lse, and dlse unless `folds` (aten_cuda.py: fold).
    `empty`: the lse that its backward expects for a row that sees nothing.
    """

    name = ""
    module = ""
    asks: ClassVar[dict[str, tuple[str, ...]]] = {}
    empty = -torch.inf
    folds = True

    def refused(self, call: Call, capability: tuple[int, ...], gradients: bool) -> list[str]:
        """Reasons specific to this package."""
        raise NotImplementedError

    def forward(self, asked: Asked) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def backward(self, asked: Asked, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Grads:
        raise NotImplementedError

    def function(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(import_module(self.module), name)
        return found


class FlashAttention2(Package):
    """flash-attn, since 2.7; an lse of +inf marks a row that sees nothing."""

    name = "flash_attn_2"
    module = "flash_attn.flash_attn_interface"
    asks: ClassVar = {
        "flash_attn_func": ("dropout_p", "softmax_scale", "causal", "window_size", "return_attn_probs"),
        "_flash_attn_backward": ("softmax_lse", "dq", "dk", "dv", "window_size_left", "window_size_right", "rng_state"),
    }
    empty = torch.inf

    def refused(self, call: Call, capability: tuple[int, ...], gradients: bool) -> list[str]:
        return _too_wide(call, 256) + ["it needs sm_80 or later"] * (capability < (8, 0))

    def forward(self, asked: Asked) -> tuple[Tensor, Tensor]:
        q, k, v, scale, *_ = asked
        out, lse, _ = self.function("flash_attn_func")(
            q, k, v, dropout_p=0.0, softmax_scale=scale, causal=asked.causal, window_size=asked.window,
            return_attn_probs=True,
        )  # fmt: skip
        return out, lse

    def backward(self, asked: Asked, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Grads:
        left, right = asked.window
        return _call_backward(
            self.function("_flash_attn_backward"), asked, (dout, out, lse), dropout_p=0.0, causal=asked.causal,
            window_size_left=left, window_size_right=right, softcap=0.0, alibi_slopes=None, rng_state=None,
        )  # fmt: skip


class FlashAttention3(Package):
    """flash-attn-3, for Hopper, in versions that return lse. Its backward has had two sets of keywords."""

    name = "flash_attn_3"
    module = "flash_attn_interface"
    asks: ClassVar = {
        "flash_attn_func": ("softmax_scale", "causal", "window_size", "return_attn_probs"),
        "_flash_attn_backward": ("softmax_lse", "sequed_q", "dq", "dk", "dv", "softmax_scale", "deterministic"),
    }

    def refused(self, call: Call, capability: tuple[int, ...], gradients: bool) -> list[str]:
        found = _too_wide(call, 256) + ["it is for Hopper"] * (capability[:1] != (9,))
        if gradients and call.q.shape[-1] > 192 and torch.are_deterministic_algorithms_enabled():
            found.append("its gradients of heads wider than 192 are not deterministic")
        return found

    def forward(self, asked: Asked) -> tuple[Tensor, Tensor]:
        q, k, v, scale, *_ = asked
        out, lse, *_ = self.function("flash_attn_func")(
            q, k, v, softmax_scale=scale, causal=asked.causal, window_size=asked.window, return_attn_probs=True
        )
        return out, lse

    def backward(self, asked: Asked, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Grads:
        function, (left, right) = self.function("_flash_attn_backward"), asked.window
        words: dict[str, Any] = {"window_size_left": left, "window_size_right": right, "is_causal": asked.causal}
        if "window_size" in arguments(function):
            words = {"window_size": (left, right), "causal": asked.causal}
        absent = ("cu_seqlens_q", "cu_seqlens_k", "sequed_q", "sequed_k", "max_seqlen_q", "max_seqlen_k")
        return _call_backward(function, asked, (dout, out, lse), **dict.fromkeys(absent), **words)


class FlashAttention4(Package):
    """flash-attn-4, for Hopper and Blackwell. A side without a bound is None; -1 may mask everything."""

    name = "flash_attn_4"
    module = "flash_attn.cute.interface"
    asks: ClassVar = {
        "flash_attn_func": ("softmax_scale", "causal", "window_size", "return_lse"),
        "_flash_attn_bwd": ("dout", "lse", "softmax_scale", "window_size_left", "window_size_right", "dlse"),
    }
    folds = False

    def refused(self, call: Call, capability: tuple[int, ...], gradients: bool) -> list[str]:
        # Gradients of heads of 256 were wrong on Blackwell (NVIDIA/TransformerEngine#3216), and there take no dlse.
        found = _too_wide(call, 256 if capability[:1] == (9,) else 128)
        return found + ["it is for Hopper and Blackwell"] * (capability[:1] not in ((9,), (10,)))

    def forward(self, asked: Asked) -> tuple[Tensor, Tensor]:
        q, k, v, scale, *window = asked
        out, lse = self.function("flash_attn_func")(
            q, k, v, softmax_scale=scale, causal=asked.causal, window_size=tuple(window), return_lse=True
        )
        return out, lse

    def backward(self, asked: Asked, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Grads:
        q, k, v, scale, left, right = asked
        dq, dk, dv = self.function("_flash_attn_bwd")(
            q, k, v, out, dout, lse, softmax_scale=scale, causal=asked.causal, window_size_left=left,
            window_size_right=right, dlse=dlse, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq.contiguous(), dk.contiguous(), dv.contiguous()


PACKAGES: tuple[Package, ...] = (FlashAttention3(), FlashAttention4(), FlashAttention2())


def _call_backward(
    function: Callable[..., Any], asked: Asked, known: tuple[Tensor, Tensor, Tensor], **words: Any
) -> Grads:
    """Call a backward that writes to its arguments dq, dk, dv, and return these; `known`: dout, out, lse."""
    dout, out, lse = known
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in asked[:3])
    function(
        dout, *asked[:3], out, lse, dq=dq, dk=dk, dv=dv, softmax_scale=asked.scale, **words,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return dq, dk, dv


def _too_wide(call: Call, widest: int) -> list[str]:
    width = call.q.shape[-1]
    found = [f"heads wider than {widest} are not supported"] if width > widest else []
    return found + ["heads are supported in widths of eights"] * (width % 8 != 0)


@constant
def there(module: str) -> bool:
    return _found(module)


@cache
def _found(module: str) -> bool:
    """Whether a module can be found, without importing those that it lies in."""
    root, *rest = module.split(".")
    spec = find_spec(root) if installed(root) else None
    if spec is None or not rest:
        return spec is not None and spec.origin is not None
    return any(Path(folder, *rest).with_suffix(".py").is_file() for folder in spec.submodule_search_locations or ())


@cache
def arguments(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's arguments; a custom op keeps them in its schema."""
    schema = getattr(getattr(function, "_opoverload", None), "_schema", None)
    return frozenset(inspect.signature(function).parameters if schema is None else (x.name for x in schema.arguments))
