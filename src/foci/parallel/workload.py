"""The workload to plan for: the sizes of one operator's call and of the model around it, as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foci.ops.arguments import DTYPES, number, whole
from foci.ops.masks import Causal, Mask, Window, lower
from foci.ops.pairs import pairs
from foci.parallel.operators import OPERATORS, Operator

NAMES = {each.name: each for each in OPERATORS if each.name != "attention_with_lse"}


@dataclass(frozen=True)
class Rest:
    """The model around the operator: its cost beside the attention itself.

    `layers`: how often a step calls the operator. `flops`: floating point operations of one step for one token of one
    sequence outside the operator, all layers together; twice the weights a token meets is the usual count. `weights`:
    bytes every rank holds whatever the split. `kept`: bytes one token keeps for the backward, or as activations, beside
    the operator's own tensors. `steps`: steps of a picture, or 1. `guidance`: every step computes two branches
    (classifier-free guidance), which two halves of the ranks may share. `seconds`: of a run, what no split shortens.
    """

    layers: int = 1
    flops: float = 0.0
    weights: int = 0
    kept: int = 0
    steps: int = 1
    guidance: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "steps"):
            whole("Rest", name, getattr(self, name))
        for name in ("flops", "weights", "kept", "seconds"):
            number("Rest", name, getattr(self, name), "finite number that is not negative", least=0)


@dataclass(frozen=True)
class Shape:
    """One call of an operator over the whole sequence, before any split.

    T tokens of H heads of K; S keys (T), G key heads (H; in the recurrences the query and key heads) of values V (K).
    For the scans H is the number of channels D, and K the states of a channel. `window`: a causal token sees this many
    keys before itself at most. `backward`: a step is forward and backward.
    """

    T: int
    H: int
    K: int
    B: int = 1
    S: int | None = None
    G: int | None = None
    V: int | None = None
    operator: str = "attention"
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window: int | None = None
    backward: bool = False
    rest: Rest = Rest()

    def __post_init__(self) -> None:
        if self.operator not in NAMES:
            names = ", ".join(map(repr, NAMES))
            raise ValueError(f"Shape: operator must be one of {names}, got {self.operator!r}")
        for name, other in (("S", self.T), ("G", self.H), ("V", self.K)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, other)
        for name in ("T", "H", "K", "B", "S", "G", "V"):
            whole("Shape", name, getattr(self, name))
        if self.dtype not in DTYPES:
            raise ValueError(f"Shape: dtype is {self.dtype!r}; expected float64, float32, bfloat16 or float16")
        if not isinstance(self.rest, Rest):
            raise TypeError(f"Shape: rest must be a Rest, got {self.rest!r:.200}")
        if self.H % self.heads:
            raise ValueError(f"Shape: H must be a multiple of G, got H={self.H}, G={self.G}")
        if self.window is not None:
            whole("Shape", "window", self.window, 0)
            if not self.causal:
                raise ValueError(f"Shape: window needs causal=True, got {self.window}")
        if self.operator != "attention" and (self.keys != self.T or self.causal or self.window is not None):
            raise ValueError(f"Shape: {self.operator} takes neither S nor causal nor window; it is causal by itself")

    @property
    def keys(self) -> int:
        assert self.S is not None
        return self.S

    @property
    def heads(self) -> int:
        assert self.G is not None
        return self.G

    @property
    def values(self) -> int:
        assert self.V is not None
        return self.V

    @property
    def recurrent(self) -> bool:
        return self.operator != "attention"

    @cached_property
    def live(self) -> float:
        """The fraction of the T x S pairs that the mask allows."""
        return pairs(lower(self.mask), 1, self.T, self.keys) / (self.T * self.keys)

    @property
    def mask(self) -> Mask | None:
        if not self.causal:
            return None
        return Causal() if self.window is None else Causal() & Window(self.window, 0)

    @property
    def function(self) -> Operator:
        """The Operator of the wrappers."""
        return NAMES[self.operator]

    def call(self, device: str | torch.device = "meta") -> Any:
        """A bound call of this shape; on the meta device it holds no data."""
        tensors, keywords = self.inputs(device)
        return self.function.bind(tuple(tensors), keywords).call

    def inputs(self, device: str | torch.device) -> tuple[list[Tensor], dict[str, Any]]:
        """Tensors of this shape with random numbers in them, and the keyword arguments beside them."""
        return _inputs(self, torch.device(device))

    @cached_property
    def flops(self) -> float:
        """Floating point operations of one forward over the whole; masked pairs are not counted."""
        spec = self.function.spec
        assert spec.work is not None and spec.bind is not None
        tensors, keywords = self.inputs("meta")
        return spec.work(spec.bind(*tensors, **keywords)).flops

    def __str__(self) -> str:
        if self.operator in ("scan", "selective_scan"):
            sizes = f"B{self.B} T{self.T} D{self.H}" + (f" K{self.K}" if self.operator == "selective_scan" else "")
        else:
            sizes = f"B{self.B} T{self.T}" + (f" S{self.S}" if self.S != self.T else "") + f" H{self.H}"
            sizes += (f" G{self.G}" if self.G != self.H else "") + f" K{self.K}"
            sizes += f" V{self.V}" if self.V != self.K else ""
        words = [f"{self.operator} {sizes} {str(self.dtype).removeprefix('torch.')}"]
        words += ["causal"] if self.causal else []
        words += [f"window {self.window}"] if self.window is not None else []
        words.append("forward and backward" if self.backward else "forward")
        words += [f"{self.rest.layers} layers"] if self.rest.layers > 1 else []
        words += [f"{self.rest.steps} steps"] if self.rest.steps > 1 else []
        words += ["two branches"] if self.rest.guidance else []
        return ", ".join(words)

    def only(self, *, T: int | None = None, H: int | None = None, B: int | None = None) -> Shape:
        """The same with other sizes; what was left to its default follows, what was given stays."""
        names = {"S": "T", "G": "H", "V": "K"}
        given: dict[str, Any] = {name: None for name, of in names.items() if getattr(self, name) == getattr(self, of)}
        sizes = {"T": self.T if T is None else T, "H": self.H if H is None else H, "B": self.B if B is None else B}
        return replace(self, **(given | sizes))


def _inputs(shape: Shape, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    B, T, S, H, G, K, V = shape.B, shape.T, shape.keys, shape.H, shape.heads, shape.K, shape.values

    def some(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=torch.float32).to(shape.dtype)

    def decay(*sizes: int) -> Tensor:
        return -some(*sizes).abs()

    if shape.operator == "attention":
        return [some(B, T, H, K), some(B, S, G, K), some(B, S, G, V)], {"mask": shape.mask}
    if shape.operator == "linear_attention":
        return [some(B, T, G, K), some(B, T, G, K), some(B, T, H, V)], {"log_decay": decay(B, T, H)}
    if shape.operator == "delta_rule":
        keys = torch.nn.functional.normalize(some(B, T, G, K), dim=-1)
        return [some(B, T, G, K), keys, some(B, T, H, V), some(B, T, H).sigmoid()], {"log_decay": decay(B, T, H)}
    if shape.operator == "scan":
        return [some(B, T, H), decay(B, T, H)], {}
    rates = -torch.rand(H, K, device=device) - 0.1
    return [some(B, T, H), some(B, T, H).abs(), rates.to(shape.dtype), some(B, T, K), some(B, T, K)], {}
