"""The small problems on which softmax attention is proven."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial, reduce
from itertools import pairwise
from operator import and_
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Case
from foci.ops.chance import FEW, Chance, told, varied
from foci.ops.draw import Draw
from foci.ops.masks import Band, Causal, Dense, Lengths, Mask, Packed, Window


def _none(draw: Draw) -> dict[str, Any]:
    return {}


def _large(draw: Draw) -> dict[str, Any]:
    """q so large that exp(z) overflows float32 where no maximum was subtracted."""
    return {"q": 40.0 * draw.normal(2, 7, 4, 16)}


def _large_products(draw: Draw) -> dict[str, Any]:
    """q k past what float16 holds, a third of them, where scale q k are ordinary logits."""
    return {"q": 128.0 * draw.normal(2, 7, 4, 16), "k": 128.0 * draw.normal(2, 7, 4, 16), "scale": 2.0**-13}


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
    case("scale of 0", "scale", T=7, extra=lambda d: {"scale": 0.0}),  # `scale or K**-0.5` would use the default
    case("negative scale", "scale", T=7, extra=lambda d: {"scale": -0.3}),
    case("two blocks", B=1, T=131, H=2, K=24),  # another K, so that a hard-coded scale shows
    case("large logits", T=7, extra=_large),
    case("large products", "scale", T=7, extra=_large_products),
    case("causal", "causal", extra=lambda d: {"mask": Causal()}),
    case("causal, two blocks", "causal", B=1, T=131, H=2, extra=lambda d: {"mask": Causal()}),
    case("causal, cached keys", "causal", "cross", T=5, S=23, extra=lambda d: {"mask": Causal()}),
    # as many queries as before: a mask that is kept by their number is another call's
    case("causal, fewer cached keys", "causal", "cross", T=5, S=11, extra=lambda d: {"mask": Causal()}),
    case("causal, empty rows", "causal", "cross", "empty rows", T=23, S=7, extra=lambda d: {"mask": Causal()}),
    case("causal top-left", "causal top-left", "cross", T=7, S=23, extra=lambda d: {"mask": Causal("top-left")}),
    case("causal, grouped heads", "causal", "gqa", H=6, G=2, extra=lambda d: {"mask": Causal()}),
    case("window", "window", extra=lambda d: {"mask": Window(4, 2)}),
    # as many tokens, other windows: a mask that is kept by lengths is another call's; 0 is no "no window"
    case("window of the past", "window", extra=lambda d: {"mask": Window(4, 0)}),
    case("window of the future", "window", extra=lambda d: {"mask": Window(None, 2)}),
    case("window, grouped heads", "window", "gqa", H=6, G=2, extra=lambda d: {"mask": Window(0, 3)}),
    case("causal window", "causal", "window", T=40, extra=lambda d: {"mask": Causal() & Window(5, None)}),
    case(
        "causal window, cached keys", "causal", "window", "cross", T=13, S=23,
        extra=lambda d: {"mask": Causal() & Window(5, None)},
    ),
    case("scale and causal", "scale", "causal", T=7, extra=lambda d: {"scale": 0.3, "mask": Causal()}),
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
        "padded queries, softcap", "padding", "padded queries", "softcap", "empty rows", T=7,
        extra=lambda d: {"mask": Lengths(d.integers(7, 4), d.integers(4, 7)), "softcap": 1.5},
    ),
    case(
        "padded queries of many keys", "padding", "padded queries", "cross", "empty rows", T=2, S=130,
        extra=lambda d: {"mask": Lengths(d.integers(130, 70), d.integers(1, 2))},
    ),
    case(
        "cache", "padding", "causal", "cross", T=3, S=23,
        extra=lambda d: {"mask": Lengths(d.integers(23, 12)) & Causal()},
    ),
    case("decoding", "causal", "cross", T=1, S=23, extra=lambda d: {"mask": Causal()}),
    case("decoding, grouped heads", "causal", "cross", "gqa", T=1, S=23, H=6, G=2, extra=lambda d: {"mask": Causal()}),
    case(
        "decoding, window", "causal", "window", "cross", T=1, S=23,
        extra=lambda d: {"mask": Causal() & Window(5, None)},
    ),
    case("decoding, padding", "padding", "cross", T=1, S=23, extra=lambda d: {"mask": Lengths(d.integers(23, 12))}),
    case(
        "decoding, bias and sink", "bias", "sink", "cross", T=1, S=23,
        extra=lambda d: {"bias": d.normal(1, 4, 1, 23), "sink": d.normal(4)},
    ),
    case("packed", "packed", B=1, extra=lambda d: {"mask": Packed(d.integers(0, 1, 8, 8, 19))}),
    case(
        "packed, long documents", "packed", B=1, T=150, H=2,
        extra=lambda d: {"mask": Packed(d.integers(0, 70, 71, 150))},
    ),
    case(
        "packed causal", "packed", "causal", B=1,
        extra=lambda d: {"mask": Packed(d.integers(0, 6, 7, 19)) & Causal()},
    ),
    case(
        "packed cross", "packed", "causal", "cross", "empty rows", B=1, T=19, S=23,
        extra=lambda d: {"mask": Packed(d.integers(0, 6, 11, 17), d.integers(0, 4, 4, 23)) & Causal()},
    ),
    case("softcap", "softcap", extra=lambda d: {"softcap": 1.5}),
    case("softcap and causal", "softcap", "causal", extra=lambda d: {"softcap": 1.5, "mask": Causal()}),
    case(
        "softcap, cached keys", "softcap", "scale", "causal", "cross", "gqa", T=5, S=23, H=6, G=2,
        extra=lambda d: {"softcap": 1.5, "scale": 0.3, "mask": Causal()},
    ),
    case("softcap and bias", "softcap", "bias", T=7, extra=lambda d: {"softcap": 1.5, "bias": d.normal(4, 7, 7)}),
    case("softcap and sink", "softcap", "sink", T=7, extra=lambda d: {"softcap": 1.5, "sink": 3 * d.normal(4)}),
    case("bias", "bias", extra=lambda d: {"bias": d.normal(2, 4, 19, 19)}),
    case("bias per head", "bias", extra=lambda d: {"bias": d.normal(4, 19, 19)}),
    case(
        "bias of all rows, cached keys", "bias", "causal", "cross", T=7, S=23,
        extra=lambda d: {"bias": d.normal(1, 4, 7, 23), "mask": Causal()},
    ),
    case("bias of all heads, hiding", "bias", extra=lambda d: {"bias": _hiding(d, 2, 1, 19, 19)}),
    case("bias of all, scale", "bias", "scale", extra=lambda d: {"bias": d.normal(19, 19), "scale": 0.3}),
    case("bias per key", "bias", "causal", extra=lambda d: {"bias": d.normal(2, 1, 1, 19), "mask": Causal()}),
    case("sink", "sink", extra=lambda d: {"sink": d.normal(4)}),
    case("sink and causal", "sink", "causal", T=7, extra=lambda d: {"sink": d.normal(4), "mask": Causal()}),
    case(
        "sink, cached keys", "sink", "scale", "cross", T=7, S=23,
        extra=lambda d: {"sink": d.normal(4), "scale": 0.3},
    ),
    case(
        "sink, empty rows", "sink", "padding", "empty rows",
        extra=lambda d: {"sink": d.normal(4), "mask": Lengths(d.integers(0, 11))},
    ),
    case(
        "everything", "bias", "softcap", "sink", "scale", "causal", "window", "padding", "gqa", "value width", H=6, G=2,
        V=8,
        extra=lambda d: {
            "scale": 0.3, "bias": d.normal(6, 19, 19), "softcap": 2.0, "sink": d.normal(6),
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


def _hiding(d: Draw, *shape: int) -> Tensor:
    """A bias that masks, as programs without another way do: -inf, but for each query's own key, so no row is empty."""
    seen = d.boolean(*shape) | torch.eye(shape[-1], dtype=torch.bool, device=d.device)
    return d.normal(*shape).masked_fill(~seen, -torch.inf)


def _without_row(allowed: Tensor) -> Dense:
    allowed[..., 2, :] = False
    return Dense(allowed)


PAIR = 16  # numbers the reference holds per (query, key) pair of a head; 4 per channel of a token


def drawn(name: str, room: int) -> Case:
    """A random problem (Spec.drawn). In some, one query sees many keys; half of these have little else."""
    chance = Chance(name, room)
    apart = Chance(f"{name}, decoding", room)  # of its own: all other problems stay what they were
    decoding, bare = apart.yes(0.15), apart.yes()
    T = 1 if decoding else chance.tokens(math.isqrt(room // PAIR))
    S = T if not decoding and chance.yes() else chance.tokens(room // (PAIR * T))
    K, V = chance.widths(room // (PAIR * (T + S)))
    each = PAIR * T * S + 4 * (T + S) * (K + V)
    G, H = chance.heads(min(32, room // each))
    B = chance.rows(room // (each * H))
    sizes: dict[str, Any] = {"B": B, "T": T, "S": S, "H": H, "G": G, "K": K, "V": V}
    hides, options = _drawn_masks(chance, B, T, S, H), _drawn_options(chance, B, T, S, H)
    if decoding and bare:  # what shows alone
        hides, options = dict([*hides.items()][:1]), {}
    mask = partial(_mask, hides, chance.between(0, 2**31))
    said = {
        "gqa": G < H, "cross": T != S, "value width": V != K, "padded queries": len(hides.get("padding", ())) > 1,
        "empty rows": _empty_rows(mask(torch.device("cpu")), T, S),
    }  # fmt: skip
    features = {*hides, *options, *(feature for feature, present in said.items() if present)} - {"int64"}
    chosen = sizes | {word: x for word, x in (hides | options).items() if word != "sink"}

    def extra(draw: Draw) -> dict[str, Any]:
        made = {word: draw.normal(*x) if isinstance(x, tuple) else x for word, x in options.items()}
        return made | ({"mask": mask(draw.device)} if hides else {})

    made = case(told(name, chosen, sorted(features - chosen.keys())), *features, **sizes, extra=extra)
    return varied(chance, made, (word for word in ("bias", "sink") if word in options), turned=("q", "k", "v"))


def _empty_rows(mask: Mask | None, T: int, S: int) -> bool:
    """Whether some query sees no key."""
    return mask is not None and not bool(mask.materialize(T, S).any(-1).all())


def _drawn_options(chance: Chance, B: int, T: int, S: int, H: int) -> dict[str, Any]:
    """Shapes of bias and sink, and values of the other options.

    A bias equal for all keys cancels in the softmax unless there is a sink: its gradient would be rounding noise.
    """
    sink = H >= FEW and chance.yes(0.3)
    shapes: list[tuple[int, ...]] = [(B, H, T, S), (H, T, S), (B, 1, T, S), (T, S), (B, 1, 1, S), (1, H, 1, S), (S,)]
    shapes += [(B, H, T, 1), (H, 1, 1)] * sink
    options: dict[str, Any] = {
        "bias": chance.one(*(shape for shape in shapes if math.prod(shape) >= FEW), None),
        "softcap": chance.one(1.5, 5.0, 30.0, 50.0),
        "scale": chance.one(0.3, 0.02, 0.0, -0.2),
    }
    found = {word: x for word, x in options.items() if x is not None and chance.yes(0.2)}
    return found | ({"sink": (H,)} if sink else {})


def _drawn_masks(chance: Chance, B: int, T: int, S: int, H: int) -> dict[str, Any]:
    """The parameters of random masks, by feature."""
    found: dict[str, Any] = {}
    ends = [(T, S)] * B
    if B == 1 and chance.yes(0.4):
        # Tokens after the last document see nothing.
        last = [tokens if chance.yes(0.8) else chance.between(0, tokens) for tokens in (T, S)]
        of_q, of_k = chance.cuts(last[0]), chance.cuts(last[1])
        found["packed"] = (of_q,) if T == S and chance.yes() else (of_q, of_k)
        pairs = zip(pairwise(of_q), pairwise(found["packed"][-1]), strict=True)
        ends = [(t - t0, s - s0) for (t0, t), (s0, s) in pairs]
    if chance.yes(0.25):
        keys, queries = tuple(chance.between(0, s) for _, s in ends), tuple(chance.between(0, t) for t, _ in ends)
        found["padding"] = (keys, queries) if chance.yes(0.3) else (keys,)
    left, right = (chance.one(0, chance.size(S), 2 * S) for _ in range(2))
    low, high = (tuple(sign * chance.between(0, S) for _ in ends) for sign in (-1, 1))
    dense = ((B, H, T, S), (B, 1, T, S), (1, 1, T, S), (B, 1, 1, S), (1, H, T, S), (B, H, T, 1), (T, S), (S,))
    more: dict[str, tuple[float, Any]] = {
        "causal": (0.4, True),
        "causal top-left": (0.15, True),
        "window": (0.3, chance.one((left, right), (left, None), (None, right))),
        "band": (0.1, chance.one((low, high), (low[0], high[0]), (None, high), (low[0], None))),
        "dense": (0.15, chance.one(*dense)),
    }
    found |= {word: x for word, (share, x) in more.items() if chance.yes(share)}
    return found | ({"int64": True} if found.keys() & {"packed", "padding"} and chance.yes() else {})


def _mask(hides: Mapping[str, Any], seed: int, device: torch.device) -> Mask | None:
    """The mask from `_drawn_masks`' parameters, with a seed of its own, so independent of the rest of the problem."""
    draw, kind = Draw(torch.float32, device, seed), torch.int64 if "int64" in hides else torch.int32

    def whole(x: int | tuple[int, ...] | None) -> Any:
        return torch.tensor(x, dtype=kind, device=device) if isinstance(x, tuple) else x

    kinds: dict[str, Callable[[Any], Mask]] = {
        "packed": lambda x: Packed(*map(whole, x)),
        "padding": lambda x: Lengths(*map(whole, x)),
        "causal": lambda _: Causal(),
        "causal top-left": lambda _: Causal("top-left"),
        "window": lambda x: Window(*x),
        "band": lambda x: Band(*map(whole, x)),
        "dense": lambda x: Dense(draw.boolean(*x)),
    }
    made = [kinds[word](x) for word, x in hides.items() if word in kinds]
    return reduce(and_, made) if made else None
