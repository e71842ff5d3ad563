"""Recorded calls of foci's operators: repeat them, describe them in words, take one head, convert to float64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, reduce
from operator import and_
from typing import Any, get_args, get_type_hints

from torch import Tensor

from foci.core.spec import Spec
from foci.ops import FUNCTIONS, SPECS
from foci.ops.masks import Band, Causal, Dense, Lengths, Mask, Packed, Window

Signature = tuple[Any, ...]
Call = Any  # of any operator: the NamedTuple that its Spec names
SOFTMAX = "softmax"
_LETTERS = {SOFTMAX: "BTSHGKV", "linear": "BTGHKVN", "delta": "BTGHKVN", "scan": "BTDN", "selective_scan": "BTDKN"}

# What a recurrence may be given beside its tensors, in words.
_WORDS = {
    "log_decay": "decay per channel", "bonus": "bonus", "erase": "a key of its own to erase by",
    "A": "decay per channel and state", "skip": "skip", "state": "state", "offsets": "documents",
}  # fmt: skip


def spec_of(call: Call) -> Spec:
    """The Spec of a call's operator."""
    return next(spec for spec in SPECS.values() if spec.call is type(call))


def run_on_backend(call: Call, backend: str) -> tuple[Tensor, ...]:
    """All outputs of a call, on the named backend."""
    outputs: tuple[Tensor, ...] = FUNCTIONS[spec_of(call).name](**arguments(call), backend=backend)
    return outputs


def signature(call: Call) -> Signature:
    """What must be equal for two calls to cost the same: operator, shapes, dtype, device and the kind of mask."""
    spec = spec_of(call)
    every = call._replace(return_state=True) if spec.recurrent else call  # as `run_on_backend` runs it
    return spec.name, *(
        (tuple(value.shape), value.dtype, value.device.type) if isinstance(value, Tensor) else value for value in every
    )


def arguments(call: Call) -> dict[str, Any]:
    """The public function's keyword arguments for this call; for a recurrence, with return_state=True."""
    if spec_of(call).name != SOFTMAX:
        given = {**call._asdict(), "return_state": True}
        decay = given.get("log_decay")
        if decay is not None and decay.dim() == 4:
            # A Call holds it as [B or 1, T or 1, H, K or 1]; the function distinguishes the kinds by rank.
            if decay.shape[:2] != call.v.shape[:2]:
                decay = decay.expand(*call.v.shape[:2], -1, -1)
            given["log_decay"] = decay[..., 0] if decay.shape[-1] == 1 else decay
        return given
    parts: list[Mask] = []
    if call.dense is not None:
        parts.append(Dense(call.dense))
    if call.q_offsets is not None:
        parts.append(Packed(call.q_offsets, call.kv_offsets))
    if call.kv_lengths is not None:
        parts.append(Lengths(call.kv_lengths, call.q_lengths))
    if call.band_low is not None or call.band_high is not None:
        parts.append(Band(call.band_low, call.band_high))
    if call.causal_end:
        parts.append(Causal())
    if call.causal_start:
        parts.append(Causal("top-left"))
    if call.left is not None or call.right is not None:
        parts.append(Window(call.left, call.right))
    mask = reduce(and_, parts) if parts else None
    rest = {"bias": call.bias, "softcap": call.softcap, "sink": call.sink, "scale": call.scale, "dropout": call.dropout}
    return {"q": call.q, "k": call.k, "v": call.v, "mask": mask, **rest}


def letters(call: Call) -> dict[str, int]:
    """The sizes of a call by letter."""
    return dict(zip(_LETTERS[spec_of(call).name], call.sizes, strict=True))


def dims(sizes: Mapping[str, int]) -> str:
    """`B20 T256 H4 K24`: sizes equal to their default (S = T, G = H, V = K, N = B) are left out."""
    partner = {"S": "T", "G": "H", "V": "K", "N": "B"}
    return " ".join(f"{x}{n}" for x, n in sizes.items() if x not in partner or n != sizes.get(partner[x]))


def mask_text(call: Call) -> str:
    """The mask of a call in words (`no mask`, `Causal`, `Dense 2x1x1x7 & Window`); of a recurrence its options."""
    if spec_of(call).name != SOFTMAX:
        given = [name for name in _WORDS if getattr(call, name, None) is not None]
        words = [_WORDS[name] for name in given]
        if "log_decay" in given and call.log_decay.dim() == 4 and call.log_decay.shape[3] == 1:
            words[0] = "decay per head"
        return " & ".join(words) or "no decay"
    words = []
    for feature in call.features():
        tensor = {"Dense": call.dense, "bias": call.bias}.get(feature)
        words.append(feature if tensor is None else f"{feature} {'x'.join(map(str, tensor.shape))}")
    return " & ".join(words) or "no mask"


def in_float64(call: Call) -> Call:
    """The same call in float64, for the reference."""
    return type(call)._make(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in call)


def reference_elements(call: Call) -> int:
    """Elements that the reference holds at once over all heads: T x S scores, or a state per token."""
    sizes = letters(call)
    rest = "S" if "S" in sizes else "KV"
    total = sizes["B"] * sizes["T"] * sizes.get("H", sizes.get("D", 1))
    for letter in rest:
        total *= sizes.get(letter, 1)
    return total


def one_head(call: Call) -> Call:
    """The part of a call that belongs to the first row of the batch and the first key head."""
    sizes = letters(call)
    if "G" not in sizes:
        return call
    packed = any(getattr(call, name, None) is not None for name in ("q_offsets", "offsets"))
    keep = {"H": sizes["H"] // sizes["G"], "G": 1, **({} if packed else {"B": 1, "N": 1})}
    shapes = _shapes(spec_of(call).name)

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or name not in shapes:
            return value
        names = shapes[name][-value.dim() :] if value.dim() else ()
        return value[tuple(slice(keep.get(letter)) for letter in names)]

    return type(call)._make(cut(name, value) for name, value in call._asdict().items())


@cache
def _shapes(operator: str) -> dict[str, tuple[str, ...]]:
    """The dimension letters of each tensor in an operator's Call, from its annotations."""
    found: dict[str, tuple[str, ...]] = {"kv_lengths": ("B",), "q_lengths": ("B",)}
    for name, hint in get_type_hints(SPECS[operator].call).items():
        for part in (hint, *get_args(hint)):
            if hasattr(part, "dim_str"):
                found[name] = tuple(letter.lstrip("#") for letter in part.dim_str.split())
                break
    return found
