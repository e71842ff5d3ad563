"""delta_rule, gated_delta_rule, kda and gdn2 against FLA's naive forms and gates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import foci
from foci import Unsupported
from foci.compat import fla as ours
from tests.compat.fla.compare import Function, Problem, State, check, forms

G, H, K, V = 2, 4, 8, 5
QKV = {"q": (H, K), "k": (H, K), "v": (H, V), "beta": (H,)}
GROUPED = {"q": (G, K), "k": (G, K), "v": (H, V)}
STATES = ((H, K, V),)


def spread(x: Tensor) -> Tensor:
    return x.repeat_interleave(H // x.shape[2], dim=2)


def delta_rule(fla: Any, l2: bool = False) -> Function:
    naive = fla.naive("delta_rule/naive.py", "delta_rule_recurrence")

    def theirs(state: State, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None) -> tuple[Tensor, State]:
        beta = torch.ones_like(v[..., 0]) if beta is None else beta
        out, final = naive(*(x.transpose(1, 2) for x in (*unit(l2, q, k), v, beta)), initial_state=state)
        return out.transpose(1, 2), final

    return theirs


def unit(wanted: bool, *tensors: Tensor) -> list[Tensor]:
    """FLA's kernels: x / sqrt(sum(x * x) + 1e-6)."""
    return [x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) if wanted else x for x in tensors]


@pytest.mark.parametrize("l2", [False, True], ids=["as they are", "l2norm"])
@forms("chunk_delta_rule", "fused_chunk_delta_rule", "fused_recurrent_delta_rule")
def test_delta_rule(fla: Any, name: str, l2: bool, dtype: torch.dtype) -> None:
    problem = Problem(QKV, STATES, positive=("beta",), options={"use_qk_l2norm_in_kernel": l2})
    check(getattr(ours, name), delta_rule(fla, l2), problem, dtype)


def test_delta_rule_without_beta(fla: Any) -> None:
    problem = Problem({name: shape for name, shape in QKV.items() if name != "beta"}, STATES)
    check(ours.fused_recurrent_delta_rule, delta_rule(fla), problem, torch.float32)


@pytest.mark.parametrize("l2", [False, True], ids=["as they are", "l2norm"])
@forms("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
def test_gated_delta_rule(fla: Any, name: str, l2: bool, dtype: torch.dtype) -> None:
    naive = fla.naive("gated_delta_rule/naive.py", "naive_recurrent_gated_delta_rule")

    def theirs(state: State, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, State]:
        q, k = unit(l2, spread(q), spread(k))
        return naive(q, k, v, beta, g, initial_state=state, output_final_state=True)  # type: ignore[no-any-return]

    tokens = {**GROUPED, "g": (H,), "beta": (H,)}
    problem = Problem(tokens, STATES, positive=("beta",), options={"use_qk_l2norm_in_kernel": l2})
    check(getattr(ours, name), theirs, problem, dtype)


def test_gdn_is_the_short_name() -> None:
    assert ours.chunk_gdn is ours.chunk_gated_delta_rule
    assert ours.fused_recurrent_gdn is ours.fused_recurrent_gated_delta_rule


@pytest.mark.parametrize("decays", [(), ("gk",), ("g", "gk"), ("gv",), ("g", "gk", "gv")], ids=" ".join)
def test_gated_delta_rule_with_every_decay(decays: tuple[str, ...]) -> None:
    """FLA's kernel: h *= exp(g), exp(gk) over its rows, exp(gv) over its columns, then the delta rule."""

    def theirs(state: State, q: Tensor, k: Tensor, v: Tensor, **rest: Tensor) -> tuple[Tensor, State]:
        q, k = spread(q), spread(k)
        h = q.new_zeros(q.shape[0], H, K, V) if state is None else state
        outs = []
        for t in range(q.shape[1]):
            for name, shape in (("g", (1, 1)), ("gk", (K, 1)), ("gv", (1, V))):
                if name in rest:
                    h = h * rest[name][:, t].exp().unflatten(-1, (-1,)).reshape(len(q), H, *shape)
            beta = rest["beta"][:, t, :, None] if "beta" in rest else 1
            error = beta * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], h))
            h = h + k[:, t, ..., None] * error[..., None, :]
            outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * K**-0.5, h))
        return torch.stack(outs, 1), h

    shapes = {"g": (H,), "gk": (H, K), "gv": (H, V), "beta": (H,)}
    tokens = {**GROUPED, **{name: shapes[name] for name in (*decays, *(("beta",) if len(decays) != 1 else ()))}}
    check(ours.fused_recurrent_gated_delta_rule, theirs, Problem(tokens, STATES, positive=("beta",)), torch.float32)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_of_gated_delta_rule(fla: Any, name: str, bias: bool) -> None:
    theirs = fla.extract("gated_delta_rule/gate.py", "naive_gdn_gate")
    tokens = {**GROUPED, "g": (H,), "beta": (H,)}
    q, k, v, g, beta = Problem(tokens, (), decays=(), positive=("beta",)).make(2, 9).values()
    A_log, dt_bias = torch.randn(H), torch.randn(H) if bias else None
    function = getattr(ours, name)
    out, _ = function(q, k, v, g=g, beta=beta, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
    expected, _ = function(q, k, v, g=theirs(g, A_log, dt_bias), beta=beta)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("name", "gates"), [("chunk_kda", "kda"), ("fused_recurrent_kda", "kda"), ("chunk_gdn2", "gdn2")]
)
@pytest.mark.parametrize("bound", [None, -3.0])
def test_gate_of_kda(fla: Any, name: str, gates: str, bound: float | None) -> None:
    tokens = {**GROUPED, "g": (H, K)}
    q, k, v, g = Problem(tokens, (), decays=()).make(2, 9).values()
    rest = [torch.rand(2, 9, H)] if gates == "kda" else [torch.rand(2, 9, H, K), torch.rand(2, 9, H, V)]
    A_log, dt_bias = torch.randn(H), torch.randn(H * K)
    function = getattr(ours, name)

    def gated(**given: Any) -> Tensor:
        out: Tensor = function(q, k, v, g, *rest, use_gate_in_kernel=True, dt_bias=dt_bias, lower_bound=bound, **given)[
            0
        ]
        return out

    if bound is None:
        expected = fla.extract("kda/gate.py", "naive_kda_gate")(g, A_log, dt_bias)
    else:
        lower = fla.extract("kda/gate.py", "naive_kda_lowerbound_gate")
        expected = lower(g, A_log, dt_bias, bound)
        torch.testing.assert_close(gated(), function(q, k, v, lower(g, None, dt_bias, bound), *rest)[0])
        if name.startswith("chunk"):
            torch.testing.assert_close(gated(A_log=A_log, safe_gate=True), gated(A_log=A_log))
    torch.testing.assert_close(gated(A_log=A_log), function(q, k, v, expected, *rest)[0])


@pytest.mark.parametrize(
    "name",
    ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"],
)
def test_beta_before_its_sigmoid(name: str) -> None:
    g = (H, K) if "kda" in name else (H,)
    q, k, v, g_, beta = Problem({**GROUPED, "g": g, "beta": (H,)}, ()).make(2, 9).values()
    function = getattr(ours, name)
    raw, _ = function(q, k, v, g=g_, beta=beta, use_beta_sigmoid_in_kernel=True)
    torch.testing.assert_close(raw, function(q, k, v, g=g_, beta=beta.sigmoid())[0])
    raw, _ = function(q, k, v, g=g_, beta=beta, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    torch.testing.assert_close(raw, function(q, k, v, g=g_, beta=2 * beta.sigmoid())[0])
    with pytest.raises(ValueError, match="allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True"):
        function(q, k, v, g=g_, beta=beta, allow_neg_eigval=True)


@pytest.mark.parametrize("l2", [False, True], ids=["as they are", "l2norm"])
@forms("chunk_kda", "fused_recurrent_kda")
def test_kda(fla: Any, name: str, l2: bool, dtype: torch.dtype) -> None:
    naive = fla.naive("kda/naive.py", "naive_recurrent_kda")

    def theirs(state: State, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, State]:
        q, k = unit(l2, q, k)
        return naive(q, k, v, g, beta, initial_state=state, output_final_state=True)  # type: ignore[no-any-return]

    tokens = {**GROUPED, "g": (H, K), "beta": (H,)}
    problem = Problem(tokens, STATES, positive=("beta",), options={"use_qk_l2norm_in_kernel": l2})
    check(getattr(ours, name), theirs, problem, dtype)


@pytest.mark.parametrize("grouped", [False, True])
@forms("chunk_gdn2", "fused_recurrent_gdn2")
def test_gdn2(fla: Any, name: str, grouped: bool, dtype: torch.dtype) -> None:
    naive = fla.naive("gdn2/naive.py", "naive_recurrent_gdn2")

    def theirs(state: State, q: Tensor, k: Tensor, **rest: Tensor) -> tuple[Tensor, State]:
        out, final = naive(spread(q), spread(k), **rest, initial_state=state, output_final_state=True)
        return out, final

    tokens = {
        **(GROUPED if grouped else {"q": (H, K), "k": (H, K), "v": (H, V)}),
        "g": (H, K),
        "b": (H, K),
        "w": (H, V),
    }
    check(getattr(ours, name), theirs, Problem(tokens, STATES, decays=("g",), positive=("w",)), dtype)


def test_gates_of_gdn2_may_be_wider_than_keys() -> None:
    """b in float32, as a gate is: what is erased is rounded to keys' dtype."""
    given = [torch.randn(1, 20, H, K).bfloat16() for _ in range(2)] + [torch.randn(1, 20, H, V).bfloat16()]
    g, b, w = -torch.rand(1, 20, H, K), torch.rand(1, 20, H, K), torch.rand(1, 20, H, V)
    q, k, v = given
    out, written, erased = ours.chunk_gdn2(q, k, v, g, b, w)[0], (w * v).bfloat16(), (b * k).bfloat16()
    right, _ = foci.delta_rule(q, k, written, torch.ones(1, 20, H), log_decay=g, erase=erased)
    assert out.dtype == torch.bfloat16 and torch.equal(out, right)


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("chunk_gated_delta_rule", ((H,), (H,))),
        ("fused_recurrent_gated_delta_rule", ((H,),)),
        ("chunk_kda", ((H, K), (H,))),
        ("fused_recurrent_kda", ((H, K), (H,))),
        ("chunk_gdn2", ((H, K), (H, K), (H, V))),
        ("fused_recurrent_gdn2", ((H, K), (H, K), (H, V))),
    ],
)
def test_states_with_v_first(name: str, rest: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = (F.normalize(torch.randn(2, 9, *shape), dim=-1) for shape in GROUPED.values())
    gates = [-torch.rand(2, 9, *shape) for shape in rest]
    state = torch.randn(2, H, K, V)
    function = getattr(ours, name)
    out, final = function(q, k, v, *gates, initial_state=state, output_final_state=True)
    turned = state.transpose(-1, -2)
    other, last = function(q, k, v, *gates, initial_state=turned, output_final_state=True, state_v_first=True)
    torch.testing.assert_close(other, out)
    torch.testing.assert_close(last, final.transpose(-1, -2))


ONES = {"q": (G, K), "k": (G, K), "v": (H, V), "g": (H, K), "beta": (H,)}


def test_what_is_not_honoured_is_refused_with_reasons() -> None:
    kda = {name: torch.zeros(1, 3, *shape) for name, shape in ONES.items()}
    gdn = {**kda, "g": torch.zeros(1, 3, H)}
    for given in (
        {"cp_context": object()},
        {"use_graph": True},
        {"return_intermediate_states": True},
        {"max_num_seqs": 3},
    ):
        with pytest.raises(Unsupported, match=next(iter(given))) as caught:
            ours.chunk_kda(**kda, **given)  # type: ignore[arg-type]
        assert "foci.compat.fla.chunk_kda" in str(caught.value) and len(caught.value.reasons) == 1
    for given in ({"cp_context": object()}, {"chunk_indices": torch.zeros(1, 2)}):
        with pytest.raises(Unsupported, match=next(iter(given))):
            ours.chunk_gated_delta_rule(**gdn, **given)  # type: ignore[arg-type]
    gdn2 = {name: kda[name] for name in "qkvg"} | {"b": kda["g"], "w": kda["v"]}
    for given in ({"cp_context": object()}, {"return_intermediate_states": True}):
        with pytest.raises(Unsupported, match=next(iter(given))):
            ours.chunk_gdn2(**gdn2, **given)  # type: ignore[arg-type]
