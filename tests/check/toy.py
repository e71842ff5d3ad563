"""A tiny operator with nothing of attention: out[t] = sum over s <= t of exp(gate_s) x_s, and the log of that sum."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.core.spec import Bad, Candidate, Case, Future, Inputs, Mistake, Part, Probes, Spec

ALL = slice(None)


def reference(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, T, D], gate [B, T] -> out [B, T, D], total [B]."""
    kind = torch.promote_types(x.dtype, torch.float32)
    out = (gate.to(kind).exp()[..., None] * x.to(kind)).cumsum(1)
    return out.to(x.dtype), gate.to(kind).logsumexp(1)


def plain(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return (gate.exp()[..., None] * x).cumsum(1), gate.logsumexp(1)


def case(name: str, *features: str, B: int = 2, T: int = 9, gate: float = 1.0) -> Case:
    def make(dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        draw = {"x": torch.randn(B, T, 3, generator=generator), "gate": gate * torch.randn(B, T, generator=generator)}
        return {name: value.to(dtype).to(device) for name, value in draw.items()}

    return Case(name, frozenset(features), make)


def part(inputs: Inputs, rows: slice, tokens: slice, place: tuple[slice, ...] = ()) -> Part:
    taken = {name: value[rows, tokens] for name, value in inputs.items()}
    return Part(
        Case("part", frozenset(), lambda dtype, device, seed: {n: v.to(dtype) for n, v in taken.items()}), place
    )


def future(_: Case, inputs: Inputs) -> Future:
    changed = {name: value.clone() for name, value in inputs.items()}
    for value in changed.values():
        value[:, 4:] = 7.0
    return Future(changed, (ALL, slice(0, 4)))


def shorter(inputs: dict) -> dict:
    return inputs | {"gate": inputs["gate"][:, :-1]}


HALVED = "out is halved, and nobody would notice"
SPEC = Spec(
    name="toy",
    equation="out[t] = sum over s <= t of exp(gate_s) x_s",
    paper="none",
    reference=reference,
    plain=plain,
    output_names=("out", "total"),
    logs=("total",),
    differentiable=("x", "gate"),
    cases=(case("plain"), case("one row", B=1), case("extreme", "extreme", gate=20.0)),
    mistakes=(Mistake("halved", HALVED, lambda i: (reference(**i)[0] / 2, reference(**i)[1])),),
    probes=Probes(
        sized=lambda n: case(f"T={n}", T=n),
        rows=lambda _, i: tuple(part(i, slice(b, b + 1), ALL, (slice(b, b + 1),)) for b in range(i["x"].shape[0])),
        bad=(Bad("a short gate", "gate", shorter),),
    ),
)


def candidate(function=reference, **options) -> Candidate:
    """A function of the reference's arguments as a candidate."""
    return Candidate(getattr(function, "__name__", "toy"), lambda inputs: function(**inputs), **options)
