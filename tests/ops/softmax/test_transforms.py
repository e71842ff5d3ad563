"""Softmax attention under torch.func, opcheck, the compiler and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, hessian, jacrev, jvp, vmap

import foci
from foci import Causal, Dense, Lengths, Mask, Packed, Unsupported, Window
from foci.core.spec import Case
from foci.ops.softmax.spec import SPEC
from tests.ops.softmax.problems import BACKENDS, CPU, OPAQUE, evaluate, inputs_of, promoted, refused, tiny

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": Causal()},
    "lengths": {"mask": Lengths(torch.tensor([3, 2])) & Causal()},
    "dense, empty row": {"mask": Dense(torch.tensor([True, False, True])[:, None])},
    "sink": {"sink": torch.randn(2, dtype=torch.float64)},
}


def qkv(*batch: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    shapes = ((2, 3, 2, 4), (2, 3, 1, 4), (2, 3, 1, 5))
    return tuple(torch.randn(*batch, *s, generator=draw, dtype=torch.float64) for s in shapes)  # type: ignore[return-value]


def loss(backend: str, options: dict[str, Any]) -> Callable[..., Tensor]:
    def of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = foci.attention_with_lse(q, k, v, **options, backend=backend)
        return out.square().sum() + torch.where(lse > -torch.inf, lse, 0.0).sin().sum()

    return of


TRANSFORMS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "grad": lambda b, o: grad(loss(b, o), (0, 1, 2))(*qkv()),
    "vmap": lambda b, o: vmap(lambda q, k, v: foci.attention_with_lse(q, k, v, **o, backend=b))(*qkv(3)),
    "vmap, other dimensions": lambda b, o: vmap(
        lambda q, k, v: foci.attention(q, k, v, **o, backend=b), in_dims=(2, None, -1), out_dims=1
    )(qkv(3)[0].movedim(0, 2), qkv()[1], qkv(3)[2].movedim(0, -1)),
    "jacrev": lambda b, o: jacrev(lambda q: foci.attention(q, *qkv()[1:], **o, backend=b))(qkv()[0]),
    "many gradients at once": lambda b, o: torch.autograd.functional.jacobian(
        lambda *x: foci.attention_with_lse(*x, **o, backend=b), qkv(), vectorize=True
    ),
    "vmap of grad": lambda b, o: vmap(grad(loss(b, o), (0, 1, 2)))(*qkv(3)),
    "grad of vmap": lambda b, o: grad(lambda *x: vmap(loss(b, o))(*x).sum(), (0, 2))(*qkv(3)),
    "vmap of vmap": lambda b, o: vmap(vmap(lambda q, k, v: foci.attention(q, k, v, **o, backend=b)))(*qkv(2, 3)),
    "vjp": lambda b, o: torch.func.vjp(loss(b, o), *qkv())[1](torch.tensor(2.0, dtype=torch.float64)),
}


@pytest.mark.parametrize("backend", OPAQUE)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_func_is_right(transform: str, options: str, backend: str) -> None:
    found, truth = (
        torch.utils._pytree.tree_leaves(TRANSFORMS[transform](name, OPTIONS[options]))
        for name in (backend, "reference")
    )
    assert len(found) == len(truth)
    for ours, expected in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_vmap_over_lengths_and_over_a_bias() -> None:
    q, k, v = qkv()
    lengths, bias = torch.tensor([[3, 2], [0, 1]]), torch.randn(3, 2, 3, 3, dtype=torch.float64)
    for backend in BACKENDS:
        found = vmap(lambda n, b=backend: foci.attention(q, k, v, mask=Lengths(n), backend=b))(lengths)
        for row, n in enumerate(lengths):
            torch.testing.assert_close(found[row], foci.attention(q, k, v, mask=Lengths(n)), rtol=0, atol=1e-12)
        found = vmap(lambda z, b=backend: foci.attention(q, k, v, bias=z, backend=b))(bias)
        for row, z in enumerate(bias):
            torch.testing.assert_close(found[row], foci.attention(q, k, v, bias=z), rtol=0, atol=1e-12)


def test_grad_of_a_bias_chooses_a_backend_that_has_it() -> None:
    q, k, v = qkv()
    bias = torch.randn(2, 3, 3, dtype=torch.float64)
    found = grad(lambda z: foci.attention(q, k, v, bias=z).square().sum())(bias)
    expected = grad(lambda z: foci.attention(q, k, v, bias=z, backend="reference").square().sum())(bias)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    with pytest.raises(Unsupported, match="bias needs a gradient"):
        grad(lambda z: foci.attention(q, k, v, bias=z, backend="aten").square().sum())(bias)


@pytest.mark.parametrize("backend", OPAQUE)
def test_forward_mode_and_second_derivatives_raise_and_never_give_zeros(backend: str) -> None:
    q, k, v = qkv()
    of = loss(backend, {})
    with pytest.raises(Unsupported, match=r"no forward-mode derivative \(jvp\)"):
        jvp(lambda q: of(q, k, v), (q,), (torch.ones_like(q),))
    with pytest.raises(NotImplementedError):
        hessian(lambda q: of(q, k, v))(q)
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(of(leaf, k, v), leaf, create_graph=True)
    with pytest.raises(Unsupported, match="has no second derivative") as caught:
        torch.autograd.grad(first.sum(), leaf)
    assert "backend='reference'" in str(caught.value)


def test_the_reference_has_both() -> None:
    q, k, v = qkv()
    of = loss("reference", OPTIONS["lengths"])
    tangent = torch.randn_like(q)
    forward = jvp(lambda q: of(q, k, v), (q,), (tangent,))[1]
    torch.testing.assert_close(forward, (grad(of)(q, k, v) * tangent).sum())
    assert torch.isfinite(hessian(lambda q: of(q, k, v))(q)).all()


OPCHECKED = (
    "plain",
    "everything",
    "packed cross",
    "padding, empty row",
    "bias per key",
    "sink",
    "dense and causal",
    "dropout",
)


@pytest.mark.parametrize("backend", OPAQUE)
@pytest.mark.parametrize("name", OPCHECKED)
def test_opcheck_of_the_pair(name: str, backend: str) -> None:
    inputs = inputs_of(name, torch.float32)
    if foci.explain("softmax", **inputs).refused.get(backend):
        return
    call = SPEC.bind(**inputs)
    forward, backward = (getattr(torch.ops.foci, f"softmax_{backend}_{end}").default for end in ("fwd", "bwd"))
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(forward, tuple(call), test_utils=utilities)
    out, lse = forward(*call)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    needs = [True, True, True, call.bias is not None and backend != "aten", call.sink is not None]
    for dout, dlse in ((out, finite), (out.new_zeros(()).expand_as(out), None), (None, finite)):
        torch.library.opcheck(backward, (dout, dlse, out, lse, needs, *call), test_utils=utilities)


@pytest.mark.parametrize("backend", OPAQUE)
def test_opcheck_in_full(backend: str) -> None:
    inputs = tiny("plain")
    call = SPEC.bind(**{n: x.detach() for n, x in inputs.items()})
    torch.library.opcheck(getattr(torch.ops.foci, f"softmax_{backend}_fwd").default, tuple(call))


@pytest.mark.parametrize("problem", SPEC.cases, ids=lambda problem: problem.name)
def test_fakes_equal_real_ones(problem: Case) -> None:
    """Shapes, dtypes and strides, forward and backward, on every backend."""
    inputs = problem.make(torch.bfloat16, CPU, 0)
    for backend in OPAQUE:
        if refused(inputs, backend):
            continue
        call = SPEC.bind(**inputs)
        needs = [True, True, True, call.bias is not None, call.sink is not None]
        forward, backward = (getattr(torch.ops.foci, f"softmax_{backend}_{end}").default for end in ("fwd", "bwd"))
        real = forward(*call)
        real_grads = backward(*real, *real, needs, *call)
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in call]
            fake = forward(*fakes)
            fake_grads = backward(*fake, *fake, needs, *fakes)
        for ours, declared in zip((*real, *real_grads), (*fake, *fake_grads), strict=True):
            assert (ours is None) == (declared is None)
            if ours is not None:
                assert (ours.shape, ours.dtype, ours.device) == (declared.shape, declared.dtype, declared.device)
                assert [s for s, n in zip(ours.stride(), ours.shape, strict=True) if n != 1] == [
                    s for s, n in zip(declared.stride(), declared.shape, strict=True) if n != 1
                ]


def steps(call: Callable[..., Any], inputs: dict[str, Any]) -> list[Tensor]:
    """Outputs and every gradient of one step of a function of tensors."""
    torch.manual_seed(3)
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items() if x.is_floating_point()}
    out, lse = call(**inputs | leaves)
    (out.square().sum() + torch.where(lse > -torch.inf, lse, 0.0).sin().sum()).backward()
    return [out.detach(), lse.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]


def packed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    return foci.attention_with_lse(q, k, v, mask=Packed(offsets) & Causal())


def lengths(q: Tensor, k: Tensor, v: Tensor, n: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    return foci.attention_with_lse(q, k, v, mask=Lengths(n) & Causal(), sink=sink)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return foci.attention_with_lse(q, k, v, bias=bias, softcap=5.0, mask=Causal())


def thrice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return foci.attention_with_lse(q, q, q + k + v, mask=Causal())


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    return foci.attention_with_lse(q, k, v, mask=Dense(allowed), scale=0.4)


def literal(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    return foci.attention_with_lse(q, k, v, mask=Lengths(n) & Causal(), backend="reference")


def dropped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return foci.attention_with_lse(q, k, v, dropout=0.3)


COMPILED: dict[Callable[..., Any], dict[str, Tensor]] = {
    packed: {"offsets": torch.tensor([0, 5, 5, 9])},
    lengths: {"n": torch.tensor([9]), "sink": torch.randn(4)},
    biased: {"bias": torch.randn(4, 9, 9)},
    dense: {"allowed": torch.rand(9, 9) < 0.7},
    thrice: {},
    literal: {"n": torch.tensor([4])},
}


def projection(T: int = 9) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(T)
    return {n: torch.randn(1, T, 4, 8, generator=draw) for n in ("q", "k", "v")}


@pytest.mark.parametrize("call", COMPILED, ids=lambda call: call.__name__)
def test_compiled_whole_is_eager(call: Callable[..., Any]) -> None:
    """fullgraph, masks as inputs, forward and backward. aot_eager traces all that inductor would."""
    inputs = projection() | COMPILED[call]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(steps(compiled, inputs), steps(call, inputs), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=1e-6)
    with torch.no_grad():
        for ours, eager in zip(compiled(**inputs), call(**inputs), strict=True):
            torch.testing.assert_close(ours, eager, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["softcap", "scale", "dropout"])
def test_compiled_with_a_number_that_changes(name: str) -> None:
    """From the second value on the compiler holds the number open."""

    def call(value: float) -> Tensor:
        return foci.attention(**inputs, **{name: value})

    inputs = projection()
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for value in (0.25, 0.5, 0.75):
        torch.manual_seed(0)
        found = compiled(value)
        torch.manual_seed(0)
        assert torch.equal(found, call(value))


def test_compiled_dropout_is_reproducible_and_drops() -> None:
    inputs = projection()
    torch._dynamo.reset()
    compiled = torch.compile(dropped, fullgraph=True, backend="aot_eager")
    first, again, eager = steps(compiled, inputs), steps(compiled, inputs), steps(dropped, inputs)
    for a, b, c in zip(first, again, eager, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=0, atol=1e-6)


GROWING: dict[str, Callable[[int], Mask | None]] = {
    "no mask": lambda T: None,
    "causal": lambda T: Causal(),
    "window": lambda T: Causal() & Window(5, None),
    "packed": lambda T: Packed(torch.tensor([0, T // 3, T])) & Causal(),
    "lengths": lambda T: Lengths(torch.tensor([T // 2])) & Causal(),
    "dense": lambda T: Dense(torch.arange(T)[:, None] % 5 > 0),
}


@pytest.mark.parametrize("wanting", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("mask", GROWING)
def test_at_most_two_graphs_over_six_lengths(mask: str, wanting: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor]:
        return foci.attention_with_lse(q, k, v, mask=mask)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for T in (9, 16, 33, 64, 7, 100):
        inputs, shown = projection(T), GROWING[mask](T)
        if wanting:
            found, eager = (steps(partial(f, mask=shown), inputs) for f in (compiled, call))
        else:
            found, eager = (list(f(**inputs, mask=shown)) for f in (compiled, call))
        for ours, expected in zip(found, eager, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert counter.frame_count <= 2


def test_queries_and_keys_grow_apart_in_two_graphs() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return foci.attention(q, k, v, mask=Causal(), softcap=3.0)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for T, S in ((9, 20), (16, 31), (33, 40), (5, 64), (7, 70), (10, 100)):
        inputs = projection(S) | {"q": projection(T)["q"]}
        torch.testing.assert_close(compiled(**inputs), call(**inputs), rtol=0, atol=1e-6)
    assert counter.frame_count <= 2


def test_an_exported_program_is_eager() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
            return foci.attention(q, k, v, mask=Lengths(n) & Causal())

    inputs = (*projection().values(), torch.tensor([4]))
    assert torch.equal(torch.export.export(Layer(), inputs).module()(*inputs), Layer()(*inputs))


@pytest.mark.parametrize("call", [packed, lengths, biased], ids=lambda call: call.__name__)
def test_compiled_by_inductor_is_eager(call: Callable[..., Any]) -> None:
    inputs = projection() | COMPILED[call]
    torch._dynamo.reset()
    compiled = torch.compile(lambda **kw: call(**kw), fullgraph=True)
    for ours, eager in zip(steps(compiled, inputs), steps(call, inputs), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=1e-5)


def test_autocast_is_compiled_too() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return foci.attention_with_lse(q, k, v, softcap=4.0)

    inputs = projection()
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(compiled(**inputs), call(**inputs), strict=True):
        assert ours.dtype == eager.dtype and torch.equal(ours, eager)


def test_a_gradient_under_autocast_keeps_the_budget() -> None:
    """The backward too runs as written when autocast is on around it."""
    inputs = inputs_of("softcap and causal", torch.float32)
    rounded = promoted(inputs, torch.bfloat16)
    expected = evaluate(rounded, "chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = evaluate(rounded, "chunked")
    for name, x in found.items():
        assert torch.equal(x, expected[name]), name
