"""Infer a split plan for an unknown model: record sizes, propose a plan, add what the checker reports, repeat."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from foci.core.errors import Unsupported
from foci.integrations.diffusers import attention_sites
from foci.integrations.split_check import Record, SplitError, check, watch
from foci.integrations.split_plan import Cut, Gather, Kind, SplitPlan, Stream

_MOST = 24  # maximum number of further tensors to split; known models have at most four


class _Trunk(NamedTuple):
    """The first block, its argument with the image tokens, and the numbers of image and text tokens."""

    block: str
    argument: str
    image: int
    text: int


def infer(model: nn.Module, inputs: Mapping[str, Any], *, size: int = 2) -> SplitPlan:
    """A split plan of a Diffusers model from one call of it, checked for every rank of `size`.

    The image tokens are those of the longest self-attention, split at the input of the first block and gathered after
    the last module that outputs them. Then the plan is checked; each tensor that the checker reports as not split is
    added, until the check passes. Text is replicated. Dimensions are recognised by size, so the inputs' numbers of
    image tokens, text tokens and batch rows must differ from each other and from all sizes in the model.

    Raises Unsupported, with what was tried, if that finds no plan that passes the check.
    """
    record = watch(model, inputs)
    trunk = _trunk(model, record)
    reasons: list[str] = []
    for where in ("front", "back") if trunk.text else ("front",):
        plan = _first_plan(model, record, trunk, "front" if where == "front" else "back")
        try:
            return _completed(model, inputs, plan, size, "front" if where == "front" else "back")
        except SplitError as error:
            reasons.append(f"text in {where}: {error.sentence}" if trunk.text else error.sentence)
    raise Unsupported(f"split: no plan was found for {type(model).__name__}", reasons, "write a SplitPlan for it")


def _completed(model: nn.Module, inputs: Mapping[str, Any], plan: SplitPlan, size: int, where: Stream) -> SplitPlan:
    """The plan, extended by every tensor that the checker reports as not split."""
    for _ in range(_MOST):
        try:
            check(model, inputs, plan, size=size, text="replicated")
        except SplitError as error:
            cut = _cut_of(model, error, where)
            if error.fault != "unsplit" or cut is None or cut in plan.cuts:
                raise
            plan = dataclasses.replace(plan, cuts=(*plan.cuts, cut))
        else:
            return plan
    raise SplitError(f"more than {_MOST} tensors would have to be cut", "", "", "other")


def _cut_of(model: nn.Module, error: SplitError, where: Stream) -> Cut | None:
    """The Cut for a SplitError, for the same argument in all modules of a list."""
    argument = error.tensor.partition("[")[0]
    if error.dim is None or argument not in inspect.signature(model.get_submodule(error.module).forward).parameters:
        return None
    streams: dict[str, Stream] = {"image": "image", "text": "text", "joint": where}
    return Cut(_pattern(error.module), argument, error.dim, streams[error.stream])


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _trunk(model: nn.Module, record: Record) -> _Trunk:
    if not record.attention:
        raise Unsupported(f"split: {type(model).__name__}", ["no attention ran in a site that can be routed"])
    longest = max(q.shape[1] for q, *_ in record.attention.values())
    alike = (name for (name, _), (q, k, *_) in record.attention.items() if q.shape[1] == k.shape[1] == longest)
    site = next(alike, None)
    if site is None:
        raise Unsupported(f"split: {type(model).__name__} is not understood", ["no self attention over all its tokens"])
    block = _block(model, site)
    tensors = record.calls[block, 0].tensors
    rows = {key: x.shape[1] for key, x in tensors.items() if x.dim() == 3 and "[" not in key and key != "output"}
    if (alone := next((key for key, count in rows.items() if count == longest), None)) is not None:
        return _Trunk(block, alone, longest, 0)
    pairs = [(a, b) for a in rows for b in rows if a != b and rows[a] + rows[b] == longest]
    # Text is the model's input encoder_hidden_states; without it, the longer of two streams is the image.
    found = [(a, b) for a, b in pairs if "encoder" in b] or [(a, b) for a, b in pairs if rows[a] > rows[b]]
    if not found:
        raise Unsupported(
            f"split: {type(model).__name__} is not understood",
            [f"attention in {site} has {longest} tokens, but {block} gets {rows or 'no tensors [B, tokens, width]'}"],
        )
    image, text = found[0]
    if rows[image] == rows[text]:
        raise Unsupported(
            f"split: {type(model).__name__}",
            [f"image and text both have {rows[image]} tokens; expected inputs in which they differ"],
        )
    return _Trunk(block, image, rows[image], rows[text])


def _block(model: nn.Module, site: str) -> str:
    """The outermost ModuleList element that contains the site."""
    parts = site.split(".")
    for end in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
            return ".".join(parts[: end + 1])
    raise Unsupported(f"split: {type(model).__name__} is not understood", [f"{site} is in no list of blocks"])


def _first_plan(model: nn.Module, record: Record, trunk: _Trunk, where: Kind) -> SplitPlan:
    sites: dict[str, Kind] = {}
    for name, _, _ in attention_sites(model):
        kinds = {_kind(record, call, trunk, where) for call in record.attention if call[0] == name}
        if len(kinds) > 1:
            raise Unsupported(f"split: {type(model).__name__}", [f"{name} calls attention in several ways: {kinds}"])
        sites[_pattern(name)] = kinds.pop() if kinds else "whole"
    # Attention that cannot be routed is assumed to be on text or time only; if not, the check fails.
    sites |= {_pattern(name): "whole" for name in record.skipped}
    last = record.ended[: _last(record, trunk)]
    return SplitPlan(
        type(model).__name__,
        cuts=(Cut(trunk.block, trunk.argument, 1),),
        gathers=(Gather(last[-1]),),
        sites=tuple(sites.items()),
        blocks=tuple(dict.fromkeys(_pattern(name) for name in _joint_blocks(model, record, trunk))),
        text=_text_argument(record, trunk),
    )


def _kind(record: Record, call: tuple[str, int], trunk: _Trunk, where: Kind) -> Kind:
    q, k, *_ = record.attention[call]
    rows, columns = q.shape[1], k.shape[1]
    if trunk.text and rows == columns == trunk.image + trunk.text:
        return where
    if rows == trunk.image:
        return "self" if columns == rows else "cross"
    return "whole"


def _last(record: Record, trunk: _Trunk) -> int:
    """The module to gather after: the last direct child of the model with output [B, image tokens, width]."""
    ends = [
        place
        for place, name in enumerate(record.ended)
        if (out := record.calls[name, 0].tensors.get("output")) is not None
        and name
        and out.dim() == 3
        and out.shape[1] == trunk.image
    ]
    if not ends:
        raise Unsupported("split", [f"no module gives [B, {trunk.image} tokens, width]"])
    return ends[-1] + 1


def _joint_blocks(model: nn.Module, record: Record, trunk: _Trunk) -> Iterator[str]:
    joint = {name for (name, _), (q, *_) in record.attention.items() if q.shape[1] == trunk.image + trunk.text}
    yield from (_block(model, name) for name in joint) if trunk.text else ()


def _text_argument(record: Record, trunk: _Trunk) -> str:
    tensors = record.calls[trunk.block, 0].tensors
    rows = {key: x.shape[1] for key, x in tensors.items() if x.dim() == 3 and "[" not in key and key != "output"}
    return next((key for key, count in rows.items() if trunk.text and count == trunk.text), "encoder_hidden_states")
