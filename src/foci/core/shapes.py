"""bind "B T H K" to real tensors, or name the tensor, the letter and the two sizes."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from foci.core.errors import ShapeError

Sizes = dict[str, int]
_STRIDED = torch.strided
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


class Signature:
    """The letters of every tensor argument of one operator, read once from the jaxtyping annotations of its call.

    A plain letter names a size that must agree everywhere it stands. `#T` marks a size that broadcasts: it is T or 1,
    and leading `#` letters may be absent altogether, by the ordinary broadcasting rule.
    """

    def __init__(self, call: Callable[..., Any], name: str) -> None:
        self.name = name
        self.exact: list[tuple[str, tuple[str, ...]]] = []
        self.broadcast: list[tuple[str, tuple[str, ...]]] = []
        self.optional: set[str] = set()
        for argument, hint in typing.get_type_hints(call).items():
            letters = letters_of(hint) if argument != "return" else None
            if letters is None:
                continue
            kind = self.broadcast if letters[0].startswith("#") else self.exact
            kind.append((argument, tuple(letter.removeprefix("#") for letter in letters)))
            if type(None) in typing.get_args(hint):
                self.optional.add(argument)

    def bind(self, tensors: Mapping[str, Tensor | None]) -> Sizes:
        """Sizes by letter, absent tensors passed over; raises ShapeError naming tensor, letter and both sizes.

        What is no tensor raises TypeError.
        """
        sizes: Sizes = {}
        for argument, letters in self.exact:
            tensor = tensors[argument]
            if tensor is None and argument in self.optional:
                continue
            shape = dense(self.name, argument, tensor).shape
            if len(shape) != len(letters):
                raise ShapeError(
                    f"{self.name}: {argument} has {len(shape)} dimensions, shape {list(shape)}; "
                    f"expected {len(letters)}: [{', '.join(letters)}]"
                )
            for letter, size in zip(letters, shape, strict=False):  # as long as each other, see above; strict is slow
                if sizes.setdefault(letter, size) != size:
                    raise ShapeError(self._disagreement(argument, letters, letter, tensors, sizes))
        for argument, letters in self.broadcast:
            tensor = tensors[argument]
            if tensor is None and argument in self.optional:
                continue
            self._check_broadcast(argument, letters, dense(self.name, argument, tensor), sizes)
        return sizes

    def _check_broadcast(self, argument: str, letters: tuple[str, ...], tensor: Tensor, sizes: Sizes) -> None:
        if tensor.dim() > len(letters):
            raise ShapeError(
                f"{self.name}: {argument} has {tensor.dim()} dimensions, shape {list(tensor.shape)}; "
                f"expected at most {len(letters)}, broadcastable to [{', '.join(letters)}]"
            )
        aligned = letters[len(letters) - tensor.dim() :]
        for letter, size in zip(aligned, tensor.shape, strict=True):
            if size != 1 and size != sizes[letter]:
                raise ShapeError(
                    f"{self.name}: {argument} has shape {list(tensor.shape)}, so {letter} would be {size}; "
                    f"expected 1 or {letter}={sizes[letter]} (broadcastable to [{', '.join(letters)}])"
                )

    def _disagreement(
        self, argument: str, letters: tuple[str, ...], letter: str, tensors: Mapping[str, Tensor | None], sizes: Sizes
    ) -> str:
        tensor = tensors[argument]
        assert tensor is not None
        first = next(name for name, used in self.exact if letter in used and tensors[name] is not None)
        return (
            f"{self.name}: {argument} has shape {list(tensor.shape)} for [{', '.join(letters)}], so {letter} would be "
            f"{tensor.shape[letters.index(letter)]}; {first} says {letter}={sizes[letter]}"
        )


def dense(name: str, argument: str, value: object) -> Tensor:
    """The value if it is a dense (strided, not nested) tensor; else raises TypeError or ValueError."""
    if not isinstance(value, Tensor) or value.layout is not _STRIDED or value.is_nested or _of_ranks(value):
        raise _refusal(name, argument, value)
    return value


def _refusal(name: str, argument: str, value: object) -> Exception:
    if not isinstance(value, Tensor):
        return TypeError(f"{name}: {argument} must be a tensor, got {value!r:.200}")
    if _of_ranks(value):
        shared: Any = value
        return ValueError(
            f"{name}: {argument} is a DTensor of {shared.placements}; expected this rank's own tensor: "
            f"{argument}.to_local() of whole rows and heads, or that and foci.parallel where ranks share a sequence"
        )
    kind = "a nested one" if value.is_nested else f"one of layout {value.layout}"
    return ValueError(f"{name}: {argument} must be a dense tensor, got {kind}")


def _of_ranks(tensor: Tensor) -> bool:
    """Whether it is a DTensor: what is asked of its values, strides and memory is answered for no rank's part."""
    if type(tensor) in _PLAIN:
        return False
    made = sys.modules.get("torch.distributed.tensor")  # without it there is none
    return made is not None and isinstance(tensor, made.DTensor)


def letters_of(hint: Any) -> list[str] | None:
    """The dimension letters of `Float[Tensor, "B T"]` or of `Float[Tensor, "B T"] | None`; None for anything else."""
    for option in (hint, *typing.get_args(hint)):
        letters = getattr(option, "dim_str", None)
        if letters is not None:
            return str(letters).split()
    return None
