"""The mask half of the pair that transformers finds under the name `foci`: masks as structure, not as T x S tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from math import inf
from operator import and_
from typing import Any

import torch
from torch import Tensor

from foci.ops.masks import Causal, Dense, Lengths, Mask, Window


@dataclass(frozen=True, eq=False)
class ModelMask:
    """What a model carries from its mask creation to its attention: a foci mask and the [B, 1, T, S] it stands for.

    `ndim`, `shape` and `contiguous` are what transformers asks of a prepared mask. `mask=None` hides nothing, and says
    so: a bare None would mean causal to an attention function.

    Models may compute with their mask (add a bias to it, index it, read its dtype): to them it is the tensor that
    transformers' `eager` would have made, 0 where a query may look and the least of `dtype` elsewhere.
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
        """The mask as eager adds it to the logits, [B, 1, T, S], made when asked for."""
        added = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if self.mask is None:
            return added
        seen = self.mask.materialize(*self.shape[2:]).to(added.device)
        return added.masked_fill(~seen, torch.finfo(self.dtype).min)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle ask of any object
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return function(*_as_tensors(args), **{name: _as_tensors(given) for name, given in (kwargs or {}).items()})


def _as_tensors(given: Any) -> Any:
    if isinstance(given, (tuple, list)):
        return type(given)(_as_tensors(part) for part in given)
    return given.tensor if isinstance(given, ModelMask) else given


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: ModelMask, *others: Any) -> Any:
        return getattr(self.tensor, name)(*_as_tensors(others))

    return operate


for _name in ("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "invert", "and", "or", "eq", "ne", "lt", "gt"):
    setattr(ModelMask, f"__{_name}__", _operator(f"__{_name}__"))  # Python looks operators up in the class alone


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
    """The function transformers calls once per forward and kind of layer; its signature is theirs.

    `mask_function(b, h, i, j)` says whether query i + q_offset may see key j + kv_offset, and `attention_mask` [B, S']
    which keys are real. Causal, bidirectional and sliding-window functions become foci masks. Any other (packed
    documents, chunks, blocks, a user's own) is evaluated by transformers itself, so that it is right whatever it is.
    While torch.compile traces, that is all of them but those that transformers' `sdpa` skips: values may not be read.
    """
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

    if isinstance(attention_mask, ModelMask):
        return attention_mask
    mask_function = mask_function or causal_mask_function
    shape = (batch_size, 1, q_length, kv_length)
    made = partial(
        ModelMask, shape=shape, dtype=options.get("dtype", torch.float32), device=options.get("device", "cpu")
    )
    place = (batch_size, q_length, kv_length, q_offset, kv_offset)
    evaluated = partial(sdpa_mask, *place, mask_function=mask_function, attention_mask=attention_mask)
    if torch.compiler.is_compiling():
        # Their shortcut for an empty static cache is a None that means top-left; ours only ever means T == S.
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


def _structure(
    mask_function: Callable[..., Tensor],
    q_offset: int | Tensor,
    kv_offset: int,
    shape: tuple[int, int, int, int],
    device: torch.device | str | None,
) -> tuple[Mask | None] | None:
    """The foci mask of one of transformers' own mask functions, in a tuple as it may be None; None when not known."""
    from transformers.masking_utils import bidirectional_mask_function

    B, _, T, S = shape
    if mask_function is bidirectional_mask_function:
        return (None,)
    reach = _causal_reach(mask_function)
    if reach is None:
        return None
    # The last key is the last query's own: a lone query sees the past by that alone, and a wide window hides nothing.
    parts: list[Mask] = [Causal()] if T > 1 else []
    if reach < S:
        parts.append(Window(int(reach) - 1, 0))
    ahead = q_offset - kv_offset  # key position of the first query
    if isinstance(ahead, Tensor):
        if kv_offset != 0:
            return None
        # A static cache counts in a tensor; what it has not yet written is no key.
        parts.append(Lengths((ahead + T).to(device).reshape(1).expand(B)))
    elif ahead != S - T:
        if not 0 <= ahead < S - T:
            return None
        parts.append(Lengths(torch.full((B,), ahead + T, device=device)))
    return (reduce(and_, parts) if parts else None,)


def _causal_reach(mask_function: Callable[..., Tensor]) -> float | None:
    """How many keys back, its own included, a causal mask function lets a query see; None for any other function.

    Recognised by the very functions transformers makes its masks from.
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
    """Whether both closures come from one factory: then they share their code object."""
    return getattr(function, "__code__", None) is sibling.__code__
