"""One decoding step of linear attention or the delta rule: check the arguments, then run Triton, C++ or torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foci.core import plans
from foci.ops import arguments, gpu, native

_DECAYS = {1: ("H",), 2: ("B", "H"), 3: ("B", "H", "K")}
_REST = ("beta", "log_decay", "erase", "bonus")  # in the order in which operators name them


def forward(
    operator: str,
    in_torch: Callable[..., Tensor],
    state: Tensor,
    scale: float | None,
    slots: Tensor | None,
    named: dict[str, Tensor | None],
) -> Tensor:
    """out [B,H,V] from q, k, v, log_decay and the other `named` tensors; updates each row's state (or slot) in place.

    `in_torch(q, k, v, state, scale, **rest)` does the same in plain torch, for any device and dtype.
    """
    given = (*named.values(), state, slots, scale)
    key, out = try_replay_step(operator, given, state)
    if out is not None:
        return out
    alike = arguments.bind_step(operator, named | {"state": state, "slots": slots})
    q, k, v = (alike[name] for name in "qkv")
    (B, H, _), K = v.shape, q.shape[2]
    scale = arguments.scaling(operator, scale, K)
    rest = {name: alike.get(name, x) for name, x in named.items() if name not in "qkv"}
    rest["log_decay"] = arguments.decay(operator, named["log_decay"], _DECAYS, (B, H, K))
    if gpu.can_step(state) and plans.all_plain(given):
        values = (q, k, v, *(rest.get(name) for name in _REST), state, slots, scale)
        return replay_or_run_step(key, given, _step, values, state)
    taken = None if slots is None else arguments.Slots(state, slots)
    now = state if taken is None else taken.state
    q, k, v, *others = _unaliased(now, q, k, v, *rest.values())
    with plans.without_autocast(now):
        run = native.step if native.can_step(now) and plans.all_plain(given) else in_torch
        out = run(q, k, v, now, scale, **dict(zip(rest, others, strict=True))).to(v.dtype)
    return out if taken is None else taken.put(out)


def _unaliased(state: Tensor, *tensors: Any) -> list[Any]:
    """The tensors; copies of those that share, or may share, storage with the state, which changes meanwhile."""
    return [x.clone() if x is not None and shares_storage(x, state) else x for x in tensors]


def shares_storage(x: Tensor, state: Tensor) -> bool:
    """Whether x lies, or may lie, where a change of the state in place shows."""
    if torch.compiler.is_compiling():  # functionalisation handles aliases
        return False
    try:
        return x.untyped_storage()._cdata == state.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a vmap wrapper or wrapper subclass, without storage
        return True


def try_replay_step(operator: str, given: tuple[Any, ...], state: Tensor) -> tuple[Any, Tensor | None]:
    """Look up a step in the plan cache: (key for `replay_or_run_step`, None), or (None, out) if it was replayed."""
    key, replayed = plans.try_replay_operator(operator, given)
    if replayed is None:
        return key, None
    torch.autograd.graph.increment_version(state)
    return key, replayed[0]


def replay_or_run_step(
    key: Any, given: tuple[Any, ...], kernel: Callable[..., Tensor], values: tuple[Any, ...], state: Tensor
) -> Tensor:
    """Run `kernel(*values)`, which changes `state` without autograd's knowledge, through the plan cache."""
    out = plans.replay_or_run_one(key, given, kernel, values)
    torch.autograd.graph.increment_version(state)
    return out


def _step(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    from foci.ops.kernels_triton_step import step

    *optional, state, slots, scale = rest
    return step(q, k, v, state, scale, slots=slots, **dict(zip(_REST, optional, strict=True)))
