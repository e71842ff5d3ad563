"""Joint attention of diffusion transformers: image tokens split over ranks, text replicated or split, one softmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from foci.core.errors import ShapeError, Unsupported, a_type
from foci.ops.masks import All, Dense, Lengths, Mask
from foci.parallel.balance import Order, rejoined, shard
from foci.parallel.exchange import checked, declining, gather_counts
from foci.parallel.group import Group
from foci.parallel.operators import Operator, Runs, operator_of
from foci.parallel.shard_positions import groups_of, order_of, pieces_by_rank, positions_of

Where = Literal["front", "back"]
Text = Literal["replicated", "split"]


def joint(op: Callable[..., Any], *, where: Where = "front", text: Text = "replicated") -> Joint:
    """Attention over image and text tokens together, round `ring`, `ulysses` or `usp` of `attention`.

        [text_out, out] = attention([text_q, q], [text_k, k], [text_v, v])          where="front"; "back": image first

    op: a wrapper of `attention` or `attention_with_lse` (or either itself, in one process). The result is called as
    (q, k, v, text_q, text_k, text_v, *, mask=None, softcap=None, sink=None, scale=None) and returns (out, text_out),
    each a pair (out, lse) for `attention_with_lse`.

    q, k, v: this rank's image tokens, in the wrapper's order. text="replicated": every rank has all text tokens, gets
    all of text_out, and the whole gradient of the sum of all ranks' losses. text="split": this rank's text tokens, in
    the wrapper's order too.
    mask: one that hides keys from all queries alike, by their positions in the joint sequence as `where` orders it:
    Lengths (padding at its end), Dense with one row [B or 1, H or 1, 1, S], or both.

    Each rank computes its image tokens and its shard of the text, so that no text token is computed twice: the wrapper
    sees one sequence of such pairs, in plain order, whatever its own order is (without a causal mask all orders are
    equally balanced). Raises ShapeError, ValueError or Unsupported naming the argument.
    Papers: Esser et al. 2024 (arXiv 2403.03206); Fang et al. 2024 (2411.01738).
    """
    wrapped = operator_of(op)
    if wrapped is None or wrapped.operator.spec.name != "softmax":
        raise TypeError(f"joint: op must be attention, attention_with_lse or a wrapper of one, got {op!r}")
    for name, value, words in (("where", where, get_args(Where)), ("text", text, get_args(Text))):
        if value not in words:
            raise ValueError(f"joint: {name} must be one of {', '.join(map(repr, words))}, got {value!r}")
    return Joint(wrapped, where, text)


@dataclass(frozen=True)
class Joint:
    """The callable that `joint` returns."""

    wrapped: Runs
    where: Where
    text: Text

    @torch.compiler.disable
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        text_q: Tensor,
        text_k: Tensor,
        text_v: Tensor,
        *,
        mask: Mask | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Any, Any]:
        """(out, text_out); see `joint`."""
        groups, order = groups_of(self.wrapped), order_of(self.wrapped)
        checked(groups, "joint", _check, (q, k, v), (text_q, text_k, text_v))
        texts: Sequence[Tensor] = (text_q, text_k, text_v)
        if self.text == "replicated":
            texts = _shared(texts, groups)
        front = self.where == "front"
        whole = [torch.cat([t, x] if front else [x, t], 1) for x, t in zip((q, k, v), texts, strict=True)]
        if mask is not None:
            told = gather_counts("joint", groups, [texts[1].shape[1], k.shape[1]], _facts(mask))
            columns = self._columns(groups, order, told)
            mask = Dense(_allowed(mask, columns.numel()).index_select(-1, columns.to(q.device)))
        attend = self.wrapped.operator.function if isinstance(self.wrapped, Operator) else _plain(self.wrapped)
        result = attend(*whole, mask=mask, softcap=softcap, sink=sink, scale=scale)
        counts = [texts[0].shape[1], q.shape[1]]
        found = []
        for each in result if isinstance(result, tuple) else (result,):
            parts = each.split(counts if front else counts[::-1], 1)
            out, text_out = (parts[1], parts[0]) if front else parts
            if self.text == "replicated":
                facts = {"tokens of text": text_q.shape[1]}  # with different ones the shards are not of one text
                for place, group in enumerate(groups):
                    text_out = declining(groups[place + 1 :], rejoined, text_out, group, "plain", 1, facts)
            found.append((out, text_out))
        if not isinstance(result, tuple):
            return found[0]
        return tuple(out for out, _ in found), tuple(text_out for _, text_out in found)

    def _columns(self, groups: Sequence[Group], order: Order, counts: Sequence[Sequence[int]]) -> Tensor:
        """The position in the joint sequence of every key, in the order in which the ranks hold them."""
        text_counts, image_counts = ([row[place] for row in counts] for place in (0, 1))
        texts = pieces_by_rank(groups, "plain" if self.text == "replicated" else order, text_counts)
        images = pieces_by_rank(groups, order, image_counts)
        front = self.where == "front"
        before_text, before_image = (0, sum(text_counts)) if front else (sum(image_counts), 0)
        found = []
        for text, image in zip(texts, images, strict=True):
            mine = [positions_of(text) + before_text, positions_of(image) + before_image]
            found += mine if front else mine[::-1]
        return torch.cat(found)


def _check(image: Sequence[Tensor], text: Sequence[Tensor]) -> None:
    for name, x, t in zip("qkv", image, text, strict=True):
        if not isinstance(x, Tensor) or not isinstance(t, Tensor):
            wrong = name if not isinstance(x, Tensor) else f"text_{name}"
            raise TypeError(f"joint: {wrong} must be a tensor")
        if t.dim() != 4 or x.dim() != 4 or t.shape[0] != x.shape[0] or t.shape[2:] != x.shape[2:]:
            raise ShapeError(
                f"joint: text_{name} has shape {list(t.shape)}; expected {name}'s {list(x.shape)} except for its tokens"
            )
        if t.dtype != x.dtype or t.device != x.device:
            raise ValueError(
                f"joint: text_{name} is {t.dtype} on {t.device}; expected {x.dtype} on {x.device}, as {name} is"
            )
    for name, like, each in (("k", image[1], image[2]), ("text_k", text[1], text[2])):
        if like.shape[1] != each.shape[1]:
            raise ShapeError(f"joint: {name} has {like.shape[1]} tokens, its values have {each.shape[1]}")


def _plain(wrapped: Any) -> Any:
    """The same wrapper with order "plain": ranks hold contiguous runs of any lengths."""
    if isinstance(wrapped, Operator):
        return wrapped
    changes: dict[str, Any] = {"inner": _plain(wrapped.inner)}
    if hasattr(wrapped, "order"):
        changes["order"] = "plain"
    return dataclasses.replace(wrapped, **changes)


def _shared(texts: Sequence[Tensor], groups: Sequence[Group]) -> tuple[Tensor, ...]:
    """This rank's shard of replicated text; q, k and v concatenated, so that gradients are one message."""
    flat = torch.cat([x.flatten(2) for x in texts], 2)
    for group in reversed(groups):
        flat = shard(flat, group, "plain")
    parts = flat.split([x.shape[2] * x.shape[3] for x in texts], 2)
    return tuple(part.unflatten(2, x.shape[2:]) for part, x in zip(parts, texts, strict=True))


def _facts(mask: Mask) -> dict[str, object]:
    """Facts about a mask that must be equal on all ranks: lengths by value, Dense by shape."""
    parts = mask.parts if isinstance(mask, All) else (mask,)
    return {
        f"mask {place}, {type(part).__name__}": part.kv_lengths if isinstance(part, Lengths) else _shape(part)
        for place, part in enumerate(parts)
    }


def _shape(mask: Mask) -> str:
    return str(list(mask.allowed.shape)) if isinstance(mask, Dense) else "no tensor"


def _allowed(mask: Mask, S: int) -> Tensor:
    """The keys that a mask of the joint sequence allows, [B or 1, H or 1, 1, S]; raises if it cannot."""
    found: Tensor | None = None
    for part in mask.parts if isinstance(mask, All) else (mask,):
        if isinstance(part, Lengths) and part.q_lengths is None:
            lengths = part.kv_lengths
            if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= S:
                raise ValueError(f"joint: kv_lengths is {lengths.tolist()}; expected 0 to {S}, the keys there are")
            each = (torch.arange(S, device=lengths.device) < lengths[:, None])[:, None, None]
        elif isinstance(part, Dense) and (part.allowed.dim() < 2 or part.allowed.shape[-2] == 1):
            each = part.allowed
            if each.dim() == 0 or each.shape[-1] not in (1, S):
                raise ShapeError(f"joint: mask has shape {list(each.shape)}; expected S={S} columns, image and text")
            each = each.expand(*each.shape[:-1], S)
        else:
            raise Unsupported(
                f"joint: mask has {a_type(part)} that may hide a key from one query and not from another",
                ["queries and keys of a rank are no run of the joint sequence"],
                "Lengths without q_lengths and Dense with one row hide keys from all queries",
            )
        found = each if found is None else found & each
    assert found is not None
    return found
