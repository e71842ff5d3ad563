"""Building blocks of the recurrent operators' Mistakes: wrong recurrences that people implement, by changed steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Inputs, Mistake, Outputs
from foci.ops.recurrent import ALL, sequences

Token = dict[str, Tensor]
Step = Callable[[Tensor, Token], Tensor]
Read = Callable[[Tensor, Tensor, Token], Tensor]
Forward = Callable[[Inputs], Outputs]
Change = Callable[[dict[str, Any]], dict[str, Any] | None]
When = Callable[[Inputs], bool]

BLOCKS = (16, 64)  # tokens that programs take at once
FUTURE = "it sees the future: training would look perfect and generation would fail"


def always(inputs: Inputs) -> bool:
    return True


def outer(key: Tensor, value: Tensor) -> Tensor:
    """k v^T, [..., K, V]."""
    return key[..., None] * value[..., None, :]


def under(state: Tensor, key: Tensor) -> Tensor:
    """S^T k, [..., V]."""
    return (state * key[..., None]).sum(-2)


def newest(before: Tensor, after: Tensor, token: Token) -> Tensor:
    return after


def walk(inputs: Inputs, step: Step, read: Read = newest) -> Outputs:
    """(out, state) token by token: S <- step(S, token), o = scale * read(S before, S after, token)^T q.

    A token has q, k, erase, v, beta, bonus as far as they are given, of all H heads, and `decay` [B, H, K, 1].
    """
    k, v, state, offsets = (inputs.get(name) for name in ("k", "v", "state", "offsets"))
    assert k is not None and v is not None
    (B, T, H, V), K = v.shape, k.shape[3]
    scale = inputs.get("scale")
    tokens = _tokens(inputs, T)
    pieces = [(ALL, 0, T)]
    if offsets is not None:
        borders = offsets.tolist()
        pieces = [(slice(n, n + 1), *borders[n : n + 2]) for n in range(len(borders) - 1)]
    final = v.new_zeros(B if offsets is None else len(pieces), H, K, V) if state is None else state.clone()
    out = torch.zeros_like(v)
    for rows, start, stop in pieces:
        S = final[rows]
        for t in range(start, stop):
            before, S = S, step(S, tokens[t])
            out[:, t] = (K**-0.5 if scale is None else scale) * under(read(before, S, tokens[t]), tokens[t]["q"])
        final[rows] = S
    return out, final


def _tokens(inputs: Inputs, T: int) -> list[Token]:
    v, gates = inputs["v"], inputs.get("log_decay")
    B, _, H, _ = v.shape
    gates = v.new_zeros(H) if gates is None else gates
    gates = gates if gates.dim() == 4 else gates.expand(B, T, H)[..., None]
    found = {"decay": gates.exp().expand(B, T, H, inputs["k"].shape[3])[..., None]}
    for name in sequences(inputs):
        if name != "log_decay":
            x = inputs[name]
            found[name] = x.repeat_interleave(H // x.shape[2], 2) if x.shape[2] else x
    rest = {} if inputs.get("bonus") is None else {"bonus": inputs["bonus"]}
    return [{name: x[:, t] for name, x in found.items()} | rest for t in range(T)]


def another(name: str, sentence: str, change: Change, forward: Forward) -> Mistake:
    """A mistake equal to the right equation on changed arguments; `change` returns None if nothing changes."""

    def compute(inputs: Inputs) -> Outputs | None:
        changed = change(dict(inputs))
        return None if changed is None else forward(changed)

    return Mistake(name, sentence, compute)


def replaced(argument: str, make: Callable[[Tensor], Tensor | None]) -> Change:
    """A change that replaces an argument, if given, by `make` of it."""
    return lambda i: None if i.get(argument) is None else i | {argument: make(i[argument])}


def stepped(name: str, sentence: str, step: Step, read: Read, when: When = always) -> Mistake:
    """A mistake in the state update or in the read, for causal calls."""

    def compute(inputs: Inputs) -> Outputs | None:
        return walk(inputs, step, read) if inputs.get("causal", True) and when(inputs) else None

    return Mistake(name, sentence, compute)


def ended(name: str, sentence: str, change: Callable[[Inputs, Tensor], Tensor | None], forward: Forward) -> Mistake:
    """A mistake in the final state only."""

    def compute(inputs: Inputs) -> Outputs | None:
        out, state = forward(inputs)
        changed = change(inputs, state)
        return None if changed is None else (out, changed)

    return Mistake(name, sentence, compute)


def of_states(forward: Forward) -> tuple[Mistake, ...]:
    """Mistakes with the states of any recurrence."""
    return (
        another(
            "state ignored", "the initial state is ignored: every call would begin anew, decoding forget its prompt",
            replaced("state", lambda state: None), forward,
        ),
        another(
            "state of the first row", "all rows begin with the initial state of the first: they would share its prompt",
            lambda i: i | {"state": i["state"][:1].expand_as(i["state"])} if i.get("state") is not None else None,
            forward,
        ),
        ended(
            "state not handed on", "the final state is the initial one: nothing would be handed on",
            lambda i, state: torch.zeros_like(state) if i.get("state") is None else i["state"], forward,
        ),
        *(
            ended(
                f"state of whole blocks of {block}",
                f"the final state lacks the tokens behind the last whole block of {block}: decoding would forget them",
                partial(_before_the_rest, forward, block), forward,
            )
            for block in BLOCKS
        ),
    )  # fmt: skip


def _before_the_rest(forward: Forward, block: int, inputs: Inputs, state: Tensor) -> Tensor | None:
    """The state after the last whole block, if there is one and tokens behind it."""
    names = sequences(inputs)
    tokens = inputs[names[0]].shape[1]
    whole = tokens // block * block
    if inputs.get("offsets") is not None or whole in (0, tokens):
        return None
    return forward(dict(inputs) | {name: inputs[name][:, :whole] for name in names})[1]


def without_documents(forward: Forward) -> Mistake:
    def unpacked(inputs: Inputs) -> Outputs | None:
        if inputs.get("offsets") is None:
            return None
        one = {name: value for name, value in inputs.items() if name != "offsets"}
        if one.get("state") is not None:
            one["state"] = one["state"][:1]
        return forward(one)[0], forward(inputs)[1]

    return Mistake("documents ignored", "offsets are ignored: packed documents would read each other", unpacked)


def shared(forward: Forward, step: Step, read: Read = newest) -> tuple[Mistake, ...]:
    """The mistakes common to all recurrences over q, k and v, given the right equation, step and read."""
    return (
        *_of_decay(forward, step, read),
        *_of_state(forward, step),
        *_of_scale(forward),
        *_rest(forward, step),
    )


def _of_decay(forward: Forward, step: Step, read: Read) -> tuple[Mistake, ...]:
    def gates(name: str, sentence: str, make: Callable[[Tensor], Tensor | None]) -> Mistake:
        return another(name, sentence, replaced("log_decay", make), forward)

    def bare(S: Tensor, t: Token) -> Tensor:
        return step(S, t | {"decay": torch.ones_like(t["decay"])})

    return (
        gates("decay ignored", "log_decay is ignored: nothing would ever be forgotten", lambda g: None),
        gates(
            "decay in base 2", "log_decay is read in base 2 where it is a natural logarithm: all would fade too slowly",
            lambda g: g * math.log(2),
        ),
        gates(
            "decay scaled to base 2", "log_decay is brought to base 2, then taken to base e: all would fade too fast",
            lambda g: g / math.log(2),
        ),
        gates("gate of the next token", f"a token decays by the next one's gate: {FUTURE}", partial(_moved, by=-1)),
        gates(
            "gate of the token before", "a token decays by the gate of the one before: forgetting comes a token late",
            partial(_moved, by=1),
        ),
        stepped(
            "decay after the write", "the decay acts after the write instead of before it: what is new fades at once",
            lambda S, t: t["decay"] * bare(S, t), read, lambda i: i.get("log_decay") is not None,
        ),
        stepped(
            "decay on the values", "the decay of each channel acts on the channels of v where those of k are right",
            lambda S, t: bare(t["decay"].mT * S, t), read,
            lambda i: i.get("log_decay") is not None and i["log_decay"].dim() == 4 and _square(i),
        ),
    )  # fmt: skip


def _of_state(forward: Forward, step: Step) -> tuple[Mistake, ...]:
    def without_the_last(inputs: Inputs, state: Tensor) -> Tensor | None:
        kept: list[Tensor] = []

        def remember(S: Tensor, t: Token) -> Tensor:
            kept.append(S)
            return step(S, t)

        if inputs.get("offsets") is not None or not inputs.get("causal", True) or not inputs["v"].shape[1]:
            return None
        walk(inputs, remember)
        return kept[-1]

    return (
        another(
            "state read transposed", "the initial state is read as [V, K] where it is [K, V]",
            lambda i: i | {"state": i["state"].mT} if i.get("state") is not None and _square(i) else None, forward,
        ),
        ended(
            "state transposed", "the final state comes as [V, K] where [K, V] is right: decoding would read it turned",
            lambda i, state: state.mT if _square(i) else None, forward,
        ),
        ended(
            "state without the last token", "the final state lacks the last token: decoding would go on without it",
            without_the_last, forward,
        ),
        *of_states(forward),
    )  # fmt: skip


def _of_scale(forward: Forward) -> tuple[Mistake, ...]:
    def scaled(name: str, sentence: str, value: Callable[[int], float]) -> Mistake:
        def change(inputs: dict[str, Any]) -> dict[str, Any] | None:
            K = inputs["k"].shape[3]
            given = K**-0.5 if inputs.get("scale") is None else inputs["scale"]
            return None if math.isclose(given, value(K)) else inputs | {"scale": value(K)}

        return another(name, sentence, change, forward)

    def off(inputs: Inputs, amount: float) -> Outputs:
        given = inputs["k"].shape[3] ** -0.5 if inputs.get("scale") is None else inputs["scale"]
        return forward(dict(inputs) | {"scale": given * (1 + amount)})

    return (
        scaled("scale ignored", "scale is ignored, K**-0.5 is used instead", lambda K: K**-0.5),
        scaled("unscaled", "the output is not scaled: too large, by the root of K", lambda K: 1.0),
        scaled("scaled twice", "the output is scaled by 1/K where K**-0.5 is right", lambda K: 1 / K),
        Mistake("scale off", "the scale is off by {:+.2%}: small enough to train, wrong everywhere", off, fits=True),
    )


def _rest(forward: Forward, step: Step) -> tuple[Mistake, ...]:
    return (
        without_documents(forward),
        another(
            "heads interleaved",
            "value head h reads key head h % G where h // (H/G) is right: loaded grouped weights would give noise",
            _heads_modulo, forward,
        ),
        another(
            "q normalised", "q is silently normalised to length 1: a query could no longer ask more or less strongly",
            replaced("q", unit), forward,
        ),
        stepped(
            "read before the write", "a token is read before it is written: it would not see itself",
            step, lambda before, after, t: before,
        ),
    )  # fmt: skip


def unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def _square(inputs: Inputs) -> bool:
    return bool(inputs["k"].shape[3] == inputs["v"].shape[3])


def _moved(gates: Tensor, by: int) -> Tensor:
    """Gates shifted by some tokens, 0 at the end; gates per head have no tokens."""
    if gates.dim() == 1:
        return gates
    moved = gates.roll(by, dims=1)
    moved[:, -1 if by < 0 else 0] = 0
    return moved


def _heads_modulo(inputs: dict[str, Any]) -> dict[str, Any] | None:
    G, H = inputs["k"].shape[2], inputs["v"].shape[2]
    if G in (1, H):
        return None
    grouped = [name for name in ("q", "k", "erase") if inputs.get(name) is not None]
    return inputs | {name: inputs[name].repeat(1, 1, H // G, 1) for name in grouped}
