"""The small problems on which softmax attention is proven."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from operator import and_
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Case
from foci.ops.chance import Chance, told
from foci.ops.draw import Draw
from foci.ops.masks import Causal, Dense, Lengths, Mask, Packed, Window


def _none(draw: Draw) -> dict[str, Any]:
    return {}


def _large(draw: Draw) -> dict[str, Any]:
    """q so large that exp(z) overflows float32 where no maximum was subtracted."""
    return {"q": 40.0 * draw.normal(2, 7, 4, 16)}


def case(
    name: str,
    *features: str,
    extra: Callable[[Draw], dict[str, Any]] = _none,
    B: int = 2,
    T: int = 19,
    S: int | None = None,
    H: int = 4,
    G: int | None = None,
    K: int = 16,
    V: int | None = None,
    by: type[Draw] = Draw,
) -> Case:
    """q, k, v of these sizes (S, G and V follow T, H and K), and whatever `extra` draws beside them."""

    def make(dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Any]:
        draw = by(dtype, device, seed)
        keys, heads = (T if S is None else S), (G or H)
        qkv = {
            "q": draw.normal(B, T, H, K),
            "k": draw.normal(B, keys, heads, K),
            "v": draw.normal(B, keys, heads, V or K),
        }
        return qkv | extra(draw)

    return Case(name, frozenset(features), make)


CASES = (
    case("plain"),
    case("one token", T=1),
    case("cross", "cross", T=7, S=23),
    case("more queries than keys", "cross", T=23, S=7),
    case("grouped heads", "gqa", H=6, G=2),
    case("one key head", "gqa", H=4, G=1),
    case("value width", "value width", K=16, V=24),
    case("odd widths", "value width", K=7, V=5),
    case("scale", "scale", extra=lambda d: {"scale": 0.3}),
    case("two blocks", B=1, T=131, H=2, K=24),  # another width: a scale written for one of them shows
    case("large logits", T=7, extra=_large),
    case("causal", "causal", extra=lambda d: {"mask": Causal()}),
    case("causal, two blocks", "causal", B=1, T=131, H=2, extra=lambda d: {"mask": Causal()}),
    case("causal, cached keys", "causal", "cross", T=5, S=23, extra=lambda d: {"mask": Causal()}),
    case("causal, empty rows", "causal", "cross", "empty rows", T=23, S=7, extra=lambda d: {"mask": Causal()}),
    case("causal top-left", "causal top-left", "cross", T=7, S=23, extra=lambda d: {"mask": Causal("top-left")}),
    case("causal, grouped heads", "causal", "gqa", H=6, G=2, extra=lambda d: {"mask": Causal()}),
    case("window", "window", extra=lambda d: {"mask": Window(4, 2)}),
    case("causal window", "causal", "window", T=40, extra=lambda d: {"mask": Causal() & Window(5, None)}),
    case("dense", "dense", extra=lambda d: {"mask": Dense(d.boolean(2, 4, 19, 19))}),
    case("dense, empty rows", "dense", "empty rows", extra=lambda d: {"mask": _without_row(d.boolean(2, 1, 19, 19))}),
    case("dense and causal", "dense", "causal", extra=lambda d: {"mask": Dense(d.boolean(2, 1, 1, 19)) & Causal()}),
    case("padding", "padding", extra=lambda d: {"mask": Lengths(d.integers(19, 11))}),
    case("padding, empty row", "padding", "empty rows", extra=lambda d: {"mask": Lengths(d.integers(0, 11))}),
    case("padding and causal", "padding", "causal", extra=lambda d: {"mask": Lengths(d.integers(19, 11)) & Causal()}),
    case(
        "padded queries", "padding", "padded queries", "causal", "empty rows",
        extra=lambda d: {"mask": Lengths(d.integers(19, 9), d.integers(13, 9)) & Causal()},
    ),
    case(
        "cache", "padding", "causal", "cross", T=3, S=23,
        extra=lambda d: {"mask": Lengths(d.integers(23, 12)) & Causal()},
    ),
    case("packed", "packed", B=1, extra=lambda d: {"mask": Packed(d.integers(0, 1, 8, 8, 19))}),
    case("packed causal", "packed", "causal", B=1, extra=lambda d: {"mask": Packed(d.integers(0, 6, 7, 19)) &
    Causal()}), case(
        "packed cross", "packed", "causal", "cross", "empty rows", B=1, T=19, S=23,
        extra=lambda d: {"mask": Packed(d.integers(0, 6, 11, 17), d.integers(0, 4, 4, 23)) & Causal()},
    ),
    case("softcap", "softcap", extra=lambda d: {"softcap": 1.5}),
    case("softcap and causal", "softcap", "causal", extra=lambda d: {"softcap": 1.5, "mask": Causal()}),
    case("bias", "bias", extra=lambda d: {"bias": d.normal(2, 4, 19, 19)}),
    case("bias per head", "bias", extra=lambda d: {"bias": d.normal(4, 19, 19)}),
    case("bias per key", "bias", "causal", extra=lambda d: {"bias": d.normal(2, 1, 1, 19), "mask": Causal()}),
    case("sink", "sink", extra=lambda d: {"sink": d.normal(4)}),
    case(
        "sink, empty rows", "sink", "padding", "empty rows",
        extra=lambda d: {"sink": d.normal(4), "mask": Lengths(d.integers(0, 11))},
    ),
    case(
        "everything", "bias", "softcap", "sink", "causal", "window", "padding", "gqa", "value width", H=6, G=2, V=8,
        extra=lambda d: {
            "bias": d.normal(6, 19, 19), "softcap": 2.0, "sink": d.normal(6),
            "mask": Causal() & Window(7, None) & Lengths(d.integers(19, 12)),
        },
    ),
    case("dropout", "dropout", extra=lambda d: {"dropout": 0.3}),
)  # fmt: skip
# For GPUs, which run other kernels in the sizes of models (Spec.large).
LARGE = (
    case("width 128, causal", "causal", "gqa", T=1024, H=16, G=4, K=128, extra=lambda d: {"mask": Causal()}),
    case(
        "width 128, one query of many keys", "causal", "gqa", T=1, S=2048, H=16, G=4, K=128,
        extra=lambda d: {"mask": Causal()},
    ),
    case("width 64, causal", "causal", "gqa", T=512, H=8, G=2, K=64, extra=lambda d: {"mask": Causal()}),
    case("width 256, causal", "causal", "gqa", T=1024, H=16, G=8, K=256, extra=lambda d: {"mask": Causal()}),
    case(
        "width 128, window, softcap, sink", "causal", "window", "softcap", "sink", "gqa", T=1024, H=16, G=4, K=128,
        extra=lambda d: {"mask": Causal() & Window(100, 0), "softcap": 30.0, "sink": d.normal(16)},
    ),
    case("width 64, bias", "bias", T=320, H=2, K=64, extra=lambda d: {"bias": d.normal(1, 2, 320, 320)}),
    case(
        "width 128, packed", "packed", "causal", "gqa", B=1, T=509, H=8, G=2, K=128,
        extra=lambda d: {"mask": Packed(d.integers(0, 130, 130, 131, 400, 509)) & Causal()},
    ),
)  # fmt: skip


def _without_row(allowed: Tensor) -> Dense:
    allowed[..., 2, :] = False
    return Dense(allowed)


def drawn(name: str, room: int) -> Case:
    """A problem that nobody chose (Spec.drawn). Its truth keeps some 16 numbers for a query and a key of a head."""
    chance = Chance(name, room)
    (G, H), K, V, B = chance.heads(16), chance.width(), chance.width(), chance.rows()
    most = max(2, int((room / (16 * B * H)) ** 0.5))
    T = chance.one(1, *(chance.size(most) for _ in range(3)))
    S = T if chance.yes() else chance.size(min(room >> 12, most * most // T))
    sizes: dict[str, Any] = {"B": B, "T": T, "S": S, "H": H, "G": G, "K": K, "V": chance.one(K, K, V)}
    bias, softcap = chance.one((B, H, T, S), (H, T, S), (B, 1, 1, S), (1, H, 1, S), (T, S)), chance.one(1.5, 30.0)
    any_of: dict[str, Callable[[Draw], Any]] = {
        "bias": lambda draw: draw.normal(*bias),
        "sink": lambda draw: draw.normal(H),
        "softcap": lambda draw: softcap,
        "scale": lambda draw: 0.3,
    }
    masks, extra = _drawn_masks(chance, B, T, S, H), {word: make for word, make in any_of.items() if chance.yes(0.2)}
    said = {"gqa": G < H, "cross": T != S, "value width": sizes["V"] != K}
    features = sorted((*masks, *extra, *(feature for feature, present in said.items() if present)))
    if masks:
        extra["mask"] = lambda draw: reduce(and_, (mask(draw) for mask in masks.values()))
    return case(
        told(name, sizes, features), *features, **sizes,
        extra=lambda draw: {word: make(draw) for word, make in extra.items()},
    )  # fmt: skip


def _drawn_masks(chance: Chance, B: int, T: int, S: int, H: int) -> dict[str, Callable[[Draw], Mask]]:
    """Masks of any kinds, by the features that they are."""
    found: dict[str, Callable[[Draw], Mask]] = {}
    ends = [(T, S)] * B
    if B == 1 and chance.yes(0.4):
        of_q, of_k = (chance.cuts(tokens) for tokens in (T, S))
        of_k = of_q if T == S and chance.yes() else of_k
        found["packed"] = lambda draw: Packed(draw.integers(*of_q), draw.integers(*of_k))
        ends = [(t - t0, s - s0) for (t0, t), (s0, s) in zip(pairwise(of_q), pairwise(of_k), strict=True)]
    if chance.yes(0.25):
        keys, queries = [chance.between(0, s) for _, s in ends], [chance.between(0, t) for t, _ in ends]
        some = chance.yes(0.3)
        found["padding"] = lambda draw: Lengths(draw.integers(*keys), draw.integers(*queries) if some else None)
    causal, left, right = chance.one("bottom-right", "bottom-right", "top-left"), chance.size(S), chance.size(S)
    window, dense = Window(*chance.one((left, right), (left, 0), (None, right))), chance.one((B, H), (B, 1), (1, 1))
    more: dict[str, tuple[float, Callable[[Draw], Mask]]] = {
        "causal": (0.5, lambda draw: Causal(causal)),
        "window": (0.3, lambda draw: window),
        "dense": (0.15, lambda draw: Dense(draw.boolean(*dense, T, S))),
    }
    return found | {word: make for word, (share, make) in more.items() if chance.yes(share)}
