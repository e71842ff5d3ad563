"""FlashAttention 2, 3 and 4 from their own packages, if installed, behind foci's backend contract.

Never tested against the real packages: their signatures are taken from their sources. So each package is first tried on
its device with a small call, compared with the equation, before it is used.

Their order is by published figures (H100, bfloat16, heads of 128, 16k tokens, TFLOP/s): FlashAttention-3 648
forward and 561 backward, cuDNN 595 and 516, Triton 395, FlashAttention-2 370 and 322. cuDNN still goes first in what it
takes (aten.py), since it was measured here and they were not. FlashAttention-4 is reported level with 3 on Hopper but
compiles in its first call, so it comes after it. From Hopper on FlashAttention-2 gives way to Triton.
arXiv 2307.08691, 2407.08608, 2603.05451
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from foci.core.device import constant, platform
from foci.core.errors import Unsupported
from foci.core.ledger import Use, vetoes
from foci.ops.arguments import short
from foci.ops.masks import Visible
from foci.ops.softmax import chunked
from foci.ops.softmax.aten_cuda import differentiated, fold, slow
from foci.ops.softmax.call import DESCENDING, Call
from foci.ops.softmax.flash_packages import PACKAGES, Asked, Grads, Package, arguments, there

_HALF = (torch.bfloat16, torch.float16)
_MOST = 65535  # rows of a batch, or heads: one dimension of a grid


def reasons(call: Call) -> list[str]:
    """Why none of the packages can run this call."""
    found = _unfit(call)
    if found:
        return found
    for package in PACKAGES:
        against = _against(package, call)
        if not against:
            return []
        found += [f"{package.name}: {reason}" for reason in against]
    return found


def prefers(call: Call, single: bool) -> str:
    """The backend that is faster where both can run this call."""
    behind = _first(call).name == "flash_attn_2" and platform(call.q.device).capability >= (9, 0)
    return "triton" if behind or slow(call) else ""


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse of the first package that takes the call."""
    return _forward(_first(call), call)


def backward(
    call: Call, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None], needs: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v by a package's own backward; out and lse are the same of all, whoever made them."""
    found = _backward(_first(call, gradients=True), call, outputs, grads)
    return *(x if need else None for x, need in zip(found, needs[:3], strict=True)), None, None


def _unfit(call: Call) -> list[str]:
    """Reasons that hold for all packages: they do not support the call, or compute something else."""
    place = platform(call.q.device)
    if place.device != "cuda" or not place.cuda:
        return [f"it needs an NVIDIA GPU, the tensors are on {call.q.device.type}"]
    B, T, S, H, _, K, V = call.sizes
    asked = _asked(call)
    against = {
        "a bias or dense mask is not supported": call.bias is not None or call.dense is not None,
        "a sink is not supported": call.sink is not None,
        "a band is not supported": call.band_low is not None or call.band_high is not None,
        "documents and lengths are not supported": call.q_offsets is not None or call.kv_lengths is not None,
        "softcap is the GPU's rough tanh, which may cost lse more than its budget": call.softcap is not None,
        "dropout follows their own random stream, not foci's positions": call.dropout > 0,
        f"{short(call.q.dtype)} is not supported": call.q.dtype not in _HALF,
        "values of another width than keys are not supported": K != V,
        "there is nothing to compute: a size is 0": 0 in call.sizes,
        "top-left causal needs as many queries as keys": call.causal_start and T != S,
        "of more queries than keys their window hides what it should show": (
            T > S and asked.right != 0 and (asked.left is not None or asked.right is not None)
        ),
        DESCENDING: not call.ascending,
        f"more than {_MOST} rows or heads are not supported": max(B, H) > _MOST,
    }
    return [reason for reason, holds in against.items() if holds]


def _against(package: Package, call: Call, gradients: bool = False) -> list[str]:
    """Reasons against one package for a call that passed `_unfit`; it is imported only if there is no other reason."""
    if not there(package.module):
        return ["it is not installed"]
    device, gradients = call.q.device, gradients or differentiated(call)
    place = platform(device)
    found = package.refused(call, place.capability, gradients)
    if gradients and package.folds and call.q.dtype != torch.bfloat16:
        found.append(f"it knows no gradient of lse, and out in {short(call.q.dtype)} has no room for one")
    _, T, S, _, G, *_ = call.sizes
    use = Use(T, S, G, causal=call.causal_end or call.causal_start, gradients=gradients)
    found += vetoes(package.name, use, place)
    if not found and (fault := _fault(package.name, device)):
        found.append(fault)
    return found


def _first(call: Call, gradients: bool = False) -> Package:
    for package in PACKAGES:
        if not _against(package, call, gradients):
            return package
    raise Unsupported("attention: backend 'flash' cannot run this call", ["no package takes it"])


def _asked(call: Call) -> Asked:
    """The call in the packages' terms; window sides that mask nothing become None, as packages differ on wide ones."""
    T, S = call.q.shape[1], call.k.shape[1]
    right = 0 if call.causal_end or call.causal_start else call.right
    left = None if call.left is None or call.left >= S - 1 else call.left
    return Asked(call.q, call.k, call.v, call.scale, left, None if right is None or right >= T - 1 else right)


def _forward(package: Package, call: Call) -> tuple[Tensor, Tensor]:
    asked = _asked(call)
    with torch.cuda.device_of(asked.q):
        out, given = package.forward(asked._replace(q=_aligned(asked.q), k=_aligned(asked.k), v=_aligned(asked.v)))
    B, T, H, _ = call.q.shape
    if given.shape != (B, H, T):
        raise ValueError(f"its lse is {list(given.shape)}, not {[B, H, T]}")
    out, lse = out.contiguous(), torch.empty(B, T, H, dtype=torch.float32, device=out.device)
    # Packages give rows with NaN logits an lse of +inf or -inf, as to empty rows: make it NaN.
    torch.nan_to_num(given.transpose(1, 2), torch.nan, torch.nan, torch.nan, out=lse)
    if empty := _empty(call, asked):
        out[:, :empty], lse[:, :empty] = 0.0, -torch.inf
    return out, lse


def _backward(
    package: Package, call: Call, outputs: tuple[Tensor, Tensor], grads: tuple[Tensor | None, Tensor | None]
) -> Grads:
    asked, (out, lse), (dout, dlse) = _asked(call), outputs, grads
    dout = torch.zeros_like(out) if dout is None else dout
    empty = _empty(call, asked)
    if dlse is not None and package.folds:
        dout, out = fold(dlse, lse, dout, out)
        dlse = None
    lse = lse.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    if empty:
        lse[..., :empty] = package.empty
        dlse = None if dlse is None else dlse.index_fill(1, torch.arange(empty, device=dlse.device), 0.0)
    dlse = None if dlse is None else dlse.transpose(1, 2).contiguous()
    asked = asked._replace(q=_aligned(asked.q), k=_aligned(asked.k), v=_aligned(asked.v))
    with torch.cuda.device_of(asked.q):
        dq, dk, dv = package.backward(asked, _aligned(dout), _aligned(out), lse, dlse)
    if empty:
        dq[:, :empty] = 0.0
    return dq, dk, dv


def _empty(call: Call, asked: Asked) -> int:
    """The number of leading queries that see no key."""
    return 0 if asked.right is None else max(0, call.q.shape[1] - call.k.shape[1] - asked.right)


def _aligned(x: Tensor) -> Tensor:
    """x, copied unless rows are contiguous and aligned to 16 bytes, as kernels assume whatever the strides are."""
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(n > 0 and n % 8 == 0 for n in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


_FAULTS: dict[tuple[str, torch.device], str] = {}


@constant
def _fault(name: str, device: torch.device) -> str:
    """What was wrong when the package was tried on this device (once, cached); "" for nothing."""
    if (name, device) not in _FAULTS:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "it must be tried before, which waits for the GPU, and now a CUDA graph is captured"
        _FAULTS[name, device] = _tried(next(each for each in PACKAGES if each.name == name), device)
    return _FAULTS[name, device]


def _tried(package: Package, device: torch.device) -> str:
    try:
        for name, words in package.asks.items():
            if lacking := set(words) - arguments(package.function(name)):
                return f"it is of another version: {name} takes no {', '.join(sorted(lacking))}"
        with (
            torch.no_grad(), torch.autocast(device.type, enabled=False),
            torch._C._DisableFuncTorch(), _disable_current_modes(),
        ):  # fmt: skip
            return _wrong(package, device)
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        return f"it cannot be used: {type(error).__name__}: {line}"


def _wrong(package: Package, device: torch.device) -> str:
    """Compare a small call with the equation: causal with a window, T < S, grouped heads, a gradient of lse."""
    sizes = ((37, 4, 64), (70, 2, 64), (70, 2, 64), (37, 4, 64), (37, 4))
    q, k, v, dout, dlse = (_noise(place, (2, *size)).to(device, torch.bfloat16) for place, size in enumerate(sizes))
    call = Call(q, k, v, None, None, None, *Visible(causal_end=True, left=20), None, 0.125, 0.0)
    wide, dlse = call._replace(q=q.float(), k=k.float(), v=v.float()), dlse.float()
    true, given = chunked.forward(wide), _forward(package, call)
    needs = [True, True, True, False, False]
    gradients = chunked.backward(wide, true, (dout.float(), dlse), needs)[:3]
    pairs = zip((*given, *_backward(package, call, given, (dout, dlse))), (*true, *gradients), strict=True)
    for name, (found, right) in zip(("out", "lse", "dq", "dk", "dv"), pairs, strict=True):
        assert right is not None
        error = float((found.float() - right).norm() / right.norm())
        if not error <= (1e-3 if name == "lse" else 3e-2):
            return f"{name} of a small call is off by {error:.1%}: it computes something else, or is faulty here"
    return ""


def _noise(which: int, shape: tuple[int, ...]) -> Tensor:
    """Pseudo-random numbers in (-2, 2) without a generator, which cannot be used under vmap."""
    places = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu") + 1e5 * which
    return (2 * torch.frac(torch.sin(places * 12.9898) * 43758.5453)).view(shape)
