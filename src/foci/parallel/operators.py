"""Operator: what a wrapper knows of a public function: how to bind a call, its dimension letters, how to run it."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from foci.core.errors import Unsupported
from foci.core.select import choose
from foci.core.shapes import Signature, letters_of
from foci.core.spec import Backend, Output, Outputs, Spec
from foci.ops.arguments import INTEGERS
from foci.ops.decay import api as decay
from foci.ops.delta import api as delta
from foci.ops.masks import All, Dense, Mask
from foci.ops.scan import api as scan
from foci.ops.selective_scan import api as selective_scan
from foci.ops.softmax import api as softmax

TOKENS = ("T", "S")
# What is computed in pieces is no op, and torch's flop counter misses it (core/flops.py).
COUNT_INSTEAD = "the same call of one process, which may be on the meta device, and divide by the ranks"


class Letters(NamedTuple):
    """The dimensions of one tensor, by letter; `broadcast`: each may also be 1, and leading ones absent."""

    names: tuple[str, ...]
    broadcast: bool = False

    def aligned(self, tensor: Tensor) -> tuple[str, ...]:
        """The letters of the dimensions that this tensor has."""
        return self.names[len(self.names) - tensor.dim() :]

    def token(self, tensor: Tensor) -> int | None:
        """Which dimension is cut over ranks: T, or S where there is no T (a bias holds the whole of S)."""
        letter = next((letter for letter in TOKENS if letter in self.names), None)
        names = self.aligned(tensor)
        return names.index(letter) if letter in names else None


class Bound(NamedTuple):
    """One call of a wrapper: this rank's tensors with a mask of the whole sequence, and the backend's name.

    `call`: q, k, v and other tensors with tokens are this rank's shards; offsets, lengths and the columns of bias and
    dense are those of the whole. A decay per head is [H, 1] there, without a token dimension.
    """

    call: Any
    backend: str | None = None


@runtime_checkable
class Runs(Protocol):
    """An operator, or a wrapper of one: both run a bound call and return all outputs of its Spec."""

    @property
    def operator(self) -> Operator: ...

    def run(self, call: Any, backend: str | None) -> Outputs: ...


@dataclass(frozen=True)
class Operator:
    """A public function of foci as wrappers see it.

    `execute(backend, call)` runs a Call; `results` are the letters of every output of the Spec, and `count` how many of
    them the function returns.
    """

    name: str
    function: Callable[..., Any]
    spec: Spec
    execute: Callable[[Backend, Any], Outputs]
    results: tuple[Letters, ...]
    count: int

    def __repr__(self) -> str:
        return f"foci.{self.name}"

    @property
    def operator(self) -> Operator:
        return self

    @functools.cached_property
    def signature(self) -> Signature:
        assert self.spec.call is not None
        return Signature(self.spec.call, self.spec.function)

    @functools.cached_property
    def letters(self) -> dict[str, Letters]:
        """The Letters of every argument of the Call whose annotation has a shape."""
        exact = {name: Letters(names) for name, names in self.signature.exact}
        return exact | {name: Letters(names, True) for name, names in self.signature.broadcast}

    def bind(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> Bound:
        """The Call from a rank's arguments; raises what the function itself would raise.

        The columns of `bias` and `Dense` are the whole sequence's: the wrapper, which knows its length, checks them.
        """
        refuse_transforms(self.name)
        try:
            given = inspect.signature(self.function).bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from error
        given.apply_defaults()  # the function's defaults: those of `Spec.bind` differ (it returns all outputs)
        arguments = dict(given.arguments)
        backend = arguments.pop("backend", None)
        wide = _with_local_columns(arguments)
        assert self.spec.bind is not None
        call = self.spec.bind(**arguments)
        decay = arguments.get("log_decay")
        if isinstance(decay, Tensor) and decay.dim() == 1:
            wide["log_decay"] = decay[:, None]
        return Bound(call._replace(**wide), backend)

    def run(self, call: Any, backend: str | None) -> Outputs:
        """All outputs of the Spec, in one process."""
        for name, letters in self.letters.items():
            tensor = getattr(call, name)
            if letters.broadcast and isinstance(tensor, Tensor) and tensor.dim() < len(letters.names):
                call = call._replace(**{name: tensor[(None,) * (len(letters.names) - tensor.dim())]})
        return self.execute(choose(self.spec, call, backend), call)

    def declared(self, call: Any) -> tuple[Output, ...]:
        """Shapes and dtypes of all outputs of the Spec."""
        assert self.spec.outputs is not None
        return self.spec.outputs(call)

    def wanted(self, bound: Bound) -> int:
        """How many outputs the caller asked for: the others need not be communicated."""
        return 1 if self.spec.recurrent and not bound.call.return_state else self.count

    def returns(self, outputs: Outputs, bound: Bound) -> Any:
        """What the function returns, from the outputs of its Spec, or from those that were wanted."""
        if self.spec.recurrent:
            return outputs[0], outputs[1] if bound.call.return_state else None
        return outputs[0] if self.count == 1 else outputs

    def facts(self, call: Any) -> dict[str, object]:
        """What must be equal on all ranks: dtypes, sizes of dimensions not sharded, numbers, requires_grad.

        Token sizes are left out, as they may differ (`tokens`), and the seed, as rank 0's is used. Offsets and lengths
        are included as tensors: their values must be the same.
        """
        found: dict[str, object] = {"operator": self.name}
        for name, value in zip(type(call)._fields, call, strict=True):
            if not isinstance(value, Tensor) or value.dtype in INTEGERS:
                found |= {} if name == "seed" else {name: value}
                continue
            letters = self.letters.get(name)
            cut = None if letters is None else letters.token(value)
            sizes = ", ".join("*" if dim == cut else str(size) for dim, size in enumerate(value.shape))
            found[name] = (
                f"{str(value.dtype).removeprefix('torch.')} [{sizes}]" + " with gradient" * value.requires_grad
            )
        return found

    def tokens(self, call: Any) -> dict[str, int]:
        """This rank's size of the token dimension, by argument."""
        found = {}
        for name, letters in self.letters.items():
            tensor = getattr(call, name)
            if isinstance(tensor, Tensor) and (cut := letters.token(tensor)) is not None:
                found[name] = tensor.shape[cut]
        return found


def refuse_transforms(name: str) -> None:
    """Raise under torch.func (grad, vmap, jvp ...): functorch's wrapped tensors cannot be communicated."""
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        raise Unsupported(
            f"{name}: a wrapper over ranks cannot run under torch.func or forward mode",
            ["its exchanges are not seen by transforms"],
            "torch.autograd, as in loss.backward(), goes through it",
        )


def operator_of(op: Any) -> Runs | None:
    """The Operator of a public function of foci, or the wrapper itself; None for any other callable."""
    if isinstance(op, Runs):
        return op
    return next((each for each in OPERATORS if each.function is op), None)


def _with_local_columns(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Replace bias and Dense in `arguments` by stand-ins with this rank's number of columns; return the real ones.

    Binding checks the sizes of one process, but here the columns are the whole sequence's.
    """
    found: dict[str, Tensor] = {}
    k, bias, mask = (arguments.get(name) for name in ("k", "bias", "mask"))
    if not isinstance(k, Tensor) or k.dim() != 4:
        return found
    if isinstance(bias, Tensor):
        found["bias"], arguments["bias"] = bias, _columns(bias, k.shape[1])
    if isinstance(mask, Mask):
        parts = mask.parts if isinstance(mask, All) else (mask,)
        dense = next((part.allowed for part in parts if isinstance(part, Dense)), None)
        if dense is not None:
            found["dense"] = dense
            arguments["mask"] = All(
                tuple(Dense(_columns(p.allowed, k.shape[1])) if isinstance(p, Dense) else p for p in parts)
            )
    return found


def _columns(tensor: Tensor, count: int) -> Tensor:
    if tensor.dim() == 0 or tensor.shape[-1] == 1:
        return tensor
    return tensor.new_empty(()).expand(*tensor.shape[:-1], count)


def _operator(module: Any, function: Callable[..., Any], full: Callable[..., Any] | None = None) -> Operator:
    """From an api module; `full` is the function that returns every output, the only one whose annotation says all."""
    hints = typing.get_args(typing.get_type_hints(full or function)["return"])
    results = []
    for hint in hints:
        letters = letters_of(hint)
        assert letters is not None
        results.append(Letters(tuple(letters)))
    count = len(hints) if full is None else 1
    return Operator(function.__name__, function, module.SPEC, module._run, tuple(results), count)


OPERATORS = (
    _operator(softmax, softmax.attention, softmax.attention_with_lse),
    _operator(softmax, softmax.attention_with_lse),
    _operator(decay, decay.linear_attention),
    _operator(delta, delta.delta_rule),
    _operator(scan, scan.scan),
    _operator(selective_scan, selective_scan.selective_scan),
)
