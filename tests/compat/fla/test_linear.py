"""linear_attn, retention, lightning_attn, simple_gla, gla and rwkv6 against FLA's naive forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.compat import fla as ours
from tests.compat.fla.compare import Function, Problem, State, check, forms

H, K, V = 3, 8, 5
QKV = {"q": (H, K), "k": (H, K), "v": (H, V)}


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def backwards(function: Function) -> Function:
    """The naive form over the tokens in the other order."""

    def run(state: State, **inputs: Tensor) -> tuple[Tensor, State]:
        turned = {name: x.flip(1) if x.dim() > 2 else x for name, x in inputs.items()}
        out, final = function(state, **turned)
        return out.flip(1), final

    return run


@forms("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn", "reverse")
@pytest.mark.parametrize("normalize", [False, True])
def test_linear_attn(fla: Any, name: str, normalize: bool, dtype: torch.dtype) -> None:
    naive = fla.naive("linear_attn/naive.py", "naive_recurrent_linear_attn")

    def theirs(state: State, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
        return naive(q, k, v, initial_state=state, output_final_state=True, normalize=normalize)  # type: ignore[no-any-return]

    # Keys and queries with a sign would divide by what is nearly zero, where float32 has no digits.
    states = ((H, K, V), (1, H, K)) if normalize else ((H, K, V),)
    problem = Problem(QKV, states, positive=("q", "k"), options={"normalize": normalize})
    if name == "reverse":
        problem = Problem(QKV, states, positive=("q", "k"), options={"normalize": normalize, "reverse": True})
        name, theirs = "fused_recurrent_linear_attn", backwards(theirs)  # type: ignore[assignment]
    check(getattr(ours, name), theirs, problem, dtype)


def test_linear_attn_normalises_by_default_where_theirs_does() -> None:
    q, k, v = (torch.rand(1, 4, H, 8) for _ in "qkv")
    plain, _ = ours.fused_recurrent_linear_attn(q, k, v)
    for function in (ours.chunk_linear_attn, ours.fused_chunk_linear_attn):
        divided, _ = function(q, k, v)
        assert not torch.allclose(plain, divided)


def test_linear_attn_wants_the_states_of_its_form() -> None:
    q, k, v, s, z = (torch.rand(1, 4, H, 8) for _ in range(5))
    with pytest.raises(ValueError, match="initial_state is not a pair"):
        ours.chunk_linear_attn(q, k, v, initial_state=s)
    with pytest.raises(ValueError, match="initial_state is a pair"):
        ours.chunk_linear_attn(q, k, v, initial_state=(s, z), normalize=False)
    with pytest.raises(ValueError, match=r"z has shape \[1, 4, 3, 8\]"):
        ours.chunk_linear_attn(q, k, v, initial_state=(s, z))


@forms("chunk_retention", "fused_chunk_retention", "fused_recurrent_retention", "parallel_retention")
def test_retention(fla: Any, name: str, dtype: torch.dtype) -> None:
    naive, states = fla.naive("retention/naive.py", "naive_retention"), fla.naive("gla/naive.py", "naive_recurrent_gla")
    q, k, v = Problem(QKV, ()).make(2, 17).values()
    (expected,) = heads_first(naive(*heads_first(q, k, v)))
    out, nothing = getattr(ours, name)(q.to(dtype), k.to(dtype), v.to(dtype))
    assert nothing is None
    torch.testing.assert_close(out.float(), expected, rtol=1e-4, atol=1e-5)
    if name == "parallel_retention":
        return

    def theirs(state: State, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
        decay = (1 - 2.0 ** (-5.0 - torch.arange(H))).log()[:, None].expand(q.shape)
        return states(q, k, v, decay, initial_state=state, output_final_state=True)  # type: ignore[no-any-return]

    check(getattr(ours, name), theirs, Problem(QKV, ((H, K, V),)), dtype)


@forms("chunk_lightning_attn", "fused_recurrent_lightning_attn")
def test_lightning_attn(fla: Any, name: str, dtype: torch.dtype) -> None:
    naive = fla.naive("simple_gla/naive.py", "naive_recurrent_simple_gla")

    def theirs(state: State, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
        decay = -(8 / H * (1 - 3 / 12)) * torch.arange(H, dtype=torch.float)
        return naive(q, k, v, decay.expand(q.shape[:3]), initial_state=state)  # type: ignore[no-any-return]

    problem = Problem(QKV, ((H, K, V),), options={"layer_idx": 3, "num_layers": 12})
    check(getattr(ours, name), theirs, problem, dtype)
    for layers, said in ((0, "num_layers must be a whole number, at least 1, got 0"), (None, "num_layers must be")):
        with pytest.raises(ValueError, match=said):
            getattr(ours, name)(*(torch.ones(1, 2, H, 4),) * 3, 0, layers)
    with pytest.raises(ValueError, match=r"layer_idx must be in 0\.\.num_layers=12, got 13"):
        getattr(ours, name)(*(torch.ones(1, 2, H, 4),) * 3, 13, 12)


@forms("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "reverse")
def test_simple_gla(fla: Any, name: str, dtype: torch.dtype) -> None:
    naive = fla.naive("simple_gla/naive.py", "naive_recurrent_simple_gla")

    def theirs(state: State, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, State]:
        return naive(q, k, v, g, initial_state=state, output_final_state=True)  # type: ignore[no-any-return]

    problem = Problem({**QKV, "g": (H,)}, ((H, K, V),))
    if name == "reverse":
        problem = Problem(problem.tokens, problem.states, options={"reverse": True})
        check(ours.fused_recurrent_simple_gla, backwards(theirs), problem, dtype)
    else:
        check(getattr(ours, name), theirs, problem, dtype)


def test_simple_gla_with_a_constant_decay(fla: Any) -> None:
    naive = fla.naive("simple_gla/naive.py", "naive_recurrent_simple_gla")
    gamma = torch.tensor([-0.5, -0.1, -2.0])

    def theirs(state: State, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, State]:
        return naive(q, k, v, gamma.expand(q.shape[:3]), initial_state=state)  # type: ignore[no-any-return]

    problem = Problem(QKV, ((H, K, V),), options={"g_gamma": gamma})
    for name in ("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla"):
        check(getattr(ours, name), theirs, problem, torch.float32)
        q = torch.ones(1, 2, H, 4)
        with pytest.raises(ValueError, match="g and g_gamma were both given"):
            getattr(ours, name)(q, q, q, q[..., 0], gamma)


def test_parallel_simple_gla_gives_the_scores(fla: Any) -> None:
    naive = fla.naive("simple_gla/naive.py", "naive_parallel_simple_gla")
    q, k, v, g = Problem({**QKV, "g": (H,)}, ()).make(2, 17).values()
    expected, scores = naive(q, k, v, g)
    out, attentions = ours.parallel_simple_gla(q, k, v, g, output_attentions=True)
    torch.testing.assert_close(out.float(), expected, rtol=1e-4, atol=1e-5)
    assert attentions is not None
    torch.testing.assert_close(attentions.float(), scores, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, (attentions @ v.transpose(1, 2)).transpose(1, 2), rtol=1e-4, atol=1e-5)
    ends = torch.tensor([0, 17])
    packed, nothing = ours.parallel_simple_gla(q[:1], k[:1], v[:1], g[:1], cu_seqlens=ends)
    torch.testing.assert_close(packed, out[:1])
    assert nothing is None
    with pytest.raises(ValueError, match="output_attentions=True and cu_seqlens were both given"):
        ours.parallel_simple_gla(q[:1], k[:1], v[:1], g[:1], output_attentions=True, cu_seqlens=ends)


@forms("chunk_gla", "fused_chunk_gla", "fused_recurrent_gla", "reverse")
def test_gla(fla: Any, name: str, dtype: torch.dtype) -> None:
    naive = fla.naive("gla/naive.py", "naive_recurrent_gla")
    gate = "g" if name in ("chunk_gla", "fused_chunk_gla") else "gk"

    def theirs(state: State, q: Tensor, k: Tensor, v: Tensor, **gates: Tensor) -> tuple[Tensor, State]:
        return naive(q, k, v, gates[gate], initial_state=state, output_final_state=True)  # type: ignore[no-any-return]

    problem = Problem({**QKV, gate: (H, K)}, ((H, K, V),))
    if name == "reverse":
        problem = Problem(problem.tokens, problem.states, options={"reverse": True})
        check(ours.fused_recurrent_gla, backwards(theirs), problem, dtype)
    else:
        check(getattr(ours, name), theirs, problem, dtype)


def by_columns(state: State, q: Tensor, k: Tensor, v: Tensor, gv: Tensor, gk: Tensor | None = None) -> Any:
    """The recurrence with both decays, from FLA's kernel: h * exp(gk) over rows, * exp(gv) over columns, then k v^T."""
    h = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1]) if state is None else state
    outs = []
    for t in range(q.shape[1]):
        rows = 1 if gk is None else gk[:, t].exp()[..., None]
        h = h * rows * gv[:, t].exp()[..., None, :] + k[:, t, ..., None] * v[:, t, :, None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, h))
    return torch.stack(outs, 1), h


@pytest.mark.parametrize("rows", [False, True])
def test_gla_with_a_decay_of_columns(rows: bool) -> None:
    tokens = {**QKV, "gv": (H, V)} | ({"gk": (H, K)} if rows else {})
    check(ours.fused_recurrent_gla, by_columns, Problem(tokens, ((H, K, V),)), torch.float32)
    turned = Problem(tokens, ((H, K, V),), options={"reverse": True})
    check(ours.fused_recurrent_gla, backwards(by_columns), turned, torch.float32)


@forms("chunk_rwkv6", "fused_recurrent_rwkv6", "reverse")
def test_rwkv6(fla: Any, name: str, dtype: torch.dtype) -> None:
    naive = fla.naive("rwkv6/recurrent_naive.py", "naive_recurrent_rwkv6")

    def theirs(state: State, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, State]:
        out, final = naive(*heads_first(r, k, v, w), u, initial_state=state, output_final_state=True)
        return out.transpose(1, 2), final

    tokens = {"r": (H, K), "k": (H, K), "v": (H, V), "w": (H, K)}
    problem = Problem(tokens, ((H, K, V),), whole={"u": (H, K)})
    if name == "reverse":
        problem = Problem(tokens, ((H, K, V),), whole={"u": (H, K)}, options={"reverse": True})
        check(ours.fused_recurrent_rwkv6, backwards(theirs), problem, dtype)
    else:
        check(getattr(ours, name), theirs, problem, dtype)


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("chunk_simple_gla", ()),
        ("chunk_gla", (K,)),
        ("fused_chunk_gla", (K,)),
        ("fused_recurrent_gla", (K,)),
        ("fused_recurrent_simple_gla", ()),
        ("fused_recurrent_retention", None),
    ],
)
def test_states_with_v_first(name: str, gate: tuple[int, ...] | None) -> None:
    tokens = QKV if gate is None else {**QKV, "g": (H, *gate)}
    q, k, v, *g = Problem(tokens, ()).make(2, 17).values()
    state = torch.randn(2, H, K, V)
    function = getattr(ours, name)
    out, final = function(q, k, v, *g, initial_state=state, output_final_state=True)
    turned = state.transpose(-1, -2)
    other, last = function(q, k, v, *g, initial_state=turned, output_final_state=True, state_v_first=True)
    assert final is not None and last is not None
    torch.testing.assert_close(other, out)
    torch.testing.assert_close(last, final.transpose(-1, -2))


def test_scale_and_half_precision() -> None:
    q, k, v, g = Problem({**QKV, "g": (H, K)}, ()).make(2, 17).values()
    out, _ = ours.chunk_gla(q, k, v, g, scale=1.0)
    torch.testing.assert_close(out, ours.chunk_gla(q, k, v, g)[0] * K**0.5)
    half, state = ours.chunk_gla(*(x.bfloat16() for x in (q, k, v)), g, output_final_state=True)
    assert state is not None and (half.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    q, k = q.sigmoid(), k.sigmoid()
    rounded = [x.bfloat16() for x in (q, k, v)]
    divided, _ = ours.chunk_linear_attn(*rounded)
    exact, _ = ours.chunk_linear_attn(*(x.double() for x in rounded))
    error = (divided.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 5e-3
