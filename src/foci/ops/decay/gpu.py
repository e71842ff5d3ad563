"""Triton kernels: the GPU backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foci.core.spec import Output
from foci.core.tune import target_of
from foci.ops import stretches
from foci.ops.decay import rules
from foci.ops.decay.call import NAME, Call
from foci.ops.gpu import CHUNK, chunks, placed, unsuitable

Gradients = tuple[Tensor | None, ...]


def reasons(call: Call) -> list[str]:
    *_, K, V, _ = call.sizes
    return unsuitable(call.v, call.sizes, (K, V))


def kept(call: Call) -> Output:
    """The state at the start of every chunk; plus two, as torch.compile specializes on sizes 0 and 1."""
    *_, H, K, V, _ = call.sizes
    dtype = torch.bfloat16 if call.v.dtype == torch.bfloat16 else torch.float32
    return Output("kept", (_slots(call) + 2 if call.causal else 0, H, K, V), dtype)


def _slots(call: Call) -> int:
    return chunks(call.v.shape[1], call.v.shape[0], call.offsets)


def forward(call: Call, keep: bool = False) -> tuple[Tensor, ...]:
    """out [B,T,H,V] in v's dtype and the final state [call.ends,H,K,V]; `keep`: and what `kept` declares."""
    from foci.ops.decay import kernels_triton_forward as kernels
    from foci.ops.decay import kernels_triton_walks as walks
    from foci.ops.decay.kernels_triton_pairs import prepared
    from foci.ops.kernels_triton_packed import room

    call = call._replace(offsets=placed(NAME, call.offsets, call.v))
    slots, (out, rest) = _slots(call), room(call, call.v)
    cut = _cheapest(call, rules.FORWARD) if walks.suits(call, keep) else None
    if cut is not None and not walks.enough(call, cut):
        cut = None
    maps = walks.empty_maps(call, cut)
    made = prepared(call, slots, False, rest, maps[2])
    states = kept(call).empty(call.v) if keep else None
    if cut is not None:
        *_, H, K, V, _ = call.sizes
        final = torch.empty(call.ends, H, K, V, dtype=torch.float32, device=call.v.device)
        sums = walks.sums(call, slots, cut.tokens == 0, rest)
        if maps[2] is None:
            maps = *kernels.maps(call, made, rules.walk("linear_states", call, lambda _: cut), sums), None
        walks.walk(call, made, sums, out, states, final, cut, maps)
    else:
        walk = _walk("linear_states", call)
        final = kernels.forward(call, made, out, states, slots, walk, rules.read("linear_out", call))
    rest.end()
    return (out, final) if states is None else (out, final, states)


def backward(call: Call, outputs: tuple[Tensor, ...], grads: Gradients, needs: list[bool]) -> Gradients:
    """Gradients of q, k, v, log_decay, bonus and state, None where not needed."""
    from foci.ops.decay import kernels_triton_backward, kernels_triton_constant, kernels_triton_keys
    from foci.ops.decay import kernels_triton_walks as walks
    from foci.ops.decay.kernels_triton_pairs import prepared
    from foci.ops.kernels_triton_packed import rooms

    call = call._replace(offsets=placed(NAME, call.offsets, call.v))
    slots, states = _slots(call), outputs[2] if call.causal else outputs[1]
    do = call.v.new_zeros(()).expand(call.v.shape) if grads[0] is None else grads[0]
    found, rest = rooms(call, (call.q, call.k, call.v, call.log_decay, call.bonus), needs[:5])
    costs = rules.FORWARD if call.per_channel else rules.BACKWARD
    cut = _cheapest(call, costs) if walks.suits_back(call, do) else None
    maps = walks.empty_maps(call, cut)
    made, (dq, dk, dv, dg, d_bonus) = prepared(call, slots, True, rest, maps[2]), found
    if dg is not None and call.constant:
        kernels_triton_keys.sums(kernels_triton_constant.parts(call, do, grads[1], slots), dg)
        dg, needs = None, [*needs[:3], False, *needs[4:]]
        if not any(needs):
            rest.end()
            return *found, None
    if cut is not None:
        given = (dq, dk, dv, dg), rest
        ends, d_state = _by_walks(call, (made, maps), states, do, grads[1], given, needs, cut)
    else:
        how = _walk("linear_dstates", call, 2 if made is None else 4), rules.read("linear_values", call)
        ends, d_state = kernels_triton_backward.backward(call, made, states, do, grads[1], dv, needs, slots, *how)
    if made is not None or cut is None:
        kernels_triton_keys.backward(call, made, states, ends, do, (dq, dk, dg, d_bonus), slots)
    rest.end()
    return *found, d_state


def _by_walks(
    call: Call,
    made: tuple[Any, tuple[Tensor | None, ...]],
    states: Tensor,
    do: Tensor,
    d_final: Tensor | None,
    found: tuple[Gradients, Any],
    needs: list[bool],
    cut: stretches.Cut,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the states at chunk ends, of gates per channel, and of the initial state; the others are in `found`.

    `found` comes with its Rest (kernels_triton_packed.py). `made`: the Pairs and maps of gates per channel.
    """
    from foci.ops.decay import kernels_triton_backward
    from foci.ops.decay import kernels_triton_walks as walks

    (dq, dk, dv, dg), rest = found
    of_q, of_k, _, of_g, _, of_state = needs
    (pairs, maps), slots = made, _slots(call)
    sums = walks.sums(call, slots, cut.tokens == 0, rest)
    parts = ends = d_state = None
    if maps[2] is None:
        walk = rules.walk("linear_dstates", call, lambda _: cut)
        maps = *kernels_triton_backward.maps(call, pairs, do, walk, sums), None
    if pairs is None and (of_q or of_k or of_g):
        dq, dk = (torch.empty_like(call.q, memory_format=torch.contiguous_format) if x is None else x for x in (dq, dk))
        parts = walks.sides(call, sums, states, do, d_final, (dq, dk, dg), slots, cut, maps)
    elif of_k or of_g:
        ends = torch.empty(slots, *states.shape[1:], dtype=states.dtype, device=do.device)
    if of_state and call.state is not None:
        d_state = torch.empty_like(call.state, memory_format=torch.contiguous_format)
    walks.walk_back(call, pairs, sums, do, d_final, (dv, ends, d_state, dg), parts, cut, maps)
    return ends, d_state


def _cheapest(call: Call, costs: Mapping[bool, Mapping[str, stretches.Costs]]) -> stretches.Cut:
    """The Cut of walks (sequential passes over chunks) with the least estimated time."""
    B, T, _, H, _, V, N = call.sizes
    packed, target = call.offsets is not None, target_of(call.v.device)
    gates = "channel" if call.per_channel else "" if call.log_decay is None else "token"
    return stretches.cheapest(N, B, T, packed, H * -(-V // 64), costs[packed][gates], target)


def _walk(kernel: str, call: Call, few: int = 4) -> rules.Walk:
    """The Walk (launch configuration) of a kernel that only advances states; outputs come from a second launch.

    Stretches have at least 16 chunks, and sequences at least four: then walking each chunk twice and combining the
    stretches before take less time than one long walk. With a program of four warps per processor (`few`), matmuls and
    memory are so busy that the second pass costs what the shorter walk saves; with half of that in a backward of gates
    per token or none, as measured on an H200.
    """
    B, T, *_, N = call.sizes
    packed, target = call.offsets is not None, target_of(call.v.device)
    rule = stretches.Rule(16 * CHUNK, few, most=32)
    return rules.walk(kernel, call, partial(stretches.cut, rule, N, B, T, packed, target))
