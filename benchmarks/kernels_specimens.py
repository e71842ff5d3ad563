"""The calls whose kernels are compiled: each operator in the sizes of real models, with each feature it has."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foci.ops import SPECS
from foci.ops.masks import Band, Causal, Dense, Lengths, Mask, Packed, Window

T = 4096  # no kernel depends on how many tokens there are, but on 16 dividing it
DOCUMENTS = 8


@dataclass(frozen=True)
class Specimen:
    """One call, on tensors without memory.

    `where`: the page and CI have it for every target ("everywhere") or for the one that we tune for ("sm_90"),
    or it is compiled when --all asks for it ("asked").
    `run` takes what `make` makes, for what is no forward and backward of our kernels' own; `direction` says what it is:
    a step of decoding, or what a backward by torch's kernels has of ours.
    """

    operator: str
    name: str
    make: Callable[[torch.dtype], dict[str, Any]]
    dtype: torch.dtype = torch.bfloat16
    where: str = "everywhere"
    run: Callable[..., object] | None = None
    direction: str = "step"

    @property
    def label(self) -> str:
        """What it is called in a table: its dtype is said where it is not bfloat16."""
        return self.name if self.dtype == torch.bfloat16 else f"{self.name}, {str(self.dtype).removeprefix('torch.')}"


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def offsets(documents: int = DOCUMENTS) -> Tensor:
    return empty(documents + 1, dtype=torch.int64)


def softmax(
    *, K: int = 128, V: int | None = None, G: int = 8, H: int = 32, t: int = T, s: int = T, B: int = 2,
    mask: Callable[[], Mask] | None = None, bias: bool = False, sink: bool = False, **options: Any,
) -> Callable[[torch.dtype], dict[str, Any]]:  # fmt: skip
    """Softmax attention: H query heads on G key heads."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        q, k, v = (empty(B, n, h, d, dtype=dtype) for n, h, d in ((t, H, K), (s, G, K), (s, G, V or K)))
        extra: dict[str, Any] = {"mask": mask()} if mask else {}
        if bias:
            extra["bias"] = empty(1, H, t, s, dtype=dtype)
        if sink:
            extra["sink"] = empty(H)
        return {"q": q, "k": k, "v": v, **extra, **options}

    return make


def gates(decay: str | None, B: int, t: int, H: int, K: int) -> Tensor | None:
    shapes = {"head": (H,), "token": (B, t, H), "channel": (B, t, H, K)}
    return empty(*shapes[decay]) if decay else None


def recurrence(
    *, K: int = 128, V: int | None = None, G: int = 16, H: int = 16, decay: str | None = None, beta: bool = False,
    bonus: bool = False, erase: bool = False, state: bool = False, packed: bool = False, t: int = T, **options: Any,
) -> Callable[[torch.dtype], dict[str, Any]]:  # fmt: skip
    """Linear attention, and with `beta` the delta rule."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        B, width = (1 if packed else 2), V or K
        made: dict[str, Any] = {name: empty(B, t, G, K, dtype=dtype) for name in ("q", "k")}
        made["v"] = empty(B, t, H, width, dtype=dtype)
        optional = {
            "beta": empty(B, t, H) if beta else None,
            "log_decay": gates(decay, B, t, H, K),
            "bonus": empty(H, K) if bonus else None,
            "erase": empty(B, t, G, K, dtype=dtype) if erase else None,
            "state": empty(DOCUMENTS if packed else B, H, K, width) if state else None,
            "offsets": offsets() if packed else None,
        }
        return made | {name: value for name, value in optional.items() if value is not None} | options

    return make


def scan(
    *, B: int = 2, D: int = 2048, state: bool = False, packed: bool = False
) -> Callable[[torch.dtype], dict[str, Any]]:
    """A scan over single channels; of packed documents B is 1."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        made: dict[str, Any] = {"x": empty(B, T, D, dtype=dtype), "log_decay": empty(B, T, D)}
        if state:
            made["state"] = empty(DOCUMENTS if packed else B, D)
        return made | ({"offsets": offsets()} if packed else {})

    return make


def selective(
    *, D: int = 2048, N: int = 16, skip: bool = True, state: bool = False, packed: bool = False
) -> Callable[[torch.dtype], dict[str, Any]]:
    """Mamba's selective scan."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        B = 1 if packed else 2
        made: dict[str, Any] = {name: empty(B, T, D, dtype=dtype) for name in ("x", "dt")}
        made |= {"A": empty(D, N), "B": empty(B, T, N, dtype=dtype), "C": empty(B, T, N, dtype=dtype)}
        if skip:
            made["skip"] = empty(D)
        if state:
            made["state"] = empty(DOCUMENTS if packed else B, D, N)
        return made | ({"offsets": offsets()} if packed else {})

    return make


def _packed() -> Mask:
    return Packed(offsets()) & Causal()


def _rest(operator: str, named: dict[str, Any]) -> tuple[Specimen, ...]:
    return tuple(Specimen(operator, name, make, where="asked") for name, make in named.items())


def _dtypes(
    operator: str, name: str, make: Any, dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.float32)
) -> tuple[Specimen, ...]:
    return tuple(Specimen(operator, name, make, dtype, where="asked") for dtype in dtypes)


_SOFTMAX = (
    Specimen("softmax", "causal K=128", softmax(mask=Causal)),
    Specimen("softmax", "causal K=64", softmax(K=64, mask=Causal), where="sm_90"),
    Specimen("softmax", "causal K=256", softmax(K=256, H=16, mask=Causal), where="sm_90"),
    Specimen(
        "softmax", "window, softcap, sink", softmax(mask=lambda: Causal() & Window(1024, 0), softcap=30.0, sink=True)
    ),
    Specimen("softmax", "bias", softmax(K=64, H=8, t=1024, s=1024, bias=True)),
    Specimen("softmax", "packed", softmax(B=1, mask=_packed)),
    Specimen("softmax", "one query", softmax(t=1, s=8192, B=8, mask=Causal)),
    *_rest(
        "softmax",
        {
            "full K=128": softmax(),
            "full K=128, V=64": softmax(V=64),
            "K=192, V=128": softmax(K=192, V=128, mask=Causal),
            "K=40": softmax(K=40, G=8, H=8),
            "K=512": softmax(K=512, G=4, H=4, mask=Causal),
            "dropout": softmax(mask=Causal, dropout=0.1),
            "dense": softmax(t=1024, s=1024, mask=lambda: Dense(empty(1024, 1024, dtype=torch.bool))),
            "lengths": softmax(mask=lambda: Lengths(empty(2, dtype=torch.int64))),
            "band": softmax(mask=lambda: Band(empty(2, dtype=torch.int64), empty(2, dtype=torch.int64))),
        },
    ),
    *_dtypes("softmax", "causal K=128", softmax(mask=Causal)),
)
_LINEAR = (
    Specimen("linear", "no decay", recurrence(), where="sm_90"),
    Specimen("linear", "per head", recurrence(decay="head")),
    Specimen("linear", "per token", recurrence(decay="token")),
    Specimen("linear", "per channel", recurrence(decay="channel")),
    Specimen("linear", "no decay, K=256", recurrence(K=256), where="sm_90"),
    Specimen("linear", "per token K=256", recurrence(K=256, decay="token"), where="sm_90"),
    Specimen("linear", "per channel K=256", recurrence(K=256, decay="channel"), where="sm_90"),
    Specimen("linear", "per channel, bonus", recurrence(K=64, G=32, H=32, decay="channel", bonus=True)),
    Specimen("linear", "per token, bonus", recurrence(K=64, G=96, H=96, decay="token", bonus=True), where="sm_90"),
    Specimen("linear", "packed, per token", recurrence(decay="token", packed=True, state=True)),
    # A number that is 1 is a constant, of which a compiler makes something else.
    Specimen(
        "linear", "one document", recurrence(G=32, H=32, decay="token", packed=True, offsets=offsets(1)), where="sm_90"
    ),
    # Few enough to be cut: states are walked twice.
    Specimen("linear", "one head, per token", recurrence(G=1, H=1, decay="token"), where="sm_90"),
    Specimen("linear", "one head, per channel", recurrence(G=1, H=1, decay="channel", state=True), where="sm_90"),
    Specimen(
        "linear",
        "documents of one head, per channel",
        recurrence(G=1, H=1, decay="channel", packed=True, state=True, t=2 * T),
        where="sm_90",
    ),
    *_rest(
        "linear",
        {
            "SSD K=128, V=64, G=1": recurrence(V=64, G=1, H=64, decay="token"),
            "per channel K=512": recurrence(K=512, decay="channel"),
            "per token K=64": recurrence(K=64, decay="token"),
            "per token K=40, V=72": recurrence(K=40, V=72, decay="token"),
            "packed, per channel": recurrence(decay="channel", packed=True, state=True),
            "not causal": recurrence(K=32, causal=False),
        },
    ),
    *_dtypes("linear", "per head", recurrence(decay="head")),
    *_dtypes("linear", "per token", recurrence(decay="token")),
    *_dtypes("linear", "per channel", recurrence(decay="channel")),
)
_DELTA = (
    Specimen("delta", "DeltaNet", recurrence(beta=True), where="sm_90"),
    Specimen("delta", "Gated DeltaNet", recurrence(beta=True, decay="token", G=16, H=32)),
    Specimen("delta", "Gated DeltaNet, K = 64", recurrence(beta=True, decay="token", K=64, G=32, H=32), where="sm_90"),
    Specimen(
        "delta",
        "Gated DeltaNet, K = 64, few chunks",
        recurrence(beta=True, decay="token", K=64, G=32, H=32, t=1024),
        where="sm_90",
    ),
    Specimen(
        "delta", "Gated DeltaNet, few chunks", recurrence(beta=True, decay="token", G=32, H=32, t=1024), where="sm_90"
    ),
    Specimen("delta", "Gated DeltaNet, K = 64, in pieces", recurrence(beta=True, decay="token", K=64), where="sm_90"),
    Specimen("delta", "Gated DeltaNet of many heads", recurrence(beta=True, decay="token", G=24, H=48), where="sm_90"),
    Specimen("delta", "Gated DeltaNet, K = 256", recurrence(beta=True, decay="token", K=256)),
    Specimen("delta", "DeltaNet, K = 256", recurrence(beta=True, K=256), where="sm_90"),
    Specimen("delta", "gates of heads", recurrence(beta=True, decay="head")),
    Specimen("delta", "Kimi Delta Attention", recurrence(beta=True, decay="channel")),
    Specimen("delta", "Kimi Delta Attention", recurrence(beta=True, decay="channel"), torch.float32),
    Specimen(
        "delta", "Kimi Delta Attention of many heads", recurrence(beta=True, decay="channel", G=48, H=48), where="sm_90"
    ),
    Specimen("delta", "Gated DeltaNet of few heads, in pieces", recurrence(beta=True, decay="token", G=1, H=2)),
    Specimen(
        "delta", "Gated DeltaNet of two heads, in pieces", recurrence(beta=True, decay="token", G=1, H=1), where="sm_90"
    ),
    Specimen("delta", "DeltaNet of few heads, in pieces", recurrence(beta=True, G=2, H=4), where="sm_90"),
    Specimen("delta", "Gated DeltaNet in pieces by its gates", recurrence(beta=True, decay="token"), where="sm_90"),
    Specimen(
        "delta",
        "Gated DeltaNet in pieces by its gates or by maps",
        recurrence(beta=True, decay="token", G=1, H=4, t=8 * T),
        where="sm_90",
    ),
    Specimen(
        "delta",
        "Gated DeltaNet of long documents, in pieces",
        recurrence(beta=True, decay="token", G=4, H=4, t=8 * T, packed=True, offsets=offsets(2)),
        where="sm_90",
    ),
    Specimen(
        "delta",
        "Kimi Delta Attention of few heads, in pieces",
        recurrence(beta=True, decay="channel", G=1, H=2),
        where="sm_90",
    ),
    Specimen("delta", "packed Gated DeltaNet", recurrence(beta=True, decay="token", packed=True, state=True)),
    Specimen(
        "delta",
        "Gated DeltaNet of one document",
        recurrence(beta=True, G=16, H=32, decay="token", packed=True, offsets=offsets(1)),
        where="sm_90",
    ),
    *_rest(
        "delta",
        {
            "erase": recurrence(beta=True, decay="channel", erase=True, K=64),
            "Gated DeltaNet K=256": recurrence(beta=True, decay="token", K=256),
            "Gated DeltaNet K=64": recurrence(beta=True, decay="token", K=64),
            "Gated DeltaNet K=96, V=192": recurrence(beta=True, decay="token", K=96, V=192),
            "KDA K=256": recurrence(beta=True, decay="channel", K=256),
            "KDA K=64": recurrence(beta=True, decay="channel", K=64),
            "packed KDA": recurrence(beta=True, decay="channel", packed=True, state=True),
        },
    ),
    *_dtypes("delta", "Gated DeltaNet", recurrence(beta=True, decay="token", G=16, H=32)),
    *_dtypes("delta", "Kimi Delta Attention", recurrence(beta=True, decay="channel"), (torch.float16,)),
    *_dtypes("delta", "Gated DeltaNet of few heads, in pieces", recurrence(beta=True, decay="token", G=1, H=2)),
)
_SCANS = (
    Specimen("scan", "D=2048", scan()),
    Specimen("scan", "D=2048, walked whole", scan(B=32)),  # a channel a thread
    Specimen("scan", "packed", scan(B=1, packed=True, state=True), where="sm_90"),
    *_dtypes("scan", "D=2048", scan()),
    Specimen("selective_scan", "N=16", selective()),
    Specimen("selective_scan", "packed", selective(D=1024, packed=True, state=True), where="sm_90"),
    *_rest("selective_scan", {"N=128": selective(N=128, D=1024), "N=1": selective(N=1)}),
    *_dtypes("selective_scan", "N=16", selective()),
)


def one(*, K: int = 128, H: int = 16, beta: bool = False, channels: bool = False) -> Any:
    """One token of linear attention or the delta rule: 32 rows, whose states lie in slots."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        made: dict[str, Any] = {name: empty(32, H, K, dtype=dtype) for name in ("q", "k", "v")}
        made |= {"beta": empty(32, H)} if beta else {}
        made |= {"state": empty(64, H, K, K), "scale": 0.1, "slots": empty(32, dtype=torch.int64)}
        return made | {"log_decay": empty(32, H, K if channels else 1)}

    return make


def _paged(dtype: torch.dtype, K: int = 128) -> dict[str, Any]:
    """Four rows of 256 pages of 16 keys."""
    q, pages = empty(4, 1, 32, K, dtype=dtype), empty(4096, 16, 8, K, dtype=dtype)
    call = SPECS["softmax"].bind(q, pages[:4], pages[:4])  # type: ignore[misc]
    call = call._replace(k=pages, v=pages, kv_lengths=empty(4, dtype=torch.int64), causal_end=True)
    return {"call": call, "table": empty(4, 256, dtype=torch.int32)}


def _paged_window(dtype: torch.dtype) -> dict[str, Any]:
    """The same, of which a row's last 1024 keys and no others are there."""
    named = _paged(dtype)
    return named | {"call": named["call"]._replace(left=1024)}


def _dlse(dtype: torch.dtype, K: int = 128) -> dict[str, Any]:
    """A gradient of lse as autograd gives it, lse as cuDNN does."""
    lse, dout, out = empty(2, 16, T).transpose(1, 2), *(empty(2, T, 16, K, dtype=dtype) for _ in range(2))
    return {"dlse": empty(2, T, 16), "lse": lse, "dout": dout, "out": out}


def _scan_step(dtype: torch.dtype) -> dict[str, Any]:
    return {"x": empty(32, 2048, dtype=dtype), "log_decay": empty(32, 2048), "state": empty(32, 2048)}


def _selective_step(dtype: torch.dtype) -> dict[str, Any]:
    made: dict[str, Any] = {name: empty(32, 2048, dtype=dtype) for name in ("x", "dt")}
    made |= {"A": empty(2048, 16), "B": empty(32, 16, dtype=dtype), "C": empty(32, 16, dtype=dtype)}
    return made | {"state": empty(32, 2048, 16), "skip": empty(2048)}


def later(module: str, function: str) -> Callable[..., object]:
    """A function of a module that imports triton, when it is called."""
    return lambda **named: getattr(importlib.import_module(f"foci.ops.{module}"), function)(**named)


_STEPS = (
    Specimen("softmax", "one token, paged", _paged, run=later("softmax.gpu", "forward_paged")),
    *(
        Specimen(
            "softmax", f"one token, paged, K={K}", partial(_paged, K=K), where="sm_90",
            run=later("softmax.gpu", "forward_paged"),
        )
        for K in (64, 256)
    ),
    Specimen(
        "softmax", "one token, paged, window", _paged_window, where="sm_90", run=later("softmax.gpu", "forward_paged")
    ),
    Specimen("linear", "one token", one(), run=later("kernels_triton_step", "step")),
    Specimen("delta", "one token", one(beta=True), run=later("kernels_triton_step", "step")),
    Specimen(
        "delta", "one token, KDA", one(beta=True, channels=True), where="asked",
        run=later("kernels_triton_step", "step"),
    ),
    Specimen("scan", "one token", _scan_step, run=later("scan.kernels_triton", "step")),
    Specimen(
        "selective_scan", "one token", _selective_step, run=later("selective_scan.kernels_triton_forward", "step"),
    ),
)  # fmt: skip
_FOLDED = tuple(
    Specimen(
        "softmax", f"a gradient of lse, K={K}", partial(_dlse, K=K), where=where,
        run=later("softmax.kernels_triton_dlse", "fold"), direction="aten",
    )
    for K, where in ((128, "everywhere"), (64, "sm_90"), (256, "sm_90"))
)  # fmt: skip


def convolved(
    *, D: int = 2048, B: int = 2, before: bool = False, packed: bool = False, back: bool = False
) -> Callable[[torch.dtype], dict[str, Any]]:
    """A short convolution of four taps: behind zeros or the tokens before, or of packed documents."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        made: dict[str, Any] = {"x": empty(B, T, D, dtype=dtype)}
        made |= {"before": empty(B, 3, D, dtype=dtype) if before else None}
        made |= {"ages": empty(T, dtype=torch.int64) if packed else None}
        made |= {"weight": empty(D, 1, 4, dtype=dtype), "bias": None, "activation": "silu"}
        needs = [True, before, False, True, False]
        return made | ({"dy": empty(B, T, D, dtype=dtype), "needs": needs} if back else {})

    return make


def stepped(dtype: torch.dtype) -> dict[str, Any]:
    """One token of 64 rows."""
    made = {"x": empty(64, 2048, dtype=dtype), "tail": empty(64, 3, 2048, dtype=dtype)}
    return made | {"weight": empty(2048, 1, 4, dtype=dtype), "bias": None, "activation": "silu"}


def gated(*, H: int = 16, D: int = 2048, inverted: bool = False, back: bool = False) -> Callable[[torch.dtype], Any]:
    """Decays of heads or of channels."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        made: dict[str, Any] = {"x": empty(2, T, D, dtype=dtype), "bias": None if inverted else empty(D, dtype=dtype)}
        made |= {"a_log": None if inverted else empty(H, dtype=dtype), "rate": -1.0, "inverted": inverted}
        needs = [True, not inverted, not inverted]
        return made | ({"dy": empty(2, T, D, dtype=torch.float32), "needs": needs} if back else {})

    return make


def weighed(*, shared: bool = False, back: bool = False) -> Callable[[torch.dtype], dict[str, Any]]:
    """Heads of 64 channels by a number for each token, or for all."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x, scale = empty(2, T, 4096, dtype=dtype), empty(64, dtype=dtype) if shared else empty(2, T, 64)
        return {"x": x, "scale": scale} | ({"dy": x, "needs": [True, True]} if back else {})

    return make


def normed(
    *, D: int = 128, rows: int = 16 * T, gate: bool = True, back: bool = False, **options: Any
) -> Callable[[torch.dtype], dict[str, Any]]:
    """An RMSNorm with a gate, or of queries and keys, without weights."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x, weight = empty(rows, D, dtype=dtype), empty(D, dtype=dtype) if gate else None
        made: dict[str, Any] = {"x": x, "weight": weight, "gate": x if gate else None, "groups": 1, "eps": 1e-6}
        made |= {"mean": gate, "activation": "silu" if gate else None, "gate_first": False} | options
        return made | ({"dy": x, "needs": [True, gate, gate]} if back else {})

    return make


def _parts(name: str, make: Any, function: str, module: str = "parts", **where: str) -> tuple[Specimen, ...]:
    """Both directions of what a layer has round its operator."""
    ways = ((function, "forward", {}), (f"{function}_back", "backward", {"back": True}))
    return tuple(
        Specimen(
            "layers", name, make(**back), run=later(f"kernels_triton_{module}", run), direction=direction, **where
        )
        for run, direction, back in ways
    )  # fmt: skip


def turned(back: bool = False) -> Callable[[torch.dtype], dict[str, Any]]:
    """Rotary positions of queries."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        positions = empty(1, T, dtype=torch.int64)
        return {
            "x": empty(2, T, 16, 128, dtype=dtype),
            "positions": positions,
            "rate": -0.14,
            "width": 128,
            "back": back,
        }

    return make


_LAYERS = (
    *_parts("short convolution", convolved, "convolve", "convolution"),
    *_parts(
        "short convolution behind tokens", partial(convolved, before=True), "convolve", "convolution", where="sm_90"
    ),
    *_parts(
        "short convolution of documents", partial(convolved, B=1, packed=True), "convolve", "convolution",
        where="sm_90",
    ),
    Specimen(
        "layers", "short convolution, one token", stepped, run=later("kernels_triton_convolution", "convolve_step")
    ),
    *_parts("decays of channels", gated, "gate"),
    *_parts("decays of heads", partial(gated, D=16), "gate", where="sm_90"),
    *_parts("decays by a log sigmoid", partial(gated, inverted=True), "gate", where="sm_90"),
    *_parts("weighed heads", weighed, "weigh"),
    *_parts("heads weighed alike", partial(weighed, shared=True), "weigh", where="sm_90"),
    *_parts("RMSNorm of heads of 128, gated", normed, "norm"),
    *_parts("queries and keys normalised", partial(normed, gate=False), "norm", where="sm_90"),
    *_parts(
        "RMSNorm of 4096 behind its gate", partial(normed, D=4096, rows=2 * T, gate_first=True), "norm", where="sm_90"
    ),
    *(
        Specimen(
            "layers", "rotary positions", turned(back), run=later("kernels_triton_parts", "rotary"), direction=direction
        )
        for back, direction in ((False, "forward"), (True, "backward"))
    ),
)  # fmt: skip
SPECIMENS = (*_SOFTMAX, *_LINEAR, *_DELTA, *_SCANS, *_STEPS, *_FOLDED, *_LAYERS)
