"""Softmax attention with a sequence sharded over ranks: which dimensions are split, and cases for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Case, Spec
from foci.ops.draw import Draw
from foci.ops.masks import All, Causal, Dense, Lengths, Packed, Window
from foci.ops.softmax.across_mistakes import Places
from foci.ops.softmax.cases import case
from foci.ops.softmax.conventions import WORDS
from foci.ops.softmax.probes import PROBES
from foci.ops.softmax.spec import SPEC

ROWS = (*WORDS["mask"], *WORDS["bias"])
EACH = 8  # tokens per rank


def split(layout: str) -> Callable[[str, Tensor], int | None]:
    """The dimension along which an argument is split: tokens of q, k, v, rows (queries) of mask and bias.

    Columns of mask and bias are not split, and are in sequence order; arguments without tokens are replicated.
    """

    def dimension(name: str, tensor: Tensor) -> int | None:
        if name in ROWS:
            return tensor.dim() - 2 if tensor.dim() >= 2 and tensor.shape[-2] > 1 else None
        return (2 if layout == "bhtd" else 1) if tensor.dim() == 4 else None

    return dimension


def share(value: Any, places: Callable[[int], Places]) -> list[Any] | None:
    """Each rank's part of a foci Mask: the rows of a Dense; other masks are those of the whole sequence."""
    parts = value.parts if isinstance(value, All) else (value,)
    dense = next((part.allowed for part in parts if isinstance(part, Dense)), None)
    if dense is None or dense.dim() < 2 or dense.shape[-2] == 1:
        return None
    rest = [part for part in parts if not isinstance(part, Dense)]
    rows = [Dense(dense.index_select(-2, part)) for part in places(dense.shape[-2])]
    return [reduce(and_, (*rest, row)) for row in rows]


def joined(layout: str) -> Callable[[int, Tensor, int], int | None]:
    """The dimension along which shards are joined: tokens of out, and of lse [B,T,H] or [B,H,T]."""

    def dimension(number: int, shard: Tensor, tokens: int) -> int | None:
        if number == 0 or shard.dim() != 3:
            return 2 if layout == "bhtd" else 1
        second = shard.shape[2] == tokens and (layout == "bhtd" or shard.shape[1] != tokens)
        return 2 if second else 1

    return dimension


def spec_for(size: int) -> Spec:
    """The softmax Spec with cases for `size` ranks: some that they share equally, some not."""
    return replace(SPEC, cases=cases(size), large=(), probes=replace(PROBES, sized=lambda n: _sized(n, size), bad=()))


def shown(size: int) -> Callable[[float], Case]:
    """A case whose output is the probabilities: uniform ones (q = 0), with one-hot values."""
    T = EACH * size

    def values(draw: Draw) -> dict[str, Any]:
        return {
            "q": 0 * draw.normal(1, T, size, 8),
            "v": torch.eye(T, device="cpu").view(1, T, 1, T).expand(1, T, size, T),
        }

    def make(chance: float) -> Case:
        return case(
            "probabilities", "dropout", B=1, T=T, H=size, K=8, extra=lambda d: values(d) | {"dropout": chance}
        )  # fmt: skip

    return make


def _sized(length: int, size: int) -> Case:
    """A case of `length` tokens with one head per rank."""
    uneven = ("uneven lengths",) if length % (2 * size) else ()
    return case(f"T={length}", *uneven, B=1, T=length, H=size, K=8)


def cases(size: int) -> tuple[Case, ...]:
    """Every feature of attention, at sizes at which each rank has EACH tokens and a share of the heads."""
    T, H = EACH * size, 2 * size if size < 4 else size

    def make(name: str, *features: str, extra: Any = None, **sizes: Any) -> Case:
        more = {} if extra is None else {"extra": extra}
        return case(name, *features, **{"B": 2, "T": T, "H": H, "K": 8, **sizes}, **more)

    def ends(*shares: float) -> list[int]:
        return [0, *(round(share * T) for share in shares)]

    return (
        make("plain"),
        make("scale", "scale", extra=lambda d: {"scale": 0.7}),
        make("cross", "cross", S=2 * T),
        make("more queries than keys", "cross", S=T // 2),
        make("grouped heads", "gqa", H=2 * H, G=H),
        make("one key head", "gqa", "few key heads", G=1),
        make("value width", "value width", V=12),
        make("heads the ranks do not share", "uneven heads", H=size + 1),
        make("one token more", "uneven lengths", T=T + 1),
        make("one token less", "uneven lengths", T=2 * T - 1),
        make("fewer tokens than ranks", "uneven lengths", T=max(size - 1, 1), S=T),
        make("causal", "causal", extra=lambda d: {"mask": Causal()}),
        make("causal, one token more", "causal", "uneven lengths", T=T + 1, extra=lambda d: {"mask": Causal()}),
        make("causal, cached keys", "causal", "cross", S=2 * T, extra=lambda d: {"mask": Causal()}),
        make("causal, grouped heads", "causal", "gqa", H=2 * H, G=H, extra=lambda d: {"mask": Causal()}),
        make("window", "window", extra=lambda d: {"mask": Window(6, 3)}),
        make("causal window", "causal", "window", extra=lambda d: {"mask": Causal() & Window(6, None)}),
        make("padding", "padding", extra=lambda d: {"mask": Lengths(d.integers(T, T - EACH // 2))}),
        make("padding, empty ranks", "padding", extra=lambda d: {"mask": Lengths(d.integers(EACH + 3, T - 3))}),
        make(
            "padding and causal", "padding", "causal",
            extra=lambda d: {"mask": Lengths(d.integers(T, T - EACH - 3)) & Causal()},
        ),
        make("keys hidden", "dense", extra=lambda d: {"mask": Dense(d.boolean(2, 1, 1, T))}),
        make("dense", "dense", extra=lambda d: {"mask": Dense(d.boolean(2, H, T, T))}),
        make("dense and causal", "dense", "causal", extra=lambda d: {"mask": Dense(d.boolean(2, 1, 1, T)) & Causal()}),
        make("packed", "packed", B=1, extra=lambda d: {"mask": Packed(d.integers(*ends(0.2, 0.2, 0.6, 1.0)))}),
        make(
            "packed causal", "packed", "causal", B=1,
            extra=lambda d: {"mask": Packed(d.integers(*ends(0.45, 0.5, 1.0))) & Causal()},
        ),
        make("bias", "bias", extra=lambda d: {"bias": d.normal(2, H, T, T)}),
        make("bias per key", "bias", "causal", extra=lambda d: {"bias": d.normal(2, 1, 1, T), "mask": Causal()}),
        make("softcap", "softcap", "causal", extra=lambda d: {"softcap": 1.5, "mask": Causal()}),
        make("sink", "sink", extra=lambda d: {"sink": d.normal(H)}),
        make("sink and causal", "sink", "causal", extra=lambda d: {"sink": d.normal(H), "mask": Causal()}),
        make(
            "everything", "bias", "softcap", "sink", "causal", "window", "padding", "gqa", "value width", H=2 * H, G=H,
            V=4, extra=lambda d: {
                "bias": d.normal(2 * H, T, T), "softcap": 2.0, "sink": d.normal(2 * H),
                "mask": reduce(lambda a, b: a & b, (Causal(), Window(9, None), Lengths(d.integers(T, T - EACH - 1)))),
            },
        ),
        make("dropout", "dropout", extra=lambda d: {"dropout": 0.3}),
    )  # fmt: skip
