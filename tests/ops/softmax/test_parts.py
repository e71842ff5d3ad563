"""Attention in parts of the keys: any cut, in any order, adds up to the whole, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core.spec import Backend
from foci.ops.masks import Dense, materialize
from foci.ops.softmax.call import Call, Gradients, Rows, bind
from foci.ops.softmax.dropout import placed
from foci.ops.softmax.spec import SPEC
from tests.ops.softmax.problems import BACKENDS, assert_close, case, evaluate, promoted, pulls

ABLE = tuple(name for name in BACKENDS if hasattr(SPEC.backend(name).load(), "forward_part"))


def cut(call: Call, backend: Backend) -> list[tuple[slice, Call]]:
    """The call in three parts of its keys, last first, its mask dense (what is cut out of it, none at all)."""
    B, T, S, H, *_ = call.sizes
    allowed = materialize(call.visible, T, S).expand(B, H, T, S) if any(x is not None for x in call[6:17]) else None
    parts = []
    for keys in (slice(S // 3 + 1, S), slice(0, S // 3), slice(S // 3, S // 3 + 1)):
        bias = call.bias
        if bias is not None and bias.shape[-1] != 1:
            bias = bias[..., keys]
        mask = None if allowed is None else Dense(allowed[..., keys])
        part = bind(call.q, call.k[:, keys], call.v[:, keys], mask=mask, bias=bias, softcap=call.softcap)
        seed = None if call.seed is None else placed(call.seed, s=(keys.start, 1))
        parts.append((keys, part._replace(scale=call.scale, seed=seed, dropout=call.dropout)))
    return parts


def in_parts(inputs: dict[str, Any], name: str, through: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """What `evaluate` gives, put together from parts by hand."""
    torch.manual_seed(3)
    call, backend = bind(**inputs), SPEC.backend(name)
    B, T, S, H, G, K, V = call.sizes
    dtype = call.accumulator
    parts, module = cut(call, backend), backend.load()
    out, lse = torch.zeros(B, T, H, V, dtype=dtype), torch.full((B, T, H), -torch.inf, dtype=torch.float64)
    if call.sink is not None:
        lse.copy_(call.sink)
    for _, part in parts:
        assert not backend.reasons(part)
        module.forward_part(part, out, lse)
    dout, dlse = (x.to(dtype) for x in through)
    lse = lse.to(dtype)
    rows = Rows(out, lse, dout, dlse, (dout * out).sum(-1) - dlse)
    dq, dk, dv = torch.zeros(B, T, H, K, dtype=dtype), *(torch.zeros(B, G, S, n, dtype=dtype) for n in (K, V))
    dbias = None if call.bias is None or name == "aten" else torch.zeros_like(call.bias, dtype=dtype)
    for keys, part in parts:
        local = dbias if dbias is None or dbias.shape[-1] == 1 else dbias[..., keys]
        there = (x.transpose(1, 2)[:, keys] for x in (dk, dv))
        module.backward_part(part, rows, Gradients(dq, *there, local))
    found = {"out": out.to(call.v.dtype), "lse": lse, "dq": dq, "dk": dk.transpose(1, 2), "dv": dv.transpose(1, 2)}
    return found | ({} if dbias is None else {"dbias": dbias})


@pytest.mark.parametrize("name", [case.name for case in SPEC.cases])
@pytest.mark.parametrize("backend", ABLE)
def test_parts_add_up_to_the_whole(backend: str, name: str) -> None:
    inputs = case(name).make(torch.float64, torch.device("cpu"), 0)
    call = bind(**inputs)
    if any(SPEC.backend(backend).reasons(part) for _, part in cut(call, SPEC.backend(backend))):
        assert backend == "aten"
        return
    through = pulls(inputs)
    through = through[0], through[1].masked_fill(evaluate(inputs)["lse"] == -torch.inf, 0.0)
    whole = evaluate(inputs, through=through)
    found = in_parts(inputs, backend, through)
    assert_close(found, {key: whole[key] for key in found})


@pytest.mark.parametrize("backend", ABLE)
def test_many_parts_are_as_exact_as_few(backend: str) -> None:
    """At logits near 800 each rounding of an lse costs 3e-5; sixty parts must not add sixty of them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 16, generator=generator) for n in (5, 60, 60))
    q = q * 60
    truth = evaluate(promoted({"q": q, "k": k, "v": v}))["out"]
    errors = []
    for step in (60, 1):
        out, lse = torch.zeros(1, 5, 1, 16), torch.full((1, 5, 1), -torch.inf, dtype=torch.float64)
        for start in range(0, 60, step):
            keys = slice(start, start + step)
            SPEC.backend(backend).load().forward_part(bind(q, k[:, keys], v[:, keys]), out, lse)
        errors.append(float((out - truth).abs().max()))
    assert errors[1] <= 2 * errors[0] + 2e-6, errors


@pytest.mark.parametrize("backend", ABLE)
def test_half_precision_is_summed_in_float32(backend: str) -> None:
    inputs = case("plain").make(torch.bfloat16, torch.device("cpu"), 0)
    through = pulls(inputs)
    truth = evaluate(promoted(inputs), through=through)
    found = in_parts(inputs, backend, through)
    assert found["dq"].dtype == torch.float32
    kept = [name for name in truth if name != "out"]  # which in_parts rounds to bfloat16
    assert_close({name: found[name] for name in kept}, {name: truth[name] for name in kept}, 1e-5)
