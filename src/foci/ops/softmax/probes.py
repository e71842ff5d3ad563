"""The probes of softmax attention: a case cut along its keys, unpacked, row by row, or with another future."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Bad, Case, Future, Inputs, Part, Probes
from foci.ops.masks import All, Band, Causal, Dense, Lengths, Mask, Packed, existing, lower
from foci.ops.softmax.cases import case

ALL = slice(None)


def sized(length: int) -> Case:
    return case(f"T={length}", B=1, T=length, H=2)


def _part(name: str, features: frozenset[str], inputs: dict[str, Any], place: tuple[slice, ...] = ()) -> Part:
    return Part(Case(name, features, lambda dtype, device, seed: inputs), place)


def _take(inputs: Inputs, rows: slice = ALL, queries: slice = ALL, keys: slice = ALL) -> dict[str, Any]:
    """The inputs restricted to some rows, queries and keys, without the mask."""
    taken = {name: value for name, value in inputs.items() if name != "mask"}
    taken["q"] = inputs["q"][rows, queries]
    taken |= {name: inputs[name][rows, keys] for name in ("k", "v")}
    if inputs.get("bias") is not None:
        taken["bias"] = _take4(inputs["bias"], rows, queries, keys)
    return taken


def _take4(tensor: Tensor, rows: slice, queries: slice, keys: slice) -> Tensor:
    tensor = tensor[(None,) * (4 - tensor.dim())]
    wanted = (rows, ALL, queries, keys)
    return tensor[tuple(ALL if size == 1 else part for size, part in zip(tensor.shape, wanted, strict=True))]


def cut(case: Case, inputs: Inputs) -> tuple[Part, ...]:
    """The first third of the keys and the rest, with the mask as a Dense one; the sink goes with the first part."""
    T, S = inputs["q"].shape[1], inputs["k"].shape[1]
    if S < 2 or inputs.get("dropout"):
        return ()
    parts = []
    for name, keys in (("first keys", slice(0, S // 3 or 1)), ("last keys", slice(S // 3 or 1, S))):
        taken = _take(inputs, keys=keys)
        if inputs.get("mask") is not None:
            allowed = inputs["mask"].materialize(T, S)
            taken["mask"] = Dense(_take4(allowed, ALL, ALL, keys))
        if keys.start:
            taken.pop("sink", None)
        parts.append(_part(f"{case.name}, {name}", case.features, taken))
    return tuple(parts)


def documents(case: Case, inputs: Inputs) -> tuple[Part, ...]:
    """Every packed document with a query, alone."""
    kinds = _kinds(inputs.get("mask"))
    packed = next((mask for mask in kinds if isinstance(mask, Packed)), None)
    if packed is None or any(isinstance(mask, Lengths | Dense) for mask in kinds) or inputs.get("dropout"):
        return ()
    q_offsets = packed.q_offsets.tolist()
    kv_offsets = q_offsets if packed.kv_offsets is None else packed.kv_offsets.tolist()
    found = []
    for n, (t0, t1, s0, s1) in enumerate(
        zip(q_offsets[:-1], q_offsets[1:], kv_offsets[:-1], kv_offsets[1:], strict=True)
    ):
        if t1 > t0:
            rest = _join([_row(mask, slice(n, n + 1)) for mask in kinds if mask is not packed])
            taken = _take(inputs, queries=slice(t0, t1), keys=slice(s0, s1)) | {"mask": rest}
            found.append(_part(f"{case.name}, document {n}", case.features, taken, (ALL, slice(t0, t1))))
    return tuple(found)


def rows(case: Case, inputs: Inputs) -> tuple[Part, ...]:
    """Every row of the batch, alone."""
    B = inputs["q"].shape[0]
    if B < 2 or inputs.get("dropout"):
        return ()
    found = []
    for b in range(B):
        row = slice(b, b + 1)
        taken = _take(inputs, rows=row) | {"mask": _join([_row(m, row) for m in _kinds(inputs.get("mask"))])}
        found.append(_part(f"{case.name}, row {b}", case.features, taken, (row,)))
    return tuple(found)


def _row(mask: Mask, row: slice) -> Mask:
    """The mask of one row, or document."""
    if isinstance(mask, Lengths):
        return Lengths(mask.kv_lengths[row], None if mask.q_lengths is None else mask.q_lengths[row])
    if isinstance(mask, Dense):
        return Dense(_take4(mask.allowed, row, ALL, ALL))
    if isinstance(mask, Band):
        return Band(*(x[row] if isinstance(x, Tensor) and x.numel() > 1 else x for x in (mask.low, mask.high)))
    return mask


def future(case: Case, inputs: Inputs) -> Future | None:
    """Replace queries from the middle on, and the keys that no earlier query sees, by large random values."""
    if not any(isinstance(mask, Causal) for mask in _kinds(inputs.get("mask"))) or inputs.get("dropout"):
        return None
    B, T, S = inputs["q"].shape[0], inputs["q"].shape[1], inputs["k"].shape[1]
    t = T // 2
    seen = inputs["mask"].materialize(T, S).expand(B, -1, T, S)[:, :, :t].any(dim=(1, 2)).to(inputs["q"].device)
    generator = torch.Generator().manual_seed(1)
    changed = dict(inputs)
    late = torch.arange(T, device=seen.device) >= t
    for name, flags in (("q", late.expand(B, T)), ("k", ~seen), ("v", ~seen)):
        noise = 30 * torch.randn(inputs[name].shape, generator=generator, device="cpu").to(inputs[name])
        changed[name] = torch.where(flags[..., None, None], noise, inputs[name])
    return Future(changed, (ALL, slice(0, t)))


def poison(case: Case, inputs: Inputs) -> dict[str, Any] | None:
    """NaN in the queries, keys and values that Packed or Lengths exclude; None when they exclude nothing."""
    T, S = inputs["q"].shape[1], inputs["k"].shape[1]
    real = existing(lower(inputs.get("mask")), T, S, inputs["q"].device)
    if real is None or all(bool(flags.all()) for flags in real):
        return None
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    queries, keys = (~flags[..., None, None] for flags in real)
    return dict(inputs) | {
        "q": q.masked_fill(queries, torch.nan), "k": k.masked_fill(keys, torch.nan), "v": v.masked_fill(keys, torch.nan)
    }  # fmt: skip


def _kinds(mask: Mask | None) -> list[Mask]:
    return [] if mask is None else list(mask.parts) if isinstance(mask, All) else [mask]


def _another(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.bfloat16 else torch.bfloat16


def _join(masks: list[Mask]) -> Mask | None:
    return reduce(and_, masks) if masks else None


def _wider(inputs: dict[str, Any]) -> dict[str, Any]:
    q, k = inputs["q"], inputs["k"]
    return inputs | {"mask": Dense(q.new_ones(1, 1, q.shape[1], k.shape[1] + 1, dtype=torch.bool))}


def _offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


BAD = (
    Bad("k of another width", "k", lambda i: i | {"k": i["k"][..., :-1]}),
    Bad("heads that do not divide", "k", lambda i: i | {n: i[n][:, :, :3] for n in ("k", "v")}),
    Bad("a mask of the wrong size", "dense", _wider),
    Bad("v with fewer tokens", "v", lambda i: i | {"v": i["v"][:, :-1]}, strict=True),  # torch's CPU kernel answers
    Bad("q of rank 3", "q", lambda i: i | {"q": i["q"][0]}, strict=True),
    Bad("q of another dtype", "q", lambda i: i | {"q": i["q"].to(_another(i["q"].dtype))}, strict=True),
    Bad("NaN scale", "scale", lambda i: i | {"scale": float("nan")}, strict=True),
    Bad("negative softcap", "softcap", lambda i: i | {"softcap": -30.0}, strict=True),
    Bad("dropout of 1", "dropout", lambda i: i | {"dropout": 1.0}, strict=True),
    Bad("offsets that decrease", "q_offsets", lambda i: _one_row(i) | {"mask": Packed(_offsets(0, 9, 4))}, strict=True),
    Bad("offsets that overrun", "q_offsets", lambda i: _one_row(i) | {"mask": Packed(_offsets(0, 999))}, strict=True),
    Bad("lengths that overrun", "kv_lengths", lambda i: i | {"mask": Lengths(_offsets(999, 1))}, strict=True),
    Bad("sink of the wrong size", "sink", lambda i: i | {"sink": i["q"].new_ones(99)}, strict=True),
    Bad("bias of the wrong size", "bias", lambda i: i | {"bias": i["q"].new_ones(99)}, strict=True),
)


def _one_row(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {name: inputs[name][:1] for name in ("q", "k", "v")}


PROBES = Probes(sized, cut, documents, rows, future, poison, BAD)
