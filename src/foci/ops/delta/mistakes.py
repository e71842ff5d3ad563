"""Wrong equations people implement, so that the checker can name a fault."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.core.spec import Inputs, Mistake, Outputs
from foci.ops.delta import reference
from foci.ops.delta.call import bind
from foci.ops.faults import Token, another, newest, outer, replaced, shared, stepped, under, unit


def forward(inputs: Inputs) -> Outputs:
    return reference.forward(bind(**inputs))


def erase(t: Token) -> Tensor:
    return t.get("erase", t["k"])


def written(S: Tensor, t: Token, error: Tensor) -> Tensor:
    """S + beta k error^T."""
    return S + outer(t["k"], t["beta"][..., None] * error)


def step(S: Tensor, t: Token) -> Tensor:
    S = t["decay"] * S
    return written(S, t, t["v"] - under(S, erase(t)))


def _read_undecayed(S: Tensor, t: Token) -> Tensor:
    return written(t["decay"] * S, t, t["v"] - under(S, erase(t)))


def _beta_on_the_erased_alone(S: Tensor, t: Token) -> Tensor:
    S = t["decay"] * S
    return written(S, t, -under(S, erase(t))) + outer(t["k"], t["v"])


def _beta_on_the_value_alone(S: Tensor, t: Token) -> Tensor:
    S = t["decay"] * S
    return written(S, t, t["v"]) - outer(t["k"], under(S, erase(t)))


def _never_erased(S: Tensor, t: Token) -> Tensor:
    return written(t["decay"] * S, t, t["v"])


def _keys_exchanged(S: Tensor, t: Token) -> Tensor:
    return step(S, t | {"k": erase(t), "erase": t["k"]})


def _erases(inputs: Inputs) -> bool:
    return inputs.get("erase") is not None


MISTAKES: tuple[Mistake, ...] = (
    *shared(forward, step),
    stepped(
        "read undecayed", "v - S^T k is read from the state before its decay: it would correct what is gone",
        _read_undecayed, newest, lambda i: i.get("log_decay") is not None,
    ),
    stepped(
        "beta not on the value", "beta is applied to what is erased, not to the value: every token is written in full",
        _beta_on_the_erased_alone, newest,
    ),
    stepped(
        "beta not on the erased", "beta is applied to the value alone: every key is erased in full before a write",
        _beta_on_the_value_alone, newest,
    ),
    stepped(
        "nothing erased", "nothing is erased before the write: this is linear attention, its memory would fill up",
        _never_erased, newest,
    ),
    another(
        "beta ignored", "beta is ignored: every token is written in full",
        replaced("beta", torch.ones_like), forward,
    ),
    another(
        "beta squared", "beta is applied twice: hardly anything of a token with a small one would be written",
        replaced("beta", torch.square), forward,
    ),
    another(
        "beta through a sigmoid", "beta goes through a sigmoid that the caller has already applied",
        replaced("beta", torch.sigmoid), forward,
    ),
    another(
        "beta at most 1", "beta is cut at 1: a model with negative eigenvalues could no longer flip what it stored",
        lambda i: i | {"beta": i["beta"].clamp(max=1)} if (i["beta"] > 1).any() else None, forward,
    ),
    another(
        "k normalised", "k is silently normalised to length 1: how much is erased and written would be another",
        replaced("k", unit), forward,
    ),
    another("erase ignored", "erase is ignored, k is erased instead", replaced("erase", lambda e: None), forward),
    stepped(
        "keys exchanged", "the key to erase is written, and the other erased: each would change what it must not",
        _keys_exchanged, newest, _erases,
    ),
)  # fmt: skip
