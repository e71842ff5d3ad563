"""The reference against the equation written as loops over numbers, and its own derivatives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci import Lengths, Mask, Packed
from foci.core.spec import Case
from foci.ops.masks import All
from foci.ops.softmax.dropout import keep
from foci.ops.softmax.spec import SPEC
from tests.ops.oracle import visible
from tests.ops.softmax.problems import CPU, TINY, case, evaluate, gradcheck, inputs_of, tiny


def loops(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """The equation of the docstring, one number after another."""
    (B, T, H, K), (_, S, G, V) = q.shape, v.shape
    bias, sink, softcap = options.get("bias"), options.get("sink"), options.get("softcap")
    scale, p = options.get("scale", K**-0.5), options.get("dropout", 0.0)
    parts = () if mask is None else mask.parts if isinstance(mask, All) else (mask,)
    allowed = visible(parts, B, H, T, S).tolist()
    bias = None if bias is None else bias.expand(B, H, T, S).tolist()
    index = [torch.arange(n) for n in (B, H, T, S)]
    kept = keep(options["seed"], p, *torch.meshgrid(*index, indexing="ij")).tolist() if p else None
    qs, ks, vs = q.tolist(), k.tolist(), v.tolist()
    out, lse = torch.zeros(B, T, H, V, dtype=torch.float64), torch.full((B, T, H), -torch.inf, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for t in range(T):
                z = {}
                for s in range(S):
                    if allowed[b][h][t][s]:
                        x = scale * sum(x * y for x, y in zip(qs[b][t][h], ks[b][s][g], strict=True))
                        x = x if softcap is None else softcap * math.tanh(x / softcap)
                        z[s] = x + (0.0 if bias is None else bias[b][h][t][s])
                total = sum(map(math.exp, z.values())) + (0.0 if sink is None else math.exp(sink[h]))
                if total > 0:
                    lse[b, t, h] = math.log(total)
                for s, x in z.items():
                    weight = math.exp(x) / total
                    if kept is not None:
                        weight = weight / (1 - p) if kept[b][h][t][s] else 0.0
                    out[b, t, h] += weight * torch.tensor(vs[b][s][g], dtype=torch.float64)
    return out, lse


@pytest.mark.parametrize("problem", SPEC.cases, ids=lambda problem: problem.name)
def test_the_reference_is_the_equation(problem: Case) -> None:
    inputs = problem.make(torch.float64, CPU, 5)
    torch.manual_seed(3)
    drawn = SPEC.bind(**inputs).seed if inputs.get("dropout") else None
    found = evaluate(inputs)
    out, lse = loops(**inputs, **({} if drawn is None else {"seed": drawn}))
    torch.testing.assert_close(found["out"], out, rtol=0, atol=1e-13)
    torch.testing.assert_close(found["lse"], lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", TINY)
def test_gradcheck_and_its_second_derivative(name: str) -> None:
    assert gradcheck(tiny(name), "reference")
    assert gradcheck(tiny(name), "reference", second=True)


def test_it_computes_in_float32_and_answers_in_the_dtype_of_v() -> None:
    for dtype in SPEC.dtypes:
        out, lse = foci.attention_with_lse(**case("plain").make(dtype, CPU, 0), backend="reference")
        assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)


def test_plain_keeps_every_intermediate_in_the_working_dtype() -> None:
    """The yardstick of half precision must itself round: its lse is far worse than the reference's."""
    inputs = inputs_of("plain", torch.bfloat16)
    exact, plain = SPEC.reference(**inputs)[1], SPEC.plain(**inputs)[1]
    assert plain.dtype == torch.float32
    assert float((exact - plain).abs().max()) > 1e-3


def test_without_keys_lse_has_a_gradient_of_nothing() -> None:
    q, k, v = (torch.randn(1, n, 2, 4, requires_grad=True) for n in (3, 0, 0))
    out, lse = foci.attention_with_lse(q, k, v, backend="reference")
    assert not out.any() and (lse == -torch.inf).all()
    for gradient, x in zip(
        torch.autograd.grad(lse, (q, k, v), torch.ones_like(lse), allow_unused=True), (q, k, v), strict=True
    ):
        assert gradient is None or torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("mask", "B", "good", "bad", "message"),
    [
        (Lengths, 2, [3, 6], [3, 9], "Lengths: kv_lengths must"),
        (Lengths, 2, [3, 6], [3, -1], "Lengths: kv_lengths must"),
        (Packed, 1, [0, 2, 3, 6], [0, 5, 3, 6], "Packed: q_offsets must"),
        (Packed, 1, [0, 2, 3, 6], [0, 2, 3, 7], "Packed: q_offsets must"),
        (Packed, 1, [0, 2, 3, 6], [1, 2, 3, 6], "Packed: q_offsets must"),
    ],
    ids=str,
)
def test_where_rows_end_is_checked_compiled_and_mapped_too(
    mask: Any, B: int, good: list[int], bad: list[int], message: str
) -> None:
    x = torch.randn(B, 6, 1, 8)

    def call(ends: torch.Tensor) -> torch.Tensor:
        return foci.attention(x, x, x, mask=mask(ends), backend="reference")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for error, run in ((RuntimeError, compiled), (ValueError, lambda ends: torch.func.vmap(call)(ends[None])[0])):
        torch.testing.assert_close(run(torch.tensor(good)), call(torch.tensor(good)))
        with pytest.raises(error, match=message):
            run(torch.tensor(bad))
