"""Adapt other libraries' calling conventions of a recurrence over q, k and v to the operator's argument names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foci.core.spec import Aside, Ask, Candidate, Case, Inputs, Outputs, as_outputs, run_in_process
from foci.ops.recurrent import sequences

LAYOUTS = ("bthd", "bhtd")
DECAYS = {1: "decay per head", 3: "decay per token", 4: "decay per channel"}
# Known keywords for each argument. One keyword may accept several ranks of a decay: a tiny call shows which.
WORDS = {
    "decay per head": ("log_decay", "g_gamma", "g"),
    "decay per token": ("log_decay", "g"),
    "decay per channel": ("log_decay", "gk", "g", "w"),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "state": ("state", "initial_state"),
    "offsets": ("offsets", "cu_seqlens"),
}
RETURNS = ("return_state", "output_final_state")
OURS = {"log_decay", "state", "offsets", "return_state"}  # a callable with foci's keywords is `strict` (Candidate)
KINDS = {"grouped heads (H != G)": {"H": 4}, "V != K": {"V": 6}}
UNNAMED = "its signature does not name what these need"


class _Cannot(NotImplementedError):
    """A case that the signature has no keywords for."""


class Place(NamedTuple):
    """Device, dtype and head dimension of a tiny call."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    width: int = 4

    def ones(self, *sizes: int) -> Tensor:
        return torch.ones(sizes, device=self.device, dtype=self.dtype)


def places() -> Iterator[Place]:
    """The settings to try for a tiny call: the CPU, then the GPU in dtypes and widths that GPU kernels support."""
    yield Place(torch.device("cpu"))
    if not torch.cuda._is_in_bad_fork() and torch.cuda.is_available():
        here = torch.device("cuda", torch.cuda.current_device())
        yield Place(here, torch.bfloat16, 64)
        yield Place(here, torch.float32, 64)


@dataclass(frozen=True)
class Convention:
    """How one callable takes its arguments: the keyword it has for each of ours, and the layout of its tensors.

    `first`: arguments by position. `asks`: the keyword that requests the final state. `needs`: a decay that it
    requires, which gets gates of 0 if a case has none. `gives`: its outputs.
    `cannot`: kinds of problem that it refuses, and why.
    """

    function: Callable[..., Any]
    first: tuple[str, ...]
    words: Mapping[str, str]
    layout: str
    asks: str = ""
    needs: str = ""
    gives: tuple[str, ...] = ("out",)
    cannot: Mapping[str, str] = field(default_factory=dict)

    def call(self, inputs: Inputs) -> Outputs:
        """The callable's outputs for our arguments; raises _Cannot if it has no keyword for one."""
        return self.receive(self.function(*self.positions(inputs), **self.keywords(inputs)))

    def positions(self, inputs: Inputs) -> list[Tensor]:
        return [self.turned(inputs[name]) for name in self.first]

    def keywords(self, inputs: Inputs) -> dict[str, Any]:
        kwargs: dict[str, Any] = {self.asks: True} if self.asks else {}
        tensors = sequences(inputs)
        for name, value in inputs.items():
            if name in self.first or value is None:
                continue
            kind = self.decay(value) if name == "log_decay" else name
            if kind not in self.words:
                raise _Cannot(UNNAMED)
            kwargs[self.words[kind]] = self.turned(value) if name in tensors else value
        if self.needs:
            kwargs.setdefault(self.words[self.needs], self.turned(_neutral_gates(self.needs, inputs["k"], inputs["v"])))
        return kwargs

    def decay(self, gates: Tensor) -> str:
        """The kind of a decay by its rank; one of an invalid rank is passed as any, for the callable to refuse."""
        return DECAYS.get(gates.dim()) or next((kind for kind in DECAYS.values() if kind in self.words), "")

    def turned(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if self.layout == "bhtd" and tensor.dim() >= 3 else tensor

    def receive(self, result: Any) -> Outputs:
        if self.gives == ("out",) and isinstance(result, tuple | list) and len(result) == 2 and result[1] is None:
            result = result[0]
        out, *state = as_outputs(result, self.gives)
        return self.turned(out) if out.dim() == 4 else out, *state


def adapt(
    function: Callable[..., Any],
    words: Mapping[str, tuple[str, ...]],
    positions: tuple[str, ...] = ("q", "k", "v"),
    *,
    layout: str = "bthd",
    name: str = "",
    aside: Aside = run_in_process,
) -> Candidate:
    """A callable `f(q, k, v, ...)` as a Candidate: the keywords of `words` that it names are used, the others listed.

    `positions` are passed by position, except those that `words` maps to a keyword. layout: "bthd" [B, T, H, D] or
    "bhtd" [B, H, T, D] of tensors with tokens; states are [N, H, K, V] in either. The final state is requested if there
    is a keyword for it. What the signature does not show (which ranks of a decay `g` takes, grouped heads, V != K) is
    tested unless a tiny call of that kind raises, on the CPU or, if it does not run there, on the GPU. `aside` runs the
    tiny calls, maybe in a child process; one that kills its process is left for the laws to report.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"adapt: layout must be 'bthd' or 'bhtd', got {layout!r}")
    convention = _convention(function, words, positions, layout, aside)

    def refuses(case: Case) -> list[str]:
        inputs = case.make(torch.float32, torch.device("cpu"), 0)
        found = [reason for kind, reason in convention.cannot.items() if kind in _kinds(inputs)]
        try:
            convention.keywords(inputs)
        except _Cannot as reason:
            found.append(str(reason))
        return found

    unnamed = ", ".join(kind for kind in words if kind not in (*convention.words, *convention.first))
    silent = "" if "state" in convention.gives else "the final state: it gives none"
    told = (f"{unnamed}: its signature names none of them" if unnamed else "", silent)
    return Candidate(
        name or getattr(function, "__name__", type(function).__name__), convention.call, refuses,
        tuple(filter(None, told)), convention.gives, _parameters(function).keys() >= OURS,
    )  # fmt: skip


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    if isinstance(function, torch.nn.Module):
        # A module's __call__ has no named parameters, nor has a compiled module's forward.
        function = getattr(function, "_orig_mod", function).forward
    return inspect.signature(function).parameters


def _convention(
    function: Callable[..., Any],
    words: Mapping[str, tuple[str, ...]],
    positions: tuple[str, ...],
    layout: str,
    aside: Aside,
) -> Convention:
    parameters = _parameters(function)
    chosen: dict[str, str] = {}
    for kind, spellings in words.items():
        for word in spellings:
            if word in parameters:
                chosen.setdefault(kind, word)
    asks = next((word for word in RETURNS if word in parameters), "")
    first = tuple(argument for argument in positions if argument not in chosen)
    decays = [kind for kind in DECAYS.values() if kind in chosen]
    returns = (("out", "state"),) if asks else (("out",), ("out", "state"))
    variants = [
        Convention(function, first, chosen, layout, asks, needs, gives) for needs in ("", *decays) for gives in returns
    ]
    number, cannot = aside(partial(_tried, variants, (*KINDS, *decays)))
    return replace(variants[number], cannot=cannot)


def _tried(variants: list[Convention], kinds: tuple[str, ...], ask: Ask) -> tuple[int, dict[str, str]]:
    """The index of the variant with which a tiny call works, and the kinds of problem that tiny calls refuse."""
    broken = 0
    for place in places():
        for number, each in enumerate(variants):
            reason = ask(partial(_fails, each, place))
            if reason == "":
                reasons = {kind: ask(partial(_fails, each, place, kind)) for kind in kinds}
                return number, {kind: f"{kind}: {reason}" for kind, reason in reasons.items() if reason}
            if reason is None:  # the call killed its process or hung: stop trying variants
                broken = number
                break
    return broken, {}  # none works: the first law will meet the same error and report it


def _tiny(convention: Convention, place: Place, kind: str = "") -> dict[str, Any]:
    """A small problem of one of KINDS, or with one kind of decay."""
    sizes = {"H": 2, "V": 4} | KINDS.get(kind, {})
    q, v = place.ones(1, 3, 2, place.width), place.ones(1, 3, sizes["H"], sizes["V"] * place.width // 4)
    made = {"q": q, "k": q.clone(), "v": v}
    if "beta" in (*convention.first, *convention.words):
        made["beta"] = v[..., 0].clone()
    return made | ({"log_decay": _neutral_gates(kind, q, v)} if kind in DECAYS.values() else {})


def _neutral_gates(kind: str, k: Tensor, v: Tensor) -> Tensor:
    """Gates of 0 for a kind of decay."""
    B, T, H = v.shape[:3]
    return v.new_zeros({"decay per head": (H,), "decay per token": (B, T, H)}.get(kind, (B, T, H, k.shape[-1])))


def _fails(convention: Convention, place: Place, kind: str = "") -> str:
    """How the callable fails on a small problem; "" if it returns the right shape."""
    try:
        inputs = _tiny(convention, place, kind)
        out = convention.call(inputs)[0]
    except Exception as error:
        return f"it raises {type(error).__name__}"
    return "" if out.shape == inputs["v"].shape else f"it answers with the shape {list(out.shape)}"


def _kinds(inputs: Inputs) -> list[str]:
    q, v, gates = inputs["q"], inputs["v"], inputs.get("log_decay")
    if not q.dim() == v.dim() == 4:
        return []
    present = dict(zip(KINDS, (q.shape[2] != v.shape[2], q.shape[3] != v.shape[3]), strict=True))
    return [kind for kind, there in present.items() if there] + ([] if gates is None else [DECAYS.get(gates.dim(), "")])
