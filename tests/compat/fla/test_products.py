"""gated_delta_product, iplr, dplr, rwkv7 and comba against FLA's naive forms, at any decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci import Unsupported
from foci.compat import fla as ours
from tests.compat.fla.compare import Function, Problem, State, check, forms

H, K, V = 3, 8, 5
LONG = 40  # several steps a token: more than one chunk of the operator
LOW_RANK = {"q": (H, K), "k": (H, K), "v": (H, V), "a": (H, K), "b": (H, K)}
STATES = ((H, K, V),)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gated_delta_product(fla: Any, n: int, gated: bool) -> None:
    naive = fla.naive("gated_delta_product/naive.py", "naive_recurrent_gated_delta_product")

    def theirs(state: State, g: Tensor | None = None, **inputs: Tensor) -> tuple[Tensor, State]:
        return naive(**inputs, g=g, scale=K**-0.5, initial_state=state, num_householder=n)  # type: ignore[no-any-return]

    tokens = {"q": (H, K), "k": (H, K), "v": (H, V), "beta": (H,)} | ({"g": (H,)} if gated else {})
    problem = Problem(
        tokens, STATES, positive=("beta",), steps={"k": n, "v": n, "beta": n}, length=LONG,
        options={"num_householder": n} | ({} if gated else {"g": None}),
    )  # fmt: skip
    check(ours.chunk_gated_delta_product, theirs, problem, torch.float32)


def test_gated_delta_product_names_what_does_not_fit() -> None:
    q = torch.ones(1, 4, H, K)
    with pytest.raises(ValueError, match="q has 4 tokens, k 4 steps, g no tokens; expected 2 steps a token"):
        ours.chunk_gated_delta_product(q, q, q, None, q[..., 0], 2)
    with pytest.raises(ValueError, match="num_householder must be a whole number from 1 up, got 0"):
        ours.chunk_gated_delta_product(q, q, q, None, q[..., 0], 0)
    with pytest.raises(Unsupported, match="cp_context"):
        ours.chunk_gated_delta_product(q, q, q, None, q[..., 0], 1, cp_context=object())


def low_rank(fla: Any, scale: float = K**-0.5, reverse: bool = False) -> Function:
    """dplr_recurrence (its scale is K**-0.5) in the other layout; without a decay it is iplr_recurrence."""

    def theirs(state: State, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor | None = None) -> Any:
        gates = [] if gk is None else [gk]
        path = "dplr" if gates else "iplr"
        naive = fla.naive(f"generalized_delta_rule/{path}/naive.py", f"{path}_recurrence")
        tensors = [x.flip(1) if reverse else x for x in (q * scale * K**0.5, k, v, a, b, *gates)]
        out, final = naive(*(x.transpose(1, 2) for x in tensors), initial_state=state)
        return (out.transpose(1, 2).flip(1) if reverse else out.transpose(1, 2)), final

    return theirs


@forms("chunk_iplr_delta_rule", "fused_recurrent_iplr_delta_rule")
def test_iplr(fla: Any, name: str, dtype: torch.dtype) -> None:
    check(getattr(ours, name), low_rank(fla), Problem(LOW_RANK, STATES), dtype)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chunk_dplr_delta_rule", {}),
        ("chunk_dplr_delta_rule", {"lower_bound": -20}),
        ("chunk_dplr_delta_rule", {"lower_bound": -200}),
        ("chunk_dplr_delta_rule", {"safe_gate": True, "chunk_size": 16, "disable_recompute": True}),
        ("fused_recurrent_dplr_delta_rule", {}),
        ("fused_recurrent_dplr_delta_rule", {"reverse": True}),
    ],
)
def test_dplr(fla: Any, name: str, options: dict[str, Any]) -> None:
    problem = Problem({**LOW_RANK, "gk": (H, K)}, STATES, options=options, length=LONG)
    check(getattr(ours, name), low_rank(fla, reverse="reverse" in options), problem, torch.float32)


@pytest.mark.parametrize("lowest", [-30.0, -1e4, -torch.inf])
def test_a_state_that_is_forgotten_is_read_before_it_goes(fla: Any, lowest: float) -> None:
    inputs = Problem({**LOW_RANK, "gk": (H, K)}, STATES).make(1, LONG)
    inputs["gk"][:, ::3] = lowest
    inputs["gk"][:, 1::3, :, ::2] = lowest
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    out, state = ours.chunk_dplr_delta_rule(**inputs, output_final_state=True)  # type: ignore[arg-type]
    expected, final = low_rank(fla)(None, **inputs)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-5)
    mine = torch.autograd.grad(out.sum(), list(inputs.values()))
    for x, y in zip(mine, torch.autograd.grad(expected.sum(), list(inputs.values())), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "scale"),
    [
        ("chunk_rwkv7", {}, 1.0),
        ("chunk_rwkv7", {"safe_gate": True, "lower_bound": -0.6065306597126334, "chunk_size": 64}, 1.0),
        ("chunk_rwkv7", {"scale": None}, K**-0.5),
        ("fused_recurrent_rwkv7", {}, K**-0.5),
        ("fused_recurrent_rwkv7", {"scale": 1.0}, 1.0),
    ],
)
def test_rwkv7(fla: Any, name: str, options: dict[str, Any], scale: float) -> None:
    naive = low_rank(fla, scale)

    def theirs(state: State, r: Tensor, w: Tensor, **rest: Tensor) -> tuple[Tensor, State]:
        return naive(state, q=r, gk=w, **rest)

    tokens = {"r": (H, K), "w": (H, K)} | {name: shape for name, shape in LOW_RANK.items() if name != "q"}
    check(getattr(ours, name), theirs, Problem(tokens, STATES, options=options), torch.float32)


def test_the_final_state_is_returned_by_default_where_theirs_is() -> None:
    r = torch.ones(1, 2, H, K)
    assert ours.fused_recurrent_rwkv7(r, -r, r, r, r, r)[1] is not None
    assert ours.chunk_rwkv7(r, -r, r, r, r, r)[1] is None


@pytest.mark.parametrize("reverse", [False, True])
def test_rwkv7_in_the_letters_of_the_model(fla: Any, reverse: bool) -> None:
    naive = low_rank(fla, 1.0, reverse)

    def theirs(state: State, r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor) -> tuple[Tensor, State]:
        return naive(state, q=r, k=k, v=v, a=-kk, b=kk * a, gk=w)

    tokens = {"r": (H, K), "w": (H, K), "k": (H, K), "v": (H, V), "kk": (H, K), "a": (H, K)}
    check(ours.fused_mul_recurrent_rwkv7, theirs, Problem(tokens, STATES, options={"reverse": reverse}), torch.float32)


@pytest.mark.parametrize("heads", [H, 2 * H])
@forms("chunk_comba", "fused_recurrent_comba")
def test_comba(fla: Any, name: str, heads: int, dtype: torch.dtype) -> None:
    naive = fla.naive("comba/naive.py", "naive_chunk_comba")

    def theirs(state: State, q: Tensor, k: Tensor, p: Tensor, **rest: Tensor) -> tuple[Tensor, State]:
        q, k, p = (x.repeat_interleave(heads // H, dim=2) for x in (q, k, p))
        out, final = naive(q, k, p=p, **rest, initial_state=state, output_final_state=True, chunk_size=4)
        return out, final

    tokens = {"q": (H, K), "k": (H, K), "p": (H, K), "v": (heads, V), "g": (heads,), "beta": (heads,)}
    check(getattr(ours, name), theirs, Problem(tokens, ((heads, K, V),), positive=("beta",), length=LONG), dtype)


def test_comba_without_p_and_beta() -> None:
    q, k, v, g = Problem({"q": (H, K), "k": (H, K), "v": (H, V), "g": (H,)}, ()).make(1, 9).values()
    out, _ = ours.chunk_comba(q, k, v, None, g)
    torch.testing.assert_close(out, ours.chunk_comba(q, k, v, k, g, torch.ones(1, 9, H))[0])
    torch.testing.assert_close(out, ours.fused_recurrent_comba(q, k, None, v, g)[0])
    long, _ = ours.chunk_comba(3 * q, 2 * k, v, 5 * k, g, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(
        long, ours.chunk_comba(q / q.norm(dim=-1, keepdim=True), k, v, k, g)[0], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("options", [{}, {"safe_gate": True}], ids=["three steps", "two steps"])
def test_half_precision(options: dict[str, Any]) -> None:
    """Relative RMS error at most 5e-3 of output and gradients, against float64 on the same rounded inputs."""
    made = Problem({**LOW_RANK, "gk": (H, K)}, STATES).make(1, LONG)
    half = {name: x.bfloat16().requires_grad_() for name, x in made.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in half.items()}
    out, state = ours.chunk_dplr_delta_rule(**half, output_final_state=True, **options)  # type: ignore[arg-type]
    expected, _ = ours.chunk_dplr_delta_rule(**exact, **options)  # type: ignore[arg-type]
    assert state is not None and (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    mine = [out, *torch.autograd.grad(out.sum(), list(half.values()))]
    for x, y in zip(mine, [expected, *torch.autograd.grad(expected.sum(), list(exact.values()))], strict=True):
        assert (x.double() - y).square().mean().sqrt() <= 5e-3 * y.square().mean().sqrt()


ROWS = {"q": (4, H, K), "k": (4, H, K), "v": (4, H, V), "initial_state": (H, K, V)}
RANK_ONE = {"a": (4, H, K), "b": (4, H, K)}
RWKV7 = {**ROWS, **RANK_ONE, "r": (4, H, K), "w": (4, H, K)}
COMBA = {**ROWS, "p": (4, H, K), "g": (4, H), "beta": (4, H)}
TENSORS = {
    "chunk_gated_delta_product": {**ROWS, "k": (8, H, K), "v": (8, H, V), "g": (4, H), "beta": (8, H)},
    "chunk_iplr_delta_rule": {**ROWS, **RANK_ONE},
    "fused_recurrent_iplr_delta_rule": {**ROWS, **RANK_ONE},
    "chunk_dplr_delta_rule": {**ROWS, **RANK_ONE, "gk": (4, H, K)},
    "fused_recurrent_dplr_delta_rule": {**ROWS, **RANK_ONE, "gk": (4, H, K)},
    "chunk_rwkv7": {name: shape for name, shape in RWKV7.items() if name != "q"},
    "fused_recurrent_rwkv7": {name: shape for name, shape in RWKV7.items() if name != "q"},
    "fused_mul_recurrent_rwkv7": {
        name: shape for name, shape in (RWKV7 | {"kk": (4, H, K)}).items() if name not in ("q", "b")
    },
    "chunk_comba": COMBA,
    "fused_recurrent_comba": COMBA,
}


@pytest.mark.parametrize(("function", "name"), [(f, name) for f, shapes in TENSORS.items() for name in shapes])
def test_what_is_wrong_with_a_tensor_is_said_by_its_name_in_fla(function: str, name: str) -> None:
    """It ended in the words of torch.stack and of attributes that None has not."""
    given: dict[str, Any] = {each: torch.zeros(2, *shape) for each, shape in TENSORS[function].items()}
    given |= {"num_householder": 2} if "product" in function else {}
    getattr(ours, function)(**given)
    x = given[name]
    wrong = {
        "list": [1.0], "sparse": x.to_sparse(), "int": x.long(), "meta": x.to("meta"), "rank": x[..., 0],
        "last": torch.cat([x, x[..., :1]], -1), "tokens": torch.cat([x, x[:, :1]], 1),
    }  # fmt: skip
    wrong |= {"rows": x[:1]} if name != "initial_state" else {}
    for each in wrong.values():
        with pytest.raises((TypeError, ValueError)) as told:
            getattr(ours, function)(**given | {name: each})
        elsewhere = "expected meta" in str(told.value)  # the first says where the others are to be
        assert elsewhere or name in str(told.value).replace(",", " ").replace(":", " ").split(), told.value


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"lower_bound": "x"}, TypeError, "fla: lower_bound must be a number, got 'x'"),
        ({"lower_bound": 1.0}, ValueError, "lower_bound must be negative, got 1.0"),
        ({"lower_bound": torch.nan}, ValueError, "fla: lower_bound must be a finite number, got nan"),
        ({"cu_seqlens": [0, 4]}, TypeError, r"fla: cu_seqlens must be a tensor, got \[0, 4\]"),
        ({"cu_seqlens_cpu": [0, 4]}, TypeError, r"fla: cu_seqlens_cpu must be a tensor, got \[0, 4\]"),
        ({"output_final_state": None}, TypeError, "fla: output_final_state must be True or False, got None"),
    ],
)
def test_what_is_wrong_with_an_option_is_said_by_its_name_in_fla(
    change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    given = {each: torch.zeros(1, *shape) for each, shape in TENSORS["chunk_dplr_delta_rule"].items()}
    with pytest.raises(kind, match=f"^{message}"):
        ours.chunk_dplr_delta_rule(**given, **change)
