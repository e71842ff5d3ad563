"""Data parallelism of a denoiser: every rank computes its rows of a call's batch and gets the whole output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foci.core.errors import Unsupported
from foci.integrations.overrides import Overrides, require_evaluating, require_sampling
from foci.integrations.undoable import Undoable
from foci.parallel.exchange import Session, all_gather
from foci.parallel.group import Group

__all__ = ["RowsHandle", "install"]

# The argument names of Diffusers' denoisers: those with one row per image, and those shared by all.
_BY_ROW = {
    "added_cond_kwargs", "added_time_ids", "attention_mask", "class_labels", "encoder_attention_mask",
    "encoder_hidden_states", "encoder_hidden_states_image", "encoder_hidden_states_mask", "guidance", "hidden_states",
    "image_embeds", "pooled_projections", "sample", "text_embeds", "time_ids", "timestep", "timestep_cond",
    "resolution", "aspect_ratio", "text_attention_mask", "encoder_hidden_states_t5", "text_embedding_mask",
    "pooled_projection",
}  # fmt: skip
_WHOLE = {"freqs_cis", "image_rotary_emb", "img_ids", "img_shapes", "rope_interpolation_scale", "txt_ids"}


@dataclass
class RowsHandle(Undoable):
    """The handle of `install`, and the number of calls split since."""

    split: Split = field(repr=False)
    _overrides: Overrides = field(repr=False)

    def facts(self) -> dict[str, Any]:
        """Figures for a report."""
        return {"ranks": self.split.group.size, "calls": self.split.calls}

    def restore(self) -> None:
        """Restore the model's original object."""
        self._overrides.restore()


def install(model: nn.Module, group: Any, *, by_row: Sequence[str] = (), whole: Sequence[str] = ()) -> RowsHandle:
    """Split every call of a denoiser by batch rows over the ranks of `group`: data parallelism of one pipeline.

    All ranks make the same call, with the same whole tensors, and get the same whole output. Of B rows rank r computes
    B // size, the first B % size ranks one more; a rank without rows computes one that is not used. A denoiser's rows
    are independent, so the output equals one process's; the pipeline's noise, schedule and guidance are unchanged. Text
    encoders and schedulers run on every rank.

    An argument has one row per image, or is shared by all of them. Those of Diffusers' own models are known by name;
    name others in `by_row` and `whole`.

    Raises ValueError for a tensor argument that is neither, in training mode, and where a gradient would be asked for.
    """
    require_evaluating("parallel_rows.install", model)
    overrides, split = Overrides(), split_of(Group.of(group), by_row, whole)
    inner = overrides.put(model, lambda *args, **kwargs: split.run(model, inner, args, kwargs))
    return RowsHandle(split, overrides)


def split_of(group: Group, by_row: Sequence[str] = (), whole: Sequence[str] = ()) -> Split:
    """The Split of calls over a group, with the known argument names of Diffusers."""
    return Split(group, _BY_ROW - set(whole) | set(by_row), _WHOLE - set(by_row) | set(whole))


class Split:
    """Splits the tensors of a call by rows, and joins the outputs."""

    def __init__(self, group: Group, by_row: set[str], whole: set[str]) -> None:
        self.group, self.by_row, self.whole, self.calls = group, by_row, whole, 0

    def run(self, model: nn.Module, inner: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `inner` on this rank's rows; returns the output for all rows."""
        bound = inspect.signature(inner).bind(*args, **kwargs)
        given = bound.arguments
        require_sampling("parallel_rows", model, given.values())
        rows = batch_of(model, given)
        if self.group.size == 1 or rows == 1:
            return inner(*bound.args, **bound.kwargs)
        counts = [rows // self.group.size + (rank < rows % self.group.size) for rank in range(self.group.size)]
        start, mine = sum(counts[: self.group.rank]), counts[self.group.rank]
        taken = slice(start, start + mine) if mine else slice(0, 1)
        facts = _facts(given)
        for name, value in given.items():
            given[name] = self._cut(name, value, rows, taken)
        with Session(self.group, "parallel_rows") as session:
            answer = session.compute(lambda: inner(*bound.args, **bound.kwargs))
            parts = session.compute(tensors_of, model, answer)
            session.agree(facts)  # raises on all ranks if one failed, which has no output
            assert parts is not None
            joined = [self._joined(part, counts, session) for part in parts]
        self.calls += 1
        return rebuilt(answer, joined)

    def _cut(self, name: str, value: Any, rows: int, taken: slice) -> Any:
        if isinstance(value, Mapping):
            return {key: self._cut(key, part, rows, taken) for key, part in value.items()}
        if isinstance(value, list | tuple) and name not in self.whole:
            return type(value)(self._cut(name, part, rows, taken) for part in value)
        if not isinstance(value, Tensor) or name in self.whole or value.dim() == 0:
            return value
        if name not in self.by_row:
            raise ValueError(
                f"parallel_rows: it is not known whether argument {name!r} {tuple(value.shape)} has one row for each "
                f"picture; say by_row=[{name!r}] or whole=[{name!r}] when installing"
            )
        if value.shape[0] == 1:
            return value  # broadcast: one row for all images
        if value.shape[0] != rows:
            raise ValueError(f"parallel_rows: argument {name!r} has {value.shape[0]} rows; expected {rows}, or 1")
        return value[taken]

    def _joined(self, part: Tensor, counts: list[int], session: Session) -> Tensor:
        shapes = [(count, *part.shape[1:]) for count in counts]
        return torch.cat(all_gather(part[: counts[self.group.rank]].contiguous(), shapes, session))


def batch_of(model: nn.Module, given: Mapping[str, Any]) -> int:
    """The batch size of a denoiser's call: the rows of its first argument, the latents."""
    first = next(iter(given.values()), None)
    if not isinstance(first, Tensor) or first.dim() < 2:
        raise Unsupported(
            f"a call of {type(model).__name__} cannot be split by rows",
            [f"its first argument is {type(first).__name__}; expected a tensor with one row for each picture"],
        )
    return first.shape[0]


def tensors_of(model: nn.Module, answer: Any) -> list[Tensor]:
    """The tensors a denoiser returned, whether as a tuple or as one of Diffusers' outputs."""
    parts = list(answer.values()) if isinstance(answer, Mapping) else list(answer) if isinstance(answer, tuple) else []
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise Unsupported(
            f"the answer of {type(model).__name__} cannot be exchanged",
            [f"it is {type(answer).__name__} of {[type(part).__name__ for part in parts]}; expected tensors"],
        )
    return parts


def rebuilt(answer: Any, parts: Sequence[Any]) -> Any:
    """An output of the same type with other tensors."""
    if isinstance(answer, Mapping):
        return type(answer)(**dict(zip(answer, parts, strict=True)))
    return tuple(parts)


def _facts(given: Mapping[str, Any]) -> dict[str, object]:
    return {name: (tuple(v.shape), v.dtype) for name, v in given.items() if isinstance(v, Tensor)}
