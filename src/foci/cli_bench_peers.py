"""Peers behind each operator's own argument names, where installed; what they cannot do is refused by feature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foci.core.spec import Candidate, Case
from foci.ops.masks import lower

OUT = ("out",)
Given = Mapping[str, Any]


def peers(operator: str, device: torch.device) -> list[Candidate]:
    """Every peer of an operator that is installed and runs on this device."""
    makers: dict[str, Callable[[torch.device], Iterator[Candidate]]] = {
        "softmax": _softmax,
        "linear": _linear,
        "delta": _delta,
        "selective_scan": _selective_scan,
    }
    return list(makers[operator](device)) if operator in makers else []


def _theirs(module: str) -> Any:
    """A module of a peer, which foci does not depend on."""
    return import_module(module)


def _candidate(
    name: str, call: Callable[[Given], Any], can: set[str], needs: str = "", outputs: tuple[str, ...] = OUT
) -> Candidate:
    """A peer that gives `outputs`, and takes problems whose features are among `can`, `needs` one of them."""

    def refuses(case: Case) -> list[str]:
        extra = sorted(case.features - can - {"small", "decode", "causal", "value width", "extreme"})
        missing = [] if not needs or needs in case.features else [f"it is for {needs}"]
        return missing + [f"{feature} is not supported" for feature in extra]

    def run(inputs: Given) -> tuple[Tensor, ...]:
        result = call(inputs)
        return result[: len(outputs)] if isinstance(result, tuple) else (result,)

    return Candidate(name, run, refuses=refuses, outputs=outputs)


def _softmax(device: torch.device) -> Iterator[Candidate]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels: dict[str, Any] = {"torch SDPA": None}
    if device.type == "cuda":
        names = {"flash": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
        kernels = {f"SDPA {name}": getattr(SDPBackend, kind) for name, kind in names.items()}

    def sdpa(inputs: Given, kernel: Any) -> Tensor:
        q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
        with sdpa_kernel(kernel) if kernel is not None else nullcontext():
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=inputs.get("bias"), is_causal="mask" in inputs, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)

    for name, kernel in kernels.items():
        yield _candidate(name, functools.partial(sdpa, kernel=kernel), {"gqa", "bias"})
    if device.type == "cuda":
        takes = {"gqa", "bias", "softcap", "window", "packed"}
        yield _candidate("FlexAttention", _flex(), takes | {"sink"})
        yield _candidate("FlexAttention with lse", _flex(lse=True), takes | {"dlse"}, "dlse", ("out", "lse"))
    if device.type == "cuda" and find_spec("flash_attn"):
        yield _candidate("flash-attn", _flash_attn, {"gqa", "softcap", "window", "packed"})
    if device.type == "cuda" and find_spec("xformers"):
        yield _candidate("xFormers", _xformers, {"bias"})


def _xformers(given: Given) -> Tensor:
    ops, (q, k, v) = _theirs("xformers.ops"), (given[name] for name in "qkv")
    bias = ops.LowerTriangularMask() if "mask" in given else given.get("bias")
    if isinstance(bias, Tensor):  # whose batch and heads it wants in full
        bias = bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    out: Tensor = ops.memory_efficient_attention(q, k, v, attn_bias=bias)
    return out


def _flex(lse: bool = False) -> Callable[[Given], Any]:
    """FlexAttention compiled once for each problem, its block mask made once, as its users do; `lse` gives that too."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    made: list[Any] = [None, None]  # the mask that the block mask is of

    def block_mask(given: Given) -> Any:
        if given.get("mask") is None:
            return None
        if made[0] is not given["mask"]:
            T, S = given["q"].shape[1], given["k"].shape[1]
            seen = lower(given["mask"])
            far = S if seen.left is None else seen.left
            place = torch.arange(T, device=given["q"].device)
            offsets = seen.q_offsets
            document = place * 0 if offsets is None else torch.searchsorted(offsets, place, right=True)

            def visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
                return (s <= t) & (t - s <= far) & (document[t] == document[s])

            made[:] = given["mask"], create_block_mask(visible, None, None, T, S, device=str(place.device))
        return made[1]

    def run(given: Given) -> Any:
        cap, bias, sink = given.get("softcap"), given.get("bias"), given.get("sink")

        def score(z: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            z = z if cap is None else cap * torch.tanh(z / cap)
            return z if bias is None else z + bias[0, h, t, s]

        q, k, v = (given[name].transpose(1, 2) for name in "qkv")
        plain = cap is None and bias is None
        out: Any = compiled(
            q, k, v, score_mod=None if plain else score, block_mask=block_mask(given),
            enable_gqa=q.shape[1] != k.shape[1], return_lse=lse or sink is not None,
        )  # fmt: skip
        if lse:
            return out[0].transpose(1, 2), out[1].transpose(1, 2)
        if sink is not None:
            out, top = out
            out = out * torch.sigmoid(top - sink[:, None])[..., None].to(out.dtype)
        return out.transpose(1, 2)

    return run


def _flash_attn(given: Given) -> Tensor:
    flash = _theirs("flash_attn")
    seen = lower(given.get("mask"))
    options = {
        "causal": seen.causal_end or seen.causal_start,
        "window_size": (-1 if seen.left is None else seen.left, -1 if seen.right is None else seen.right),
        "softcap": given.get("softcap") or 0.0,
    }
    q, k, v = (given[name] for name in "qkv")
    if seen.q_offsets is None:
        return flash.flash_attn_func(q, k, v, **options)
    offsets, longest = seen.q_offsets, q.shape[1]
    out = flash.flash_attn_varlen_func(
        q[0], k[0], v[0], offsets, offsets, longest, longest, **options
    )  # fmt: skip
    return out[None]


_DECAYS = {"token": "decay per token", "channel": "decay per channel", "head": "decay per head"}


@contextmanager
def unguarded(tell: Callable[[str], object]) -> Iterator[None]:
    """FLA declines gated backwards on Hopper before Triton 3.7.1, as they can be wrong there (its issue 640).

    Within it FLA computes them all the same: here a result is judged before it is timed.
    """
    try:
        module = _theirs("fla.ops.common.chunk_o") if find_spec("fla") else None
    except Exception:  # it says why where it is called
        module = None
    before = getattr(module, "TRITON_ABOVE_3_7_1", True)
    if not before:
        tell("FLA's guard of Triton before 3.7.1 on Hopper is lifted: its results are judged like all others\n")
        setattr(module, "TRITON_ABOVE_3_7_1", True)  # noqa: B010  a module that is not there
    try:
        yield
    finally:
        if not before:
            setattr(module, "TRITON_ABOVE_3_7_1", before)  # noqa: B010


@contextmanager
def repeatable() -> Iterator[None]:
    """Within it what torch compiles leaves its buffers to a second backward: the backward alone is timed many times."""
    import torch._functorch.config as config

    with config.patch(donated_buffer=False):
        yield


def _fla(module: str, function: str) -> Callable[..., Any]:
    """FLA's own code: since 0.6 it hands a call to FlashQLA or FlashKDA where they are installed."""
    found: Callable[..., Any] = inspect.unwrap(getattr(_theirs(f"fla.ops.{module}"), function))
    return found


def _linear(device: torch.device) -> Iterator[Candidate]:
    if device.type != "cuda" or not find_spec("fla"):
        return

    def gla(given: Given) -> Any:
        q, k, v = (given[name] for name in "qkv")
        return _fla("gla", "chunk_gla")(q, k, v, g=given["log_decay"], cu_seqlens=given.get("offsets"))

    def simple(given: Given) -> Any:
        q, k, v = (given[name] for name in "qkv")
        heads = v.shape[2] // k.shape[2]
        q, k = (x if heads == 1 else x.repeat_interleave(heads, 2) for x in (q, k))
        decay = given["log_decay"]
        name = "g" if decay.dim() == 3 else "g_gamma"
        return _fla("simple_gla", "chunk_simple_gla")(q, k, v, **{name: decay}, cu_seqlens=given.get("offsets"))

    yield _candidate("FLA chunk_gla", gla, {_DECAYS["channel"], "packed"}, _DECAYS["channel"])
    yield _candidate("FLA chunk_simple_gla", simple, {_DECAYS["token"], "packed", "gqa"}, _DECAYS["token"])
    yield _candidate("FLA chunk_simple_gla, gamma", simple, {_DECAYS["head"], "packed", "gqa"}, _DECAYS["head"])


def _delta(device: torch.device) -> Iterator[Candidate]:
    on_gpu = device.type == "cuda"

    def gated(call: Callable[[], Callable[..., Any]]) -> Callable[[Given], Any]:
        def run(given: Given) -> Any:
            names = {"g": "log_decay", "beta": "beta", "cu_seqlens": "offsets"}
            options = {name: given[ours] for name, ours in names.items() if ours in given}
            return call()(given["q"], given["k"], given["v"], **options)

        return run

    if on_gpu and find_spec("fla"):
        for name, module, function, kind in (
            ("FLA chunk_gated_delta_rule", "gated_delta_rule", "chunk_gated_delta_rule", "token"),
            ("FLA chunk_kda", "kda", "chunk_kda", "channel"),
        ):
            call = functools.partial(_fla, module, function)
            yield _candidate(name, gated(call), {_DECAYS[kind], "packed", "gqa"}, _DECAYS[kind])
        yield _candidate(
            "FLA chunk_delta_rule", gated(functools.partial(_fla, "delta_rule", "chunk_delta_rule")), {"packed"}
        )
    if on_gpu and find_spec("flash_qla"):
        token = _DECAYS["token"]
        yield _candidate("FlashQLA", gated(_flash_qla), {token, "packed", "gqa"}, token)
    if find_spec("transformers"):
        yield _candidate("transformers' torch code", _transformers, {_DECAYS["token"], "gqa"}, _DECAYS["token"])


def _flash_qla() -> Callable[..., Any]:
    found: Callable[..., Any] = _theirs("flash_qla").chunk_gated_delta_rule
    return found


def _transformers(given: Given) -> Any:
    """Qwen3-Next's fallback, which wants as many key heads as value heads."""
    module = _theirs("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v = (given[name] for name in "qkv")
    heads = v.shape[2] // k.shape[2]
    q, k = (x if heads == 1 else x.repeat_interleave(heads, 2) for x in (q, k))
    function = module.torch_chunk_gated_delta_rule
    return getattr(function, "__wrapped__", function)(q, k, v, g=given["log_decay"], beta=given["beta"])


def _selective_scan(device: torch.device) -> Iterator[Candidate]:
    if device.type != "cuda" or not find_spec("mamba_ssm"):
        return

    def mamba(given: Given) -> Tensor:
        function = _theirs("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
        x, dt, B, C = (given[name].transpose(1, 2) for name in ("x", "dt", "B", "C"))
        out: Tensor = function(x, dt, given["A"].float(), B, C, D=given["skip"].float())
        return out.transpose(1, 2)

    yield _candidate("mamba_ssm", mamba, set())
