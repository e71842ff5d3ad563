"""What a benchmark asks before it times: is the result within the error budget, on a part that float64 can afford?"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from foci.check.compare import HALF, compare, difference, extent
from foci.core.shapes import letters_of
from foci.core.spec import Inputs, Spec
from foci.ops import FUNCTIONS

_CHANNELS = 64  # of an elementwise recurrence are enough to be sure of the others
_HEADS = {"out": "BTHV", "lse": "BTH", "state": "NHKV"}
_ELEMENTWISE = {"scan": {"out": "BTD", "state": "ND"}, "selective_scan": {"out": "BTD", "state": "NDK"}}


class Truth:
    """Judge of `bench.sweep`: one row's last key head and the heads that read it (or some channels), in float64.

    Heads, channels and rows do not know of each other, so a part is exact. Gradients of what is shared between parts
    (a decay per head over rows, B and C over channels) are compared where the part is the whole.
    """

    def __init__(self, spec: Spec) -> None:
        assert spec.adapt is not None
        self.spec = spec
        self.exact = spec.adapt(partial(FUNCTIONS[spec.name], backend="chunked"), name="truth")
        self.outputs = _ELEMENTWISE.get(spec.name, _HEADS)
        self.known: tuple[Inputs, dict[str, Tensor], dict[str, Tensor]] | None = None

    def __call__(self, inputs: Inputs, found: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> float | None:
        cut = _Cut(self.spec, inputs)
        dtype = inputs[self.spec.differentiable[0]].dtype
        part = cut.inputs()
        directions = {name: cut.take(w, self.outputs[name]) for name, w in weights.items()}
        # Candidates that are differentiated through the same outputs share a truth.
        if self.known is None or self.known[0] is not inputs or set(self.known[1]) != set(directions):
            self.known = inputs, directions, self._differentiated(part, directions, torch.float64)
        truth = self.known[2]
        rough = self._plain(part, directions, dtype) if dtype in HALF and not self.spec.recurrent else truth
        siblings = max(extent(x) for name, x in truth.items() if name.startswith("d"))
        shares = []
        for name, got in found.items():
            letters = self.outputs.get(name) or cut.letters[name[1:]]
            if name not in truth or not cut.whole(letters):
                continue
            error = compare(
                cut.take(got, letters), truth[name], difference(rough[name], truth[name]), dtype,
                log=name in self.spec.logs, recurrent=self.spec.recurrent,
                siblings=siblings if name.startswith("d") else 0.0,
            )  # fmt: skip
            shares.append(error.share)
        return max(shares, default=None)

    def _differentiated(
        self, part: dict[str, Any], directions: dict[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        exact = {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in part.items()}
        return _gradients(self.spec, self.exact.call, exact, directions)

    def _plain(self, part: dict[str, Any], directions: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        return _gradients(self.spec, lambda given: self.spec.plain(**given), part, directions)


def _gradients(spec: Spec, call: Any, part: dict[str, Any], directions: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {
        name: x.detach().requires_grad_() for name, x in part.items() if name in spec.differentiable and x is not None
    }
    outputs = dict(zip(spec.output_names, call({**part, **leaves}), strict=True))
    used = [outputs[name] for name in directions]
    weights = [directions[name].to(x.dtype) for name, x in zip(directions, used, strict=True)]
    gradients = torch.autograd.grad(used, list(leaves.values()), weights)
    return {name: x.detach() for name, x in outputs.items()} | {
        f"d{name}": x for name, x in zip(leaves, gradients, strict=True)
    }


class _Cut:
    """Which part of every dimension is computed again, by letter."""

    def __init__(self, spec: Spec, inputs: Inputs) -> None:
        assert spec.bind is not None
        hints = get_type_hints(spec.bind)
        self.given = inputs
        self.letters = {name: _letters(hints[name], x) for name, x in inputs.items() if isinstance(x, Tensor)}
        self.letters.pop("offsets", None)
        sizes = {
            letter: size
            for name, letters in self.letters.items()
            for letter, size in zip(letters, inputs[name].shape, strict=True)
            if letter != "_"
        }
        self.parts = {"B": slice(0, 1)}
        if "offsets" not in inputs:
            self.parts["N"] = slice(0, 1)
        if "G" in sizes:
            heads = sizes["H"] // sizes["G"]
            self.parts |= {"G": slice(sizes["G"] - 1, None), "H": slice(sizes["H"] - heads, None)}
        if sizes.get("D", 0) > _CHANNELS:
            self.parts["D"] = slice(sizes["D"] - _CHANNELS, None)
        self.narrowed = {
            letter
            for letter, part in self.parts.items()
            if len(range(*part.indices(sizes.get(letter, 1)))) < sizes.get(letter, 1)
        }

    def inputs(self) -> dict[str, Any]:
        return {n: self.take(x, self.letters[n]) if n in self.letters else x for n, x in self.given.items()}

    def take(self, x: Tensor, letters: str) -> Tensor:
        return x[tuple(self.parts.get(letter, slice(None)) for letter in letters)]

    def whole(self, letters: str) -> bool:
        """Whether a gradient of this shape is one of the part alone: it has every dimension that was narrowed."""
        same = {"H": "G", "B": "N"}
        return all(letter in letters or same.get(letter, letter) in letters for letter in self.narrowed - {"G", "N"})


def _letters(hint: Any, x: Tensor) -> str:
    """The letters of the shape that a tensor has, of those its annotation allows; a size of 1 that broadcasts is _."""
    options = [letters_of(each) for each in (hint, *get_args(hint))]
    for letters in options:
        if letters and len(letters) == x.dim():
            return "".join(
                "_" if l.startswith("#") and n == 1 else l[-1] for l, n in zip(letters, x.shape, strict=True)
            )
    raise ValueError(f"no annotation of {hint} has {x.dim()} dimensions")
