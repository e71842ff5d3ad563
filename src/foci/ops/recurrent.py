"""Test problems of the recurrent operators, and the probes by which laws split and change them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from foci.core.spec import Bad, Case, Future, Inputs, Part, Probes, Slices, accumulator
from foci.ops.chance import FEW, LONGEST, Chance, told, varied
from foci.ops.draw import Draw, OnDevice

ALL = slice(None)
# B, T, H, D of Flash Linear Attention's benchmarks, which linear attention and the delta rule are timed on.
SIX = (
    (1, 8192, 96, 128),
    (2, 16384, 16, 128),
    (4, 2048, 16, 128),
    (4, 4096, 64, 128),
    (8, 1024, 8, 64),
    (8, 2048, 32, 256),
)
UNEVEN = (0, 300, 300, 301, 400, 500, 600, 700, 1030)  # offsets of eight documents, one of them empty, one of one token

Gates = Callable[..., Tensor]


def closed(draw: Draw, *shape: int) -> Tensor:
    """Every gate at -20: over a chunk their sum is far below what exp can hold, in either direction."""
    return 0 * draw.gates(*shape) - 20


@dataclass(frozen=True)
class Problem:
    """The sizes of a case, and which optional arguments it has; an operator adds its own in `more`.

    G and V default to H and K. decay: "", "head" [H], "token" [B,T,H] or "channel" [B,T,H,K], drawn by `gates`;
    `narrow`: in the dtype of q. `offsets` pack documents into one row. `fused`: q, k and v are views of one projection.
    """

    name: str
    B: int = 2
    T: int = 19
    H: int = 4
    G: int = 0
    K: int = 16
    V: int = 0
    decay: str = ""
    gates: Gates = Draw.gates
    narrow: bool = False
    state: bool = False
    offsets: tuple[int, ...] = ()
    scale: float | None = None
    fused: bool = False

    @classmethod
    def drawn(cls, chance: Chance, name: str) -> Self:
        """A random problem over the fields all operators share. The reference keeps one state per token."""
        T = chance.tokens(LONGEST)
        K, V = chance.widths(math.isqrt(chance.room // T))
        G, H = chance.heads(min(64, chance.room // (T * K * V)))
        B = chance.rows(chance.room // (T * K * V * H))
        T = max(T, 16 // (B * H))  # a sum of few numbers may cancel
        offsets = chance.packed(B, T)
        decay = chance.one("", "head" if H >= FEW else "", "token", "token", "channel", "channel")
        strong = decay in ("token", "channel") and chance.yes(0.3)
        return cls(
            name, B, T, H, 0 if G == H else G, K, 0 if V == K else V, decay,
            chance.one(Draw.extremes, closed) if strong else Draw.gates, state=chance.yes(), offsets=offsets,
            scale=chance.one(None, None, None, 0.3, 1.0, -0.7), fused=chance.yes(0.2),
        )  # fmt: skip

    def varied(self, chance: Chance, *own: str) -> Case:
        """The case with varied dtypes and strides, named by its choices; `own`: tensors that an operator adds.

        Gates per head keep their dtype: their gradient is a sum over all tokens, which may overflow float16.
        """
        gates = ("log_decay",) * (self.decay in ("token", "channel"))
        turned = () if self.fused else ("q", "k", "v", *gates)
        return varied(chance, self.told, own, (*gates, *("state",) * self.state), turned)

    @property
    def told(self) -> Case:
        """The case, named by its sizes and all fields that are not the default."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        usual = {field.name: field.default for field in fields(self) if field.name not in "BTHK"}
        return replace(
            self.case, name=told(chosen.pop("name"), {key: x for key, x in chosen.items() if x != usual.get(key)})
        )

    @property
    def case(self) -> Case:
        return Case(
            self.name, frozenset(self.features()), lambda dtype, device, seed: self.make(Draw(dtype, device, seed))
        )

    @property
    def shape(self) -> Case:
        """The case for benchmarks, with inputs drawn on the device."""
        return Case(
            self.name, frozenset(self.features()), lambda dtype, device, seed: self.make(OnDevice(dtype, device, seed))
        )

    def features(self) -> set[str]:
        said = {
            f"decay per {self.decay}": self.decay,
            "extreme": self.decay and self.gates is not Draw.gates,
            "gqa": self.heads != self.H,
            "value width": self.width != self.K,
            "state": self.state,
            "packed": self.offsets,
            "scale": self.scale is not None,
            "strided": self.fused,
        }
        return {feature for feature, present in said.items() if present}

    @property
    def heads(self) -> int:
        """Heads of queries and keys, G."""
        return self.G or self.H

    @property
    def width(self) -> int:
        """Channels of values, V."""
        return self.V or self.K

    @property
    def states(self) -> int:
        return len(self.offsets) - 1 if self.offsets else self.B

    def make(self, draw: Draw) -> dict[str, Any]:
        B, T, H, K = self.B, self.T, self.H, self.K
        q, k, v = draw.normal(B, T, self.heads, K), self.keys(draw), draw.normal(B, T, H, self.width)
        made: dict[str, Any] = {"q": q, "k": k, "v": v}
        if self.fused:
            parts = torch.cat([x.flatten(2) for x in (q, k, v)], dim=2).split([x[0, 0].numel() for x in (q, k, v)], 2)
            made = {name: part.view(x.shape) for (name, x), part in zip(made.items(), parts, strict=True)}
        if self.decay:
            shape = {"head": (H,), "token": (B, T, H), "channel": (B, T, H, K)}[self.decay]
            gates = self.gates(draw, *shape)
            made["log_decay"] = gates.to(draw.dtype) if self.narrow else gates
        if self.state:
            made["state"] = draw.state(self.states, H, K, self.width)
        if self.offsets:
            made["offsets"] = torch.tensor(self.offsets, dtype=torch.int64, device=draw.device)
        if self.scale is not None:
            made["scale"] = self.scale
        return made | self.more(draw)

    def keys(self, draw: Draw) -> Tensor:
        return draw.normal(self.B, self.T, self.heads, self.K)

    def more(self, draw: Draw) -> dict[str, Any]:
        return {}


def probes(sized: Callable[..., Case], bad: tuple[Bad, ...]) -> Probes:
    """The probes of an operator of q, k and v. No mask excludes anything from a recurrence, so there is no `poison`.

    `sized(length, decay=)`: decays per channel are tried first.
    """
    channel, *simpler = (partial(sized, decay=decay) for decay in ("channel", "token", ""))
    return Probes(channel, cut, documents, rows, future, None, (*BAD, *bad), transition, tuple(simpler))


def sequences(inputs: Inputs) -> list[str]:
    """The names of arguments with leading dimensions [B, T]: those with three or more, except the state."""
    return [n for n, x in inputs.items() if isinstance(x, Tensor) and x.dim() >= 3 and n != "state"]


def _take(inputs: Inputs, tokens: slice = ALL, rows: slice = ALL) -> dict[str, Any]:
    """The inputs restricted to some tokens and rows; other arguments, also state and offsets, unchanged."""
    return dict(inputs) | {name: inputs[name][rows, tokens] for name in sequences(inputs)}


def _case(name: str, case: Case, inputs: dict[str, Any]) -> Case:
    return Case(f"{case.name}, {name}", case.features, lambda dtype, device, seed: inputs)


def _tokens(inputs: Inputs) -> int:
    return int(inputs[sequences(inputs)[0]].shape[1])


def cut(case: Case, inputs: Inputs) -> tuple[Part, ...]:
    """Three parts: the first third of the tokens, one token, and the rest, each starting from the previous state.

    Every part has all documents; those outside it have no tokens there.
    """
    T = _tokens(inputs)
    if T < 3:
        return ()
    parts = []
    for start, stop in pairwise((0, T // 3, T // 3 + 1, T)):
        taken = _take(inputs, slice(start, stop))
        if inputs.get("offsets") is not None:
            taken["offsets"] = inputs["offsets"].clamp(start, stop) - start
        # If not causal, an output depends on all tokens, so only the state is compared.
        place: dict[str, Slices] = {"out": (ALL, slice(start, stop))} if inputs.get("causal", True) else {}
        if stop == T:
            place["state"] = (ALL,)
        parts.append(Part(_case(f"tokens {start} to {stop}", case, taken), place, ("state",) if start else ()))
    return tuple(parts)


def transition(inputs: Inputs) -> dict[str, Any]:
    """Inputs that write nothing, with the identity as state: the final state is the transition [N,H,K,K]."""
    k, v, offsets = inputs["k"], inputs["v"], inputs.get("offsets")
    N, K = k.shape[0] if offsets is None else len(offsets) - 1, k.shape[3]
    one = torch.eye(K, dtype=accumulator(v.dtype), device=v.device)
    return dict(inputs) | {"v": v.new_zeros(*v.shape[:3], K), "state": one.expand(N, v.shape[2], K, K).contiguous()}


def documents(case: Case, inputs: Inputs) -> tuple[Part, ...]:
    """Every packed document with a token, alone."""
    if inputs.get("offsets") is None:
        return ()
    found = []
    for n, (start, stop) in enumerate(pairwise(inputs["offsets"].tolist())):
        if stop > start:
            taken, one = _take(inputs, slice(start, stop)), slice(n, n + 1)
            del taken["offsets"]
            if "state" in taken:
                taken["state"] = taken["state"][one]
            place = {"out": (ALL, slice(start, stop)), "state": (one,)}
            found.append(Part(_case(f"document {n}", case, taken), place))
    return tuple(found)


def rows(case: Case, inputs: Inputs) -> tuple[Part, ...]:
    """Every row of the batch, alone."""
    B = inputs[sequences(inputs)[0]].shape[0]
    found = []
    for row in [slice(b, b + 1) for b in range(B if B > 1 else 0)]:
        taken = _take(inputs, rows=row)
        if "state" in taken:
            taken["state"] = taken["state"][row]
        found.append(Part(_case(f"row {row.start}", case, taken), (row,)))
    return tuple(found)


def future(case: Case, inputs: Inputs) -> Future | None:
    """Tokens from the middle on are replaced, with gates down to -inf; only earlier outputs must stay the same.

    Queries and values become large. Keys keep their norms and beta stays within 2, where the delta rule is bounded.
    """
    t = _tokens(inputs) // 2
    if t == 0 or not inputs.get("causal", True):
        return None
    draw, changed = Draw(torch.float64, torch.device("cpu"), 1), dict(inputs)
    for name in sequences(inputs):
        now = inputs[name].clone()
        late = now[:, t:]
        if name == "log_decay":
            other = draw.extremes(*late.shape)
        elif name == "beta":
            other = draw.uniform(*late.shape, most=2.0)
        elif name in ("k", "erase"):
            other = draw.unit(*late.shape).to(late.device) * late.norm(dim=-1, keepdim=True)
        else:
            other = 30 * draw.normal(*late.shape)
        now[:, t:] = other.to(late)
        changed[name] = now
    return Future(changed, {"out": (ALL, slice(0, t))})


def _offsets(*values: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inputs: _take(inputs, rows=slice(0, 1)) | {"offsets": torch.tensor(values, device="cpu")}


def _other_half(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.bfloat16 else torch.bfloat16


def _per_channel(inputs: dict[str, Any], more: int = 0) -> Tensor:
    k, v = inputs["k"], inputs["v"]
    return v.new_zeros(*v.shape[:3], k.shape[3] + more)


BAD = (
    Bad("k of another width", "k", lambda i: i | {"k": i["k"][..., :-1]}),
    Bad("heads that do not divide", "k", lambda i: i | {n: i[n][:, :, :3] for n in ("q", "k")}),
    Bad("v with fewer tokens", "v", lambda i: i | {"v": i["v"][:, :-1]}, strict=True),
    Bad("q of rank 3", "q", lambda i: i | {"q": i["q"][0]}, strict=True),
    Bad("q of another dtype", "q", lambda i: i | {"q": i["q"].to(_other_half(i["q"].dtype))}, strict=True),
    Bad("NaN scale", "scale", lambda i: i | {"scale": float("nan")}, strict=True),
    Bad("gates with heads before tokens", "log_decay", lambda i: i | {"log_decay": _per_channel(i).transpose(1, 2)}),
    Bad("gates of another width", "log_decay", lambda i: i | {"log_decay": _per_channel(i, 1)}),
    Bad("gates of rank 2", "log_decay", lambda i: i | {"log_decay": _per_channel(i)[0, 0]}, strict=True),
    Bad("gates of whole numbers", "log_decay", lambda i: i | {"log_decay": _per_channel(i).long()}, strict=True),
    Bad("state of the wrong size", "state", lambda i: i | {"state": i["v"].new_zeros(2, 4, 3, 3)}),
    Bad("state of another batch", "state", lambda i: i | {"state": i["v"].new_zeros(3, 4, 16, 16)}),
    Bad("offsets that decrease", "offsets", _offsets(0, 9, 4, 19), strict=True),
    Bad("offsets that overrun", "offsets", _offsets(0, 999), strict=True),
    Bad("offsets that leave tokens out", "offsets", _offsets(0, 7), strict=True),
    Bad("offsets that begin late", "offsets", _offsets(3, 19), strict=True),
    Bad("offsets of a batch", "offsets", lambda i: i | {"offsets": torch.tensor([0, 19], device="cpu")}, strict=True),
    Bad(
        "offsets of rank 2",
        "offsets",
        lambda i: _offsets(0, 19)(i) | {"offsets": torch.tensor([[0, 19]], device="cpu")},
        strict=True,
    ),
)
