"""One stage of PipeFusion: its blocks, its cache of keys and values, and what it sends to the next stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foci.core.errors import Unsupported
from foci.ops.masks import Mask
from foci.parallel.exchange import Session, shift
from foci.parallel.group import Group


class Family(NamedTuple):
    """How the blocks of a class of transformers are called.

    `lists`: the module lists of the blocks, in order. `attention`: the self-attention in a block. `text`: whether
    blocks also take and return text tokens, which come first. `rotary`: the argument with one row per token.
    """

    lists: tuple[str, ...]
    attention: str
    text: bool = False
    rotary: str = ""


_PLAIN = Family(("transformer_blocks",), "attn1")
FAMILIES: dict[str, Family] = {
    "DiTTransformer2DModel": _PLAIN,
    "PixArtTransformer2DModel": _PLAIN,
    "FluxTransformer2DModel": Family(
        ("transformer_blocks", "single_transformer_blocks"), "attn", text=True, rotary="image_rotary_emb"
    ),
}
_TEXT = "encoder_hidden_states"
_NOT_BY_PATCH = ("attention_mask", "cross_attention_kwargs", "joint_attention_kwargs")


class Memory:
    """State of one branch of guidance: calls since the image began, and each block's keys and values of all tokens."""

    def __init__(self) -> None:
        self.calls = 0
        self.held: dict[int, tuple[Tensor, Tensor]] = {}


class Stage:
    """The blocks of one rank, at work."""

    def __init__(
        self, model: nn.Module, family: Family, group: Group, mine: range, patches: int, warmup: int, calls: int
    ) -> None:
        self.model, self.family, self.group, self.mine = model, family, group, mine
        self.patches, self.warmup, self.calls = patches, warmup, calls
        self.run: list[Callable[..., Any]] = []
        self.signature = Signature()
        self.exact_calls = self.approximate_calls = 0
        self.forget()

    def forget(self) -> None:
        """Reset: the next call is the first of an image."""
        self.time, self.branch = float("inf"), -1
        self.sizes: object = None
        self.memories = [Memory() for _ in range(self.calls)]
        self.block, self.rows, self.exact = -1, slice(0, 0), True
        self.passing: tuple[Tensor, Tensor | None] | None = None

    def begin(self, given: Mapping[str, Any]) -> None:
        """At the start of a call of the model: find its branch and step, and whether it is exact."""
        time = given.get("timestep")
        if not isinstance(time, Tensor):
            raise ValueError(f"pipefusion: timestep is {time!r}; expected a tensor")
        sample = next(iter(given.values()))
        now, sizes = float(time.max()), (tuple(sample.shape), sample.dtype, sample.device)
        again = now == self.time and self.branch + 1 < self.calls
        if now > self.time or sizes != self.sizes or (now == self.time and not again):
            self.forget()
        self.branch = self.branch + 1 if now == self.time else 0
        self.time, self.sizes = now, sizes
        memory = self.memories[self.branch]
        self.exact = memory.calls < self.warmup
        memory.calls += 1
        self.exact_calls += self.exact
        self.approximate_calls += not self.exact
        facts = {"patches": self.patches, "warmup": self.warmup, "time": now, "exact": self.exact}
        self.group.agree("pipefusion", {**facts, **{f"argument {k}": _size(v) for k, v in given.items()}})

    def first(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Replaces the model's first block: runs the whole pipeline."""
        given = self.signature.bind(*args, **kwargs).arguments
        side = {name: value for name, value in given.items() if name not in ("hidden_states", _TEXT)}
        if not self.family.text and _TEXT in given:
            side[_TEXT] = given[_TEXT]
        for name in _NOT_BY_PATCH:
            if side.get(name) is not None and side[name] != {}:
                raise Unsupported("pipefusion", [f"blocks were given {name}, of which no patch can be taken"])
        text = given[_TEXT] if self.family.text else None
        self.passing = self._pipeline(given["hidden_states"], text, side)
        return self._returned()

    def later(self, place: int, args: Any, kwargs: dict[str, Any]) -> Any:
        """Replaces every other block: the identity; raises if the tokens were changed in between."""
        tokens = kwargs.get("hidden_states", args[0] if args else None)
        if self.passing is None or tokens is not self.passing[0]:
            raise Unsupported(
                "pipefusion",
                [f"{type(self.model).__name__} changes the tokens before block {place}, as a ControlNet does"],
            )
        return self._returned()

    def last_only(self, part: Tensor) -> Tensor:
        """The tensor, flattened, on the last stage; empty on others."""
        flat = part.contiguous().flatten()
        return flat if self.group.rank == self.group.size - 1 else flat[:0]

    def attend(self, op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The blocks' self-attention: `op` on this patch's queries and the keys and values of all tokens."""

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *,
            mask: Mask | None = None,
            bias: Tensor | None = None,
            scale: float | None = None,
            dropout: float = 0.0,
            backend: str | None = None,
        ) -> Tensor:
            if mask is not None or bias is not None:
                raise Unsupported("pipefusion", ["self-attention was given a mask, of which no patch can be taken"])
            return op(q, *self._remember(k, v), scale=scale, dropout=dropout, backend=backend)

        return attend

    def _remember(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        held = self.memories[self.branch].held
        if self.exact:
            held[self.block] = k.clone(), v.clone()
            return k, v
        for kept, fresh in zip(held[self.block], (k, v), strict=True):
            kept[:, self.rows] = fresh
        return held[self.block]

    def _returned(self) -> Any:
        assert self.passing is not None
        tokens, text = self.passing
        return (text, tokens) if self.family.text else tokens

    def _pipeline(self, tokens: Tensor, text: Tensor | None, side: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Run all patches through all stages; in each tick a stage has its predecessor's last patch."""
        words = tokens[:, :0] if text is None else text
        cuts = _cuts(tokens.shape[1], 1 if self.exact else self.patches)
        stages, stage = self.group.size, self.group.rank
        arrived: list[Tensor] = []
        done: list[Tensor] = []
        text_done = words
        with Session(self.group, "pipefusion", "forward") as session:
            for session.step in range(len(cuts) + stages - 1):
                patch = session.step - stage
                passed = [tokens[:, :0], words[:, :0]]
                if 0 <= patch < len(cuts):
                    given = arrived if stage else [tokens[:, cuts[patch]], words if patch == 0 else words[:, :0]]
                    passed = session.compute(self._blocks, given, cuts[patch], words.shape[1], side) or given
                    if stage == stages - 1:
                        done.append(passed[0])
                        text_done = passed[1] if patch == 0 else text_done
                        passed = [tokens[:, :0], words[:, :0]]
                if session.step < len(cuts) + stages - 2:
                    arrived = shift(passed, self._expected(tokens, words, cuts, patch + 1), 1, session).wait()
        whole = torch.cat(done, 1) if done else tokens
        return whole, None if text is None else text_done

    def _expected(self, tokens: Tensor, words: Tensor, cuts: list[slice], patch: int) -> list[tuple[int, ...]]:
        """The shapes of what the previous stage sends: the next patch, or nothing."""
        comes = self.group.rank > 0 and 0 <= patch < len(cuts)
        many = cuts[patch].stop - cuts[patch].start if comes else 0
        spoken = words.shape[1] if comes and patch == 0 else 0
        return [(tokens.shape[0], many, tokens.shape[2]), (words.shape[0], spoken, words.shape[2])]

    def _blocks(self, given: list[Tensor], cut: slice, spoken: int, side: dict[str, Any]) -> list[Tensor]:
        """Run this rank's blocks on one patch. Text goes with the first patch; others use its keys and values."""
        tokens, words = given
        # Attention's tokens begin with the text, so the rows of a patch are contiguous.
        self.rows = slice(0 if cut.start == 0 else spoken + cut.start, spoken + cut.stop)
        if self.family.rotary and side.get(self.family.rotary) is not None:
            side = {**side, self.family.rotary: tuple(part[self.rows] for part in side[self.family.rotary])}
        for block in self.mine:
            self.block = block
            if self.family.text:
                words, tokens = self.run[block](hidden_states=tokens, **{_TEXT: words}, **side)
            else:
                tokens = self.run[block](hidden_states=tokens, **side)
        return [tokens, words]


def _cuts(tokens: int, patches: int) -> list[slice]:
    """The patches, in order: tokens // patches each, the first ones one more; none is empty."""
    each, more = divmod(tokens, patches)
    ends = [each * (i + 1) + min(i + 1, more) for i in range(patches)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False) if end > start]


def _size(value: Any) -> object:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
