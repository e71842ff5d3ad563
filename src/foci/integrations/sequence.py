"""Sequence parallelism for models of foci.nn: each rank has a run of the sequence; per model instance, undoable."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foci.core.errors import Unsupported, a_type
from foci.integrations.undoable import Undoable
from foci.nn.attention import Attention
from foci.nn.cache import LayerCache
from foci.nn.operators import Operators
from foci.nn.parts import History, ShortConvolution, history
from foci.nn.recurrent import Recurrent
from foci.ops.decay.api import linear_attention
from foci.ops.delta.api import delta_rule
from foci.ops.softmax.api import attention
from foci.parallel.exchange import Session, all_reduce, divide_gradient, gather
from foci.parallel.group import Group
from foci.parallel.halo import halo
from foci.parallel.handoff import handoff
from foci.parallel.ring import ring

# torch modules that mix tokens, which would mix only one rank's.
_MIXERS = (nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Transformer, nn.TransformerEncoderLayer)


class SplitSequence(Undoable):
    """The handle of `split_sequence`: the model is split until `restore()`, or the end of a `with` block."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.model, self.group = model, group
        self._undo: list[tuple[nn.Module, str]] = []

    def restore(self) -> None:
        """Restore every layer to computing in one process."""
        while self._undo:
            module, name = self._undo.pop()
            delattr(module, name)

    def reduce_gradients(self) -> None:
        """All-reduce (sum) the gradients of the model's parameters, which gives those of one process.

        For a loss summed over ranks, each contributing its own tokens. Call it once per step, after the last backward
        that accumulates gradients, since a second call would sum again. One all-reduce of all gradients; a parameter
        without a gradient on all ranks stays without. With FSDP or DDP, which average, multiply the loss by the number
        of ranks instead. Raises Disagreement for parameters whose shapes differ between ranks.
        """
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        there = [p.grad is not None for p in parameters]
        facts = {"parameters": [(list(p.shape), p.dtype) for p in parameters]}
        some = self.group.agree("reduce_gradients", facts, [int(each) for each in there])
        wanted = [p for place, p in enumerate(parameters) if any(row[place] for row in some)]
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in wanted:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for same in by_dtype.values():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
            with Session(self.group, "reduce_gradients", "backward") as session:
                flat = all_reduce(torch.cat([grad.flatten() for grad in grads]), session)
            for parameter, part in zip(same, flat.split([p.numel() for p in same]), strict=True):
                parameter.grad = part.view_as(parameter).clone()

    def _put(self, module: nn.Module, name: str, value: Any) -> None:
        if name in vars(module):
            self.restore()
            raise ValueError(f"split_sequence: {type(module).__name__} is split already; restore it first")
        setattr(module, name, value)
        self._undo.append((module, name))


def split_sequence(model: nn.Module, group: Any) -> SplitSequence:
    """Let the layers of foci.nn in `model` work on a sequence of which each rank of `group` holds a run.

        with split_sequence(model, group) as split:
            loss = loss_of(model(shard(ids, group, "plain")), shard(targets, group, "plain"))    # a sum of all tokens'
            loss.backward()
            split.reduce_gradients()

    Tokens are [B, T of this rank], in rank order ("plain"), runs of any lengths. Recurrences use `handoff`, softmax
    attention uses `ring`, short convolutions and token shifts get the preceding tokens by `halo`, rotary positions
    count from the first token of the whole; the rest of a model works token by token and needs nothing. offsets of
    packed documents are those of the whole.

    A cache is complete on every rank, as in one process: prefill split, leave the block, and decode on any rank. So its
    memory is not divided: constant for recurrences, the window's or all keys and values for softmax.

    Weights are replicated. Each rank's gradient of them is a partial sum over its tokens; the sum over ranks is that of
    one process (`reduce_gradients`). Per model instance, no process-wide switch; split layers refuse padding masks
    (Unsupported). Raises ValueError for a model without such layers or split already, Unsupported
    for one with modules that mix tokens in another way.
    """
    group = Group.of(group)
    if not isinstance(model, nn.Module):
        raise TypeError(f"split_sequence: model must be a torch.nn.Module, got {model!r}")
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, Recurrent | Attention)]
    if not layers:
        raise ValueError("split_sequence: model has no layer of foci.nn; expected one with something to split")
    others = [f"{name or 'the model'} is {a_type(m)}" for name, m in model.named_modules() if isinstance(m, _MIXERS)]
    if others:
        raise Unsupported("split_sequence: these modules mix tokens, and would see one rank's only", others)
    split, over = SplitSequence(model, group), _Over(group)
    operators = over.operators()
    for _, layer in layers:
        split._put(layer, "operators", operators)
    for module in model.modules():
        if isinstance(module, ShortConvolution):
            split._put(module, "history", over.history)
    return split


class _Over:
    """Builds the Operators of layers that are split over a group."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def operators(self) -> Operators:
        return Operators(
            attention=self._sharing(ring(attention, self.group, order="plain")),
            linear_attention=self._sharing(handoff(linear_attention, self.group)),
            delta_rule=self._sharing(handoff(delta_rule, self.group)),
            history=self.history,
            remember=self.remember,
            span=self.span,
            whole=False,
        )

    def span(self, T: int) -> tuple[int, int]:
        lengths = self._lengths(T)
        return sum(lengths[: self.group.rank]), sum(lengths)

    def history(
        self,
        x: Tensor,
        width: int,
        *,
        tail: Tensor | None = None,
        offsets: Tensor | None = None,
        lengths: Tensor | None = None,
        return_tail: bool = True,
    ) -> History:
        assert lengths is None  # of padding, which a split layer refuses
        found = halo(x, width, self.group, tail=tail, offsets=offsets)
        ours = history(x, width, tail=found.before, offsets=found.offsets, return_tail=False)
        return ours._replace(tail=found.tail if return_tail else None)

    def remember(
        self, memory: LayerCache, name: str, new: Tensor, last: int | None = None, saved: bool = False
    ) -> Tensor:
        """Append all ranks' new tokens to the cache; only rank 0's keys include those that were cached before."""
        held, lengths = memory.get(name), self._lengths(new.shape[1])
        ends = list(itertools.accumulate(lengths))
        first = 0 if last is None else max(ends[-1] - last, 0)
        counts = [min(n, max(end - first, 0)) for n, end in zip(lengths, ends, strict=True)]
        own = new[:, new.shape[1] - counts[self.group.rank] :].contiguous()
        shapes = [(new.shape[0], n, *new.shape[2:]) for n in counts]
        memory.append(name, torch.cat(gather(own, shapes, self.group, "cache"), 1), last, saved)
        mine = new
        if held is not None:  # other ranks use none of it, but stay in its graph, as its backward is collective
            mine = torch.cat([held if self.group.rank == 0 else held[:, :0], new], 1)
        return mine

    def _lengths(self, T: int) -> list[int]:
        return [row[0] for row in self.group.agree("split_sequence", {}, [T])]

    def _sharing(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """Divide the gradients of replicated tensors, which are complete on every rank, by the number of ranks.

        Then the same holds for every parameter of a model: its gradient is the sum over ranks.
        """
        names: Sequence[str] = ("sink", "bonus", "state", "log_decay")

        def shared(*args: Any, **options: Any) -> Any:
            for name in names:
                x = options.get(name)
                if isinstance(x, Tensor) and x.requires_grad and (name != "log_decay" or x.dim() == 1):
                    options[name] = divide_gradient(x, self.group.size)
            return op(*args, **options)

        return shared
