"""Wrong equations people implement, so that the checker can name a fault."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Inputs, Mistake, Outputs
from foci.ops.decay import reference
from foci.ops.decay.call import bind
from foci.ops.faults import FUTURE, Token, another, outer, replaced, shared, stepped, unit


def forward(inputs: Inputs) -> Outputs:
    return reference.forward(bind(**inputs))


def step(S: Tensor, t: Token) -> Tensor:
    return t["decay"] * S + outer(t["k"], t["v"])


def read(before: Tensor, after: Tensor, t: Token) -> Tensor:
    return before + outer(t["bonus"] * t["k"], t["v"]) if "bonus" in t else after


def _bonus(inputs: Inputs) -> bool:
    return inputs.get("bonus") is not None


def _unordered(inputs: dict[str, Any]) -> dict[str, Any] | None:
    plain = inputs.get("log_decay") is None and not _bonus(inputs) and inputs.get("causal", True)
    return inputs | {"causal": False} if plain else None


def _state_kept(inputs: Inputs) -> Outputs | None:
    if inputs.get("state") is None or inputs.get("log_decay") is None:
        return None
    own = forward(dict(inputs) | {"state": None})
    kept = forward(dict(inputs) | {"log_decay": None, "bonus": None, "v": torch.zeros_like(inputs["v"])})
    return own[0] + kept[0], own[1] + kept[1]


MISTAKES: tuple[Mistake, ...] = (
    *shared(forward, step, read),
    another("causal ignored", f"the order of tokens is ignored: {FUTURE}", _unordered, forward),
    another(
        "causal always",
        "tokens see only those before them where causal=False is asked for: the first would see nothing of an image",
        lambda i: None if i.get("causal", True) else i | {"causal": True}, forward,
    ),
    another(
        "k normalised", "k is silently normalised to length 1: how strongly a token is written would be lost",
        replaced("k", unit), forward,
    ),
    another(
        "bonus ignored", "the bonus is ignored: a token sees itself as it sees all others",
        replaced("bonus", lambda u: None), forward,
    ),
    another(
        "bonus of 0", "with a bonus, a token does not see itself at all",
        replaced("bonus", torch.zeros_like), forward,
    ),
    stepped(
        "bonus twice", "the bonus is added to a state that already holds the token: it would see itself twice",
        step, lambda before, after, t: after + outer(t["bonus"] * t["k"], t["v"]), _bonus,
    ),
    stepped(
        "bonus decays", "with a bonus, the state is read after its decay where RWKV-6 reads it before",
        step, lambda before, after, t: t["decay"] * before + outer(t["bonus"] * t["k"], t["v"]), _bonus,
    ),
    Mistake("state does not decay", "the initial state does not decay: old text would stay for ever", _state_kept),
)  # fmt: skip
