"""Call: the validated arguments of softmax attention; the one place where its shapes are declared."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from foci.core.errors import ShapeError
from foci.core.shapes import Signature, dense
from foci.core.spec import accumulator
from foci.ops.arguments import AUTOCAST, DTYPES, number, scaling, short
from foci.ops.masks import Mask, Visible, check, existing, lower, materialize

Query = Float[Tensor, "B T H K"]
Key = Float[Tensor, "B S G K"]
Value = Float[Tensor, "B S G V"]
Bias = Float[Tensor, "#B #H #T #S"]
Sink = Float[Tensor, "H"]
Out = Float[Tensor, "B T H V"]
Lse = Float[Tensor, "B T H"]

DESCENDING = "the scale must be positive: -inf is multiplied by it"  # the reason against calls not `ascending`
_FEW = 16  # tokens for which computing all pairs costs no more than launching one more piece


class Call(NamedTuple):
    """One call, flat, in the order its ops take it; `dense` to `right` are a mask (ops/masks.py: Visible)."""

    q: Query
    k: Key
    v: Value
    bias: Bias | None
    sink: Sink | None
    seed: Tensor | None
    dense: Bool[Tensor, "#B #H #T #S"] | None
    q_offsets: Tensor | None
    kv_offsets: Tensor | None
    kv_lengths: Tensor | None
    q_lengths: Tensor | None
    band_low: Tensor | None
    band_high: Tensor | None
    causal_end: bool
    causal_start: bool
    left: int | None
    right: int | None
    softcap: float | None
    scale: float
    dropout: float

    @property
    def visible(self) -> Visible:
        return Visible(*self[6:17])

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, T, S, H, G, K, V."""
        B, T, H, K = self.q.shape
        _, S, G, V = self.v.shape
        return B, T, S, H, G, K, V

    @property
    def few(self) -> bool:
        """Whether there are few queries per key head and many keys: Triton's backward has them all in one tile then."""
        _, T, S, H, G, K, V = self.sizes
        return T * H <= 16 * G and S >= 64 * T and max(K, V) <= 256

    @property
    def ascending(self) -> bool:
        """Whether logits increase with q k in float32 kernels: the scale is positive, and not 0 once in float32."""
        return self.scale >= torch.finfo(torch.float32).tiny

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator(self.q.dtype)

    def features(self) -> list[str]:
        """The features of this call beyond plain attention, named as in the public signature."""
        present = {
            "bias": self.bias is not None,
            "softcap": self.softcap is not None,
            "sink": self.sink is not None,
            "dropout": self.dropout > 0,
            "Dense": self.dense is not None,
            "Packed": self.q_offsets is not None,
            "Lengths": self.kv_lengths is not None,
            "Band": self.band_low is not None or self.band_high is not None,
            "Causal": self.causal_end or self.causal_start,
            "Window": self.left is not None or self.right is not None,
        }
        return [name for name, there in present.items() if there]


class Rows(NamedTuple):
    """Per-row inputs of the backward of a part of the keys, over all keys, in the accumulator's dtype.

    out [B,T,H,V] and lse [B,T,H], a sink included; their gradients; delta [B,T,H] = sum_v dout out - dlse.
    """

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    delta: Tensor


class Gradients(NamedTuple):
    """Gradients to accumulate into, in the accumulator's dtype: dq [B,T,H,K]; dk [B,S,G,K] and dv [B,S,G,V], each
    head's keys contiguous in memory; dbias with the shape of the bias.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None


SIGNATURE = Signature(Call, "attention")


def bind(
    q: Query,
    k: Key,
    v: Value,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sink: Sink | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Call:
    """The Call of these arguments; raises ShapeError, ValueError or TypeError naming the argument, its value, what was
    expected.

    Under autocast q, k and v take its dtype, as torch's own attention does; otherwise they must share one.
    """
    return bound(q, k, v, bias, sink, *lower(mask), softcap=softcap, scale=scale, dropout=dropout)


def cap(operator: str, softcap: float | None) -> float | None:
    """softcap, in a range that float32 can multiply and divide by."""
    if softcap is None:
        return None
    return number(operator, "softcap", softcap, "positive finite number", 1e-30, 1e30)


def probability(operator: str, name: str, value: float) -> float:
    """A dropout probability: less than 1, as what is kept is divided by 1 - p."""
    if isinstance(value, bool) or not isinstance(value, Real):  # NaN and infinity are in no other range than this one
        value = number(operator, name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{operator}: {name} must be a probability in [0, 1), got {value}")
    return float(value)


def bound(
    q: Query, k: Key, v: Value, bias: Bias | None, sink: Sink | None, *mask: Any,
    softcap: float | None, scale: float | None, dropout: float,
) -> Call:  # fmt: skip
    """`bind` with the mask in its flat form, the fields of Visible."""
    visible = Visible(*mask)
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "sink": sink, "dense": visible.dense}
    sizes = SIGNATURE.bind(tensors)
    given = q, k, v
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        common = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(common) if x.dtype in AUTOCAST else x for x in (q, k, v))
    if sizes["G"] == 0 or sizes["H"] % sizes["G"]:
        raise ShapeError(
            f"attention: k has {sizes['G']} heads but q has {sizes['H']}; "
            f"q heads must be a multiple of k heads (G={sizes['G']}, H={sizes['H']})"
        )
    if not (q.dtype == k.dtype == v.dtype and q.dtype in DTYPES and q.device == k.device == v.device):
        _refuse_dtypes(*given)
    if any(x is not None for x in (bias, sink, *visible[:7])):
        _check_rest(visible, bias, sink, q, sizes)
    softcap = cap("attention", softcap)
    scale = scaling("attention", scale, sizes["K"])
    seed = None
    if dropout != 0:
        dropout = probability("attention", "dropout", dropout)
        seed = torch.randint(2**62, (), dtype=torch.int64, device=q.device)
    return Call(q, k, v, bias, sink, seed, *visible, softcap, scale, float(dropout))


def without_padding(call: Call) -> Call:
    """q, k, v with what Packed and Lengths exclude set to 0: it may be uninitialised memory, and 0 * NaN is NaN."""
    real = existing(call.visible, call.q.shape[1], call.k.shape[1], call.q.device)
    if real is None:
        return call
    queries, keys = (~flags[..., None, None] for flags in real)
    q, k, v = call.q.masked_fill(queries, 0.0), call.k.masked_fill(keys, 0.0), call.v.masked_fill(keys, 0.0)
    return call._replace(q=q, k=k, v=v)


def together(call: Call) -> Call:
    """Replace Lengths by a dense mask where rows are so short that one kernel call per row would cost more."""
    B, T, S, *_ = call.sizes
    if call.kv_lengths is None or call.q_offsets is not None or B == 1 or max(T, S) > _FEW:
        return call
    check(call.visible, B, T, S)
    dense = materialize(call.visible, T, S).to(call.q.device)
    return without_padding(call)._replace(**Visible(dense=dense)._asdict())


def never_empty(lse: Tensor) -> Tensor:
    """+inf for -inf: exp(z - lse) of an empty row is then 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _refuse_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.device == k.device == v.device:
        raise ValueError(
            f"attention: q, k, v have dtypes {short(q.dtype)}, {short(k.dtype)}, {short(v.dtype)}; "
            "expected one of float64, float32, bfloat16, float16 for all three"
        )
    raise ValueError(f"attention: q, k, v are on {q.device}, {k.device}, {v.device}; expected one device")


_BESIDE = ("bias", "sink", *Visible._fields[:5])


def _check_rest(visible: Visible, bias: Tensor | None, sink: Tensor | None, q: Tensor, sizes: dict[str, int]) -> None:
    for name, tensor in (("bias", bias), ("sink", sink)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise ValueError(
                f"attention: {name} must be a floating tensor, got {short(tensor.dtype)}"
                + ("; a boolean mask is `mask=Dense(...)`" if name == "bias" and tensor.dtype == torch.bool else "")
            )
    for name, tensor in zip(_BESIDE, (bias, sink, *visible[:5]), strict=True):
        if tensor is not None and dense("attention", name, tensor).device != q.device:
            raise ValueError(f"attention: {name} is on {tensor.device}, q is on {q.device}; expected one device")
    rows, word = sizes["B"], "rows in the batch"
    if visible.q_offsets is not None:
        if sizes["B"] != 1:
            raise ShapeError(f"attention: Packed needs a batch of 1 (documents stand end to end), got B={sizes['B']}")
        rows, word = visible.q_offsets.shape[0] - 1, "packed documents"
    if visible.kv_lengths is not None and visible.kv_lengths.shape[0] != rows:
        raise ShapeError(f"attention: Lengths has {visible.kv_lengths.shape[0]} entries; expected {rows}, the {word}")
    for name, bound in (("low", visible.band_low), ("high", visible.band_high)):
        if bound is not None and dense("attention", name, bound).shape[0] not in (1, rows):
            raise ShapeError(f"attention: Band has {bound.shape[0]} entries; expected 1 or {rows}, the {word}")
