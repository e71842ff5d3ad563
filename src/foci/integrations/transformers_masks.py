"""The mask function that transformers finds under the name `foci`: masks as structure, not as T x S tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import inf
from operator import and_
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from foci.core.errors import Unsupported
from foci.ops.masks import All, Causal, Dense, Lengths, Mask, Window


@dataclass(frozen=True, eq=False)
class ModelMask:
    """What a model passes from mask creation to attention: a foci mask that stands for a tensor [B, 1, T, S].

    `ndim`, `shape` and `contiguous` are what transformers reads of a prepared mask. `mask=None` masks nothing; a plain
    None would mean causal to an attention function.

    Models may compute with their mask (add a bias to it, index it, read its dtype). Then it acts as the tensor that
    their own implementation would have made: with a floating-point `dtype` eager's, 0 where a query may attend and the
    lowest number elsewhere; with `torch.bool` sdpa's, True where it may attend. Added to floats it is always eager's.
    """

    mask: Mask | None
    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    ndim = 4

    def contiguous(self) -> ModelMask:
        return self

    @property
    def tensor(self) -> Tensor:
        """The mask as a tensor of its dtype, [B, 1, T, S]: made on first use and cached, except under tracing."""
        if torch.compiler.is_compiling():
            return self._as(self.dtype)
        kept: Tensor | None = vars(self).get("_kept")
        if kept is None:
            kept = self._as(self.dtype)
            if type(kept) is Tensor:  # a fake tensor is valid only in its mode
                vars(self)["_kept"] = kept
        return kept

    def refuse_changes(self) -> None:
        """Raise Unsupported if the tensor was written to, through a view: the structured mask did not change."""
        kept: Tensor | None = None if torch.compiler.is_compiling() else vars(self).get("_kept")
        if kept is not None and not kept.is_inference() and kept._version:  # inference tensors do not count writes
            _refuse("an in-place operation on a view")

    def _as(self, dtype: torch.dtype) -> Tensor:
        seen = torch.ones(self.shape, dtype=torch.bool, device=self.device)
        if self.mask is not None:
            seen = seen & self.mask.materialize(*self.shape[2:]).to(seen.device)
        if dtype == torch.bool:
            return seen
        return torch.zeros(self.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)

    def to(
        self,
        *target: Any,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> ModelMask | Tensor:
        """Like `Tensor.to`. On another device it is still a ModelMask; in another dtype the converted tensor."""
        here: Any = torch.empty(0, dtype=self.dtype, device=self.device)  # parses the arguments as torch does
        there = here.to(*_as_tensors(target), non_blocking=non_blocking, copy=copy).to(device=device, dtype=dtype)
        if there.dtype != self.dtype:
            return self.tensor.to(device=there.device, dtype=there.dtype)
        if there.device == here.device:
            return self
        mask = None if self.mask is None else _moved(self.mask, there.device)
        return replace(self, mask=mask, device=there.device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle ask of any object
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return partial(_refuse, name) if _in_place(name) else getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if args and isinstance(args[0], ModelMask) and not torch.compiler.is_compiling() and function in _CHANGES:
            _refuse(function.__name__)
        args = _added(args) if function in _SUMS else args
        return function(*_as_tensors(args), **{name: _as_tensors(given) for name, given in (kwargs or {}).items()})


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


_SUMS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)
_CHANGES = frozenset(getattr(torch, name) for name in dir(torch) if _in_place(name))


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise Unsupported(
        f"{name} cannot change a mask that foci made",
        ["the mask is kept as structure, not as a tensor: the attention would not see the change"],
        "compute a new mask and hand that to the attention, or leave this layer out by a plan",
    )


def _moved(mask: Mask, device: torch.device) -> Mask:
    if isinstance(mask, All):
        return All(tuple(_moved(part, device) for part in mask.parts))
    tensors = {name: given.to(device) for name, given in vars(mask).items() if isinstance(given, Tensor)}
    moved: Mask = replace(cast("Any", mask), **tensors)  # every mask but their base is a dataclass
    return moved


def _added(terms: tuple[Any, ...]) -> tuple[Any, ...]:
    """The terms of a sum; a boolean mask added to floats becomes eager's additive mask, not 0 and 1."""
    floats = [term.dtype for term in terms if isinstance(term, (Tensor, ModelMask)) and term.dtype.is_floating_point]
    return tuple(
        term._as(floats[0]) if floats and isinstance(term, ModelMask) and term.dtype == torch.bool else term
        for term in terms
    )


def _as_tensors(given: Any) -> Any:
    if isinstance(given, (tuple, list)):
        return type(given)(_as_tensors(part) for part in given)
    return given.tensor if isinstance(given, ModelMask) else given


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: ModelMask, *others: Any) -> Any:
        mine, *theirs = _added((self, *others)) if name in ("__add__", "__radd__") else (self, *others)
        return getattr(_as_tensors(mine), name)(*_as_tensors(theirs))

    return operate


for _name in ("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "invert", "and", "or", "eq", "ne", "lt", "gt"):
    setattr(ModelMask, f"__{_name}__", _operator(f"__{_name}__"))  # Python looks up operators on the class only


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | ModelMask | None = None,
    **options: Any,
) -> ModelMask:
    """The function that transformers calls once per forward and kind of layer, with its signature.

    `mask_function(b, h, i, j)` says whether query i + q_offset may see key j + kv_offset, and `attention_mask` [B, S']
    which keys are real. Causal, bidirectional and sliding-window functions become foci masks. Any other (packed
    documents, chunks, blocks, a user's own) is evaluated to a dense mask by transformers itself, so it is always right.
    Under torch.compile tracing values cannot be read, so all are, except those that transformers' `sdpa` skips.
    """
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

    if isinstance(attention_mask, ModelMask):
        return attention_mask
    mask_function = causal_mask_function if mask_function is None else mask_function  # torch 2.11 asks no function
    shape = (batch_size, 1, q_length, kv_length)
    made = partial(
        ModelMask, shape=shape, dtype=options.get("dtype", torch.float32), device=options.get("device", "cpu")
    )
    place = (batch_size, q_length, kv_length, q_offset, kv_offset)
    evaluated = partial(sdpa_mask, *place, mask_function=mask_function, attention_mask=attention_mask)
    if torch.compiler.is_compiling():
        # For an empty static cache transformers returns None, meaning top-left; we return None only for T == S.
        options["allow_is_causal_skip"] = options.get("allow_is_causal_skip", False) and q_length == kv_length
        if (allowed := evaluated(**options)) is not None:
            return made(Dense(allowed))
        return made(Causal() if options["allow_is_causal_skip"] else None)
    structure = _structure(mask_function, q_offset, kv_offset, shape, options.get("device"))
    if structure is None:
        options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return made(Dense(evaluated(**options)))
    mask = structure[0]
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None and not (real := padding[:, kv_offset : kv_offset + kv_length]).all():
        keys = Dense(real[:, None, None, :])
        mask = keys if mask is None else mask & keys
    return made(mask)


def make_boolean_mask(*place: Any, **options: Any) -> ModelMask:
    """`make_mask` for a model whose implementation was sdpa, which may compute with a boolean mask."""
    return make_mask(*place, **{**options, "dtype": torch.bool})


def _structure(
    mask_function: Callable[..., Tensor],
    q_offset: int | Tensor,
    kv_offset: int,
    shape: tuple[int, int, int, int],
    device: torch.device | str | None,
) -> tuple[Mask | None] | None:
    """(foci mask or None,) of one of transformers' own mask functions; None if the function is not recognised."""
    from transformers.masking_utils import bidirectional_mask_function

    B, _, T, S = shape
    if mask_function is bidirectional_mask_function:
        return (None,)
    reach = _causal_reach(mask_function)
    if reach is None:
        return None
    if reach < 1:  # a configuration without a window may say 0, and its model makes a mask of it that no layer uses
        return (Dense(torch.zeros(1, 1, 1, S, dtype=torch.bool, device=device)),)
    # The last key is at the last query's position: a single query needs no causal mask, a wide window masks nothing.
    parts: list[Mask] = [Causal()] if T > 1 else []
    if reach < S:
        parts.append(Window(int(reach) - 1, 0))
    ahead = q_offset - kv_offset  # key position of the first query
    if isinstance(ahead, Tensor):
        if kv_offset != 0:
            return None
        # A static cache has its length in a tensor; slots not written yet are no keys.
        parts.append(Lengths((ahead + T).to(device).reshape(1).expand(B)))
    elif ahead != S - T:
        if not 0 <= ahead < S - T:
            return None
        parts.append(Lengths(torch.full((B,), ahead + T, device=device)))
    return (reduce(and_, parts) if parts else None,)


def _causal_reach(mask_function: Callable[..., Tensor]) -> float | None:
    """How many keys, its own included, a query sees under a causal mask function; None for any other function.

    Recognised by identity with the functions that transformers composes masks from.
    """
    from transformers import masking_utils as theirs

    if mask_function is theirs.causal_mask_function:
        return inf
    if not _made_by(mask_function, theirs.and_masks()):
        return None
    parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    if len(parts) != 2 or parts[1] is not theirs.causal_mask_function:
        return None
    if not _made_by(parts[0], theirs.sliding_window_overlay(1)):
        return None
    window: int = inspect.getclosurevars(parts[0]).nonlocals["sliding_window"]
    return window


def _made_by(function: Callable[..., Any], sibling: Callable[..., Any]) -> bool:
    """Whether both closures come from the same factory: they share a code object."""
    return getattr(function, "__code__", None) is sibling.__code__
