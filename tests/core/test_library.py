"""The door to torch.library: ops, fakes and the autograd.Function, on an operator small enough to know by heart."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from foci.core import library
from foci.core.errors import Unsupported
from foci.core.library import Runner, _needs_dispatch, _schema
from foci.core.spec import Backend, Output, Spec

X = Float[Tensor, "B K"]
Weight = Float[Tensor, "K"]


class Call(NamedTuple):
    """y = factor * x * weight (weight absent: 1); total = sum_k y."""

    x: X
    weight: Weight | None
    places: Tensor | None
    factor: float
    steps: int | None
    flag: bool


def equation(call: Call) -> tuple[Tensor, Tensor]:
    y = call.factor * call.x * (1.0 if call.weight is None else call.weight)
    return y, y.sum(-1)


def outputs(call: Call) -> tuple[Output, ...]:
    return Output("y", tuple(call.x.shape), call.x.dtype), Output("total", (call.x.shape[0],), call.x.dtype)


def backward(call: Call, made: Any, grads: Any, needs: list[bool]) -> tuple[Tensor | None, ...]:
    dy, dtotal = grads
    dy = torch.zeros_like(call.x) if dy is None else dy
    dy = dy if dtotal is None else dy + dtotal[:, None]
    dx = call.factor * dy * (1.0 if call.weight is None else call.weight) if needs[0] else None
    return dx, (call.factor * dy * call.x).sum(0) if needs[1] else None


def modules() -> Iterator[Backend]:
    for name in ("opaque", "plain"):
        module = ModuleType(f"toy_backend_{name}")
        module.reasons = lambda call: []

        module.forward = equation
        if name == "opaque":
            module.backward = backward
        sys.modules[module.__name__] = module
        yield Backend(name, module.__name__)
    yield Backend("absent", "toy_backend_absent", needs=("no_such_package_of_anyone",))


SPEC = Spec(
    name="toy", equation="", paper="", reference=lambda: (), plain=lambda: (), output_names=("y", "total"),
    differentiable=("x", "weight"), cases=(), call=Call, outputs=outputs, backends=tuple(modules()),
)  # fmt: skip
RUN = Runner(SPEC)
FWD, BWD = torch.ops.foci.toy_opaque_fwd.default, torch.ops.foci.toy_opaque_bwd.default


def toy(x: Tensor, weight: Tensor | None = None, backend: str = "opaque") -> tuple[Tensor, ...]:
    return RUN(SPEC.backend(backend), Call(x, weight, None, 3.0, None, True))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_the_schema_is_the_call() -> None:
    assert _schema(Call) == "Tensor x, Tensor? weight, Tensor? places, float factor, int? steps, bool flag"
    assert str(BWD._schema).startswith(
        "foci::toy_opaque_bwd(Tensor? grad_y, Tensor? grad_total, Tensor saved_y, Tensor saved_total, bool[] needs,"
    )
    assert str(BWD._schema).endswith("-> (Tensor?, Tensor?)")


def test_a_backend_without_backward_is_plain_torch() -> None:
    assert not hasattr(torch.ops.foci, "toy_plain_fwd")
    x = draw(2, 3).requires_grad_()
    y, _ = toy(x, backend="plain")
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 3.0))


def test_the_ops_of_an_absent_package_exist() -> None:
    """Saved programs name them; only calling them needs the package."""
    assert torch.ops.foci.toy_absent_fwd.default is not None
    with torch._subclasses.FakeTensorMode():
        y, total = torch.ops.foci.toy_absent_fwd(torch.empty(2, 3), None, None, 1.0, None, True)
        assert (y.shape, total.shape) == ((2, 3), (2,))


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("x", "weight")])
@pytest.mark.parametrize("through", [("y",), ("total",), ("y", "total")])
def test_gradients_land_in_their_slots(wanted: tuple[str, ...], through: tuple[str, ...]) -> None:
    inputs = {"x": draw(2, 3), "weight": draw(3)}
    found = []
    for backend in ("opaque", "plain"):
        leaves = {name: value.clone().requires_grad_(name in wanted) for name, value in inputs.items()}
        y, total = toy(**leaves, backend=backend)
        loss = sum((out.square().sum() for name, out in (("y", y), ("total", total)) if name in through))
        loss.backward()
        found.append([leaf.grad for leaf in leaves.values()])
    for name, ours, expected in zip(inputs, *found, strict=True):
        assert (ours is None) == (name not in wanted)
        assert ours is None or torch.allclose(ours, expected, rtol=1e-13)


def test_an_absent_input_has_no_gradient() -> None:
    x = draw(2, 3).requires_grad_()
    toy(x, None)[0].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(toy, (draw(2, 3).requires_grad_(), draw(3).requires_grad_()))


@pytest.mark.parametrize("enter", [torch.no_grad, torch.inference_mode])
def test_nothing_to_differentiate_calls_the_op_itself(enter: Callable[[], Any]) -> None:
    with enter():
        y, _ = toy(draw(2, 3).requires_grad_())
    assert y.grad_fn is None and not y.requires_grad
    assert toy(draw(2, 3))[0].grad_fn is None


class Noted(TorchDispatchMode):
    """The ops of foci that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [str(func)] if "foci" in str(func) else []
        return func(*args, **(kwargs or {}))


class Marked(Tensor):
    """A subclass, whose memory is not to be touched behind its back."""


def test_training_without_anyone_to_watch_calls_no_op_and_with_anyone_both() -> None:
    x, weight = draw(2, 3).requires_grad_(), draw(3).requires_grad_()

    def trained(weight: Tensor) -> list[Tensor]:
        y, total = toy(x, weight)
        return [y, *torch.autograd.grad((y.sin() + total[:, None]).sum(), (x, weight))]

    expected = trained(weight)
    with Noted() as noted:
        assert all(map(torch.equal, trained(weight), expected))
    assert noted.seen == ["foci.toy_opaque_fwd.default", "foci.toy_opaque_bwd.default"]
    with pytest.MonkeyPatch.context() as patch:
        watched: list[bool] = []
        patch.setattr(library, "_needs_dispatch", lambda call: watched.append(_needs_dispatch(call)) or watched[-1])
        assert all(map(torch.equal, trained(weight), expected))
        assert watched == [False, False]
        trained(weight.detach().as_subclass(Marked).requires_grad_())
        assert watched == [False, False, True, True]


def test_a_profiler_sees_the_ops() -> None:
    x = draw(2, 3).requires_grad_()
    with torch.profiler.profile() as profile:
        toy(x)[0].sum().backward()
        toy(x.detach())
    seen = [event.name for event in profile.events() if event.name.startswith("foci::")]
    assert seen == ["foci::toy_opaque_fwd", "foci::toy_opaque_bwd", "foci::toy_opaque_fwd"]


def test_a_tensor_left_over_from_a_transform_is_an_ordinary_one() -> None:
    x, left = draw(2, 3), []
    grad(lambda z: left.append(z) or toy(z)[0].sum())(x)
    y, _ = toy(left[0])
    assert torch.equal(y, 3 * x) and not y.requires_grad


def test_func_transforms_agree_with_plain_torch() -> None:
    x, weight, batch = draw(2, 3), draw(3), draw(4, 2, 3)

    def loss(x: Tensor, weight: Tensor, backend: str) -> Tensor:
        y, total = toy(x, weight, backend)
        return y.square().sum() + total.sin().sum()

    transforms: dict[str, Callable[[str], Any]] = {
        "grad": lambda b: grad(lambda x, w: loss(x, w, b), (0, 1))(x, weight),
        "vmap": lambda b: vmap(lambda x: toy(x, weight, b))(batch),
        "vmap over dimension 1": lambda b: vmap(lambda x: toy(x, weight, b), in_dims=1)(batch.movedim(0, 1)),
        "vmap over weights": lambda b: vmap(lambda w: toy(x, w, b))(draw(4, 3) * 0 + weight),
        "jacrev": lambda b: jacrev(lambda x: toy(x, weight, b))(x),
        "vmap of grad": lambda b: vmap(grad(lambda x: loss(x, weight, b)))(batch),
        "grad of vmap": lambda b: grad(lambda w: vmap(lambda x: loss(x, w, b))(batch).sum())(weight),
        "vmap of vmap": lambda b: vmap(vmap(lambda x: toy(x, weight, b)))(batch.expand(2, 4, 2, 3)),
    }
    for name, transform in transforms.items():
        ours, expected = (torch.utils._pytree.tree_leaves(transform(backend)) for backend in ("opaque", "plain"))
        assert len(ours) == len(expected), name
        for a, b in zip(ours, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-12), name


def test_vmap_over_nothing_gives_nothing() -> None:
    y, total = vmap(toy)(draw(0, 2, 3))
    assert y.shape == (0, 2, 3) and total.shape == (0, 2)


@pytest.mark.parametrize("through", [("y",), ("total",), ("y", "total")])
@pytest.mark.parametrize("rows", [1, 3])
def test_many_gradients_at_once(rows: int, through: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_grads_batched`: what stands for many has no memory, so the backward is given one after the other."""
    x, weight = draw(2, 3).requires_grad_(), draw(3).requires_grad_()
    made = dict(zip(("y", "total"), toy(x, weight), strict=True))
    module, seen = sys.modules["toy_backend_opaque"], []
    noted = lambda call, made, grads, needs: seen.append(grads) or backward(call, made, grads, needs)  # noqa: E731
    monkeypatch.setattr(module, "backward", noted)
    douts = [draw(rows, *made[name].shape) for name in through]
    found = torch.autograd.grad(
        [made[name] for name in through], (x, weight), douts, is_grads_batched=True, retain_graph=True
    )
    assert [g.shape for g in found] == [(rows, 2, 3), (rows, 3)]
    assert len(seen) == rows and all(x is None or x.data_ptr() for grads in seen for x in grads)
    for row in range(rows):
        dy, dtotal = (dict(zip(through, douts, strict=True)).get(name) for name in ("y", "total"))
        given = (dy if dy is None else dy[row], dtotal if dtotal is None else dtotal[row])
        expected = backward(Call(x, weight, None, 3.0, None, True), None, given, [True, True])
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a[row], b, rtol=1e-12)


def test_a_vectorised_jacobian() -> None:
    x, weight = draw(2, 3), draw(3)
    one, many = (
        torch.autograd.functional.jacobian(toy, (x, weight), vectorize=vectorize) for vectorize in (False, True)
    )
    torch.testing.assert_close(many, one)


class Weighted(torch.nn.Module):
    """Of anything that takes a weight."""

    def __init__(self, function: Callable[..., Any] = toy) -> None:
        super().__init__()
        self.weight, self.function = torch.nn.Parameter(draw(3)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)[0]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "graph",
    [
        lambda module, x: torch.export.export(module, (x,)).module(),
        lambda module, x: torch.jit.trace(module, x, check_trace=False),
    ],
    ids=["export", "jit.trace"],
)
def test_a_graph_that_was_made_of_it_is_of_any_rows_and_trains(graph: Callable[..., Any], trains: bool) -> None:
    """The op is called by itself there."""
    module, x = Weighted(), draw(2, 3)
    with torch.set_grad_enabled(trains):
        made = graph(module, x)
    made(x).square().sum().backward()
    (weight,) = made.parameters()
    assert torch.allclose(weight.grad, 18.0 * (x.square().sum(0) * weight.detach()))


def test_a_graph_that_was_made_of_it_refuses_what_it_would_get_wrong() -> None:
    made, x = torch.export.export(Weighted(lambda x, _: toy(x)), (draw(2, 3),)).module(), draw(2, 3)
    with forward_ad.dual_level(), pytest.raises(Unsupported, match="no forward-mode derivative"):
        made(forward_ad.make_dual(x, x))
    for way in (lambda: jvp(made, (x,), (x,)), lambda: grad(lambda x: made(x).sum())(x)):
        with pytest.raises(Unsupported, match="toy_opaque_fwd: a transform of torch"):
            way()


@pytest.mark.parametrize("trains", [False, True])
def test_a_trace_holds_the_op_and_not_its_memory(trains: bool) -> None:
    traced = torch.jit.trace(lambda x: toy(x)[0], draw(2, 3).requires_grad_(trains), check_trace=False)
    assert "foci::toy_opaque_fwd" in str(traced.graph)
    x = draw(5, 3)
    assert torch.equal(traced(x), 3.0 * x)


def test_autograd_sees_nothing_of_what_is_done_within_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(call: Call) -> tuple[Tensor, ...]:
        y = torch.empty_like(call.x)
        torch.mul(call.x, call.factor, out=y)  # which autograd refuses
        return y, y.sum(-1)

    monkeypatch.setattr(SPEC.backend("opaque").load(), "forward", in_place)
    x = draw(2, 3).requires_grad_()
    FWD(x, None, None, 3.0, None, True)[0].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_functional_call() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(draw(3))

        def forward(self, x: Tensor) -> Tensor:
            return toy(x, self.weight)[0]

    layer, x = Layer(), draw(2, 3)
    found = grad(lambda w: functional_call(layer, {"weight": w}, x).sum())(layer.weight.detach())
    assert torch.allclose(found, 3.0 * x.sum(0))


def test_forward_mode_raises_instead_of_giving_zeros() -> None:
    x, tangent = draw(2, 3), draw(2, 3)
    message = r"toy: backend 'opaque' has no forward-mode derivative \(jvp\)"
    with pytest.raises(Unsupported, match=message):
        jvp(lambda x: toy(x)[0], (x,), (tangent,))
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), forward_ad.dual_level(), pytest.raises(Unsupported, match=message):
            toy(forward_ad.make_dual(x, tangent))
    with pytest.raises(Unsupported, match=message):
        torch.func.hessian(lambda x: toy(x)[0].sum())(x)
    with forward_ad.dual_level():  # a level without tangents is nobody's derivative
        assert torch.equal(toy(x)[0], 3.0 * x)
    assert torch.equal(jvp(lambda x: toy(x, backend="plain")[0], (x,), (tangent,))[1], 3.0 * tangent)


def test_a_second_derivative_raises_instead_of_giving_zeros() -> None:
    x = draw(2, 3).requires_grad_()
    (first,) = torch.autograd.grad(toy(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(Unsupported, match="toy: backend 'opaque' has no second derivative"):
        torch.autograd.grad(first.sum(), x)
    with pytest.raises(Unsupported, match="backend='reference' for double backward"):
        grad(lambda x: grad(lambda x: toy(x)[0].square().sum())(x).sum())(x.detach())


def test_saved_tensors_are_guarded_against_being_written() -> None:
    x = draw(2, 3).requires_grad_()
    weight = draw(3)
    y, _ = toy(x, weight)
    weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_backward_reads_outputs_as_declared_however_hooks_saved_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """saved_tensors_hooks may unpack other strides, by which a kernel that reads a pointer would read other numbers."""
    seen: list[Tensor] = []

    def looking(call: Call, made: Any, grads: Any, needs: list[bool]) -> tuple[Tensor | None, ...]:
        seen.extend(made)
        return backward(call, made, grads, needs)

    monkeypatch.setattr(sys.modules["toy_backend_opaque"], "backward", looking)
    x, weight = draw(2, 3).requires_grad_(), draw(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.t().contiguous(), Tensor.t):
        y, total = toy(x, weight)
    for mode in (nullcontext(), Noted()):  # which calls the op
        with mode:
            assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], 3.0 * weight.expand(2, 3))
    assert all(map(torch.equal, seen, (y, total) * 2)) and all(map(Tensor.is_contiguous, seen))


def test_what_is_given_may_be_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a backend gives views, which autograd would let nobody change, whether or not a backward follows."""
    forward = sys.modules["toy_backend_opaque"].forward
    monkeypatch.setattr(sys.modules["toy_backend_opaque"], "forward", lambda call: tuple(x[:] for x in forward(call)))
    x = draw(2, 3).requires_grad_()
    y, total = toy(x)
    assert y.requires_grad and torch.equal(total.clone(), total.mul_(1.0)) and y.mul_(2.0).requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # they are saved
        y.sum().backward()


def test_opcheck() -> None:
    x, weight = draw(2, 3), draw(3)
    torch.library.opcheck(FWD, (x, weight, None, 2.0, None, True))
    torch.library.opcheck(FWD, (x, None, torch.arange(3), 2.0, 4, False))
    y, total = FWD(x, weight, None, 2.0, None, True)
    for needs in ([True, True], [True, False], [False, True]):
        torch.library.opcheck(BWD, (y, total, y, total, needs, x, weight, None, 2.0, None, True))
        torch.library.opcheck(BWD, (None, total, y, total, needs, x, weight, None, 2.0, None, True))


def test_compiled_is_eager() -> None:
    """The whole pair traces with fullgraph; backend aot_eager, since the C++ compiler has nothing to add here."""
    inputs = draw(2, 3), draw(3)

    def both(call: Callable[..., Any]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        y, total = call(*leaves)
        (y.square().sum() + total.sin().sum()).backward()
        return [y.detach(), total.detach(), *(leaf.grad for leaf in leaves)]

    compiled = torch.compile(toy, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(both(compiled), both(toy), strict=True):
        assert torch.equal(ours, eager)
    with torch.no_grad():
        assert torch.equal(compiled(*inputs)[0], toy(*inputs)[0])


def test_one_tensor_in_two_places_compiles() -> None:
    """Self-attention on one tensor, or offsets that serve queries and keys: the compiler refuses it as it stands."""

    def twice(x: Tensor) -> Tensor:
        return RUN(SPEC.backend("opaque"), Call(x, None, x, 3.0, None, True))[0].sum()

    x = draw(2, 3).requires_grad_()
    (compiled,) = torch.autograd.grad(torch.compile(twice, fullgraph=True, backend="aot_eager")(x), x)
    assert torch.equal(compiled, torch.autograd.grad(twice(x), x)[0])


def test_a_backend_may_keep_a_tensor_for_its_backward() -> None:
    module = ModuleType("toy_backend_keeping")
    module.reasons = lambda call: []
    module.kept = lambda call: Output("kept", tuple(call.x.shape), call.x.dtype)
    module.forward = lambda call, keep=False: equation(call) + ((3 * call.x,) if keep else ())

    def backward_from_kept(call: Call, made: Any, grads: Any, needs: list[bool]) -> tuple[Tensor | None, ...]:
        return backward(call._replace(x=made[2] / 3), made, grads, needs)

    module.backward = backward_from_kept
    sys.modules[module.__name__] = module
    keeping = Backend("keeping", module.__name__)
    spec = Spec(
        "toy_keeping", "", "", equation, equation, ("y", "total"), ("x", "weight"), (), call=Call, outputs=outputs,
        backends=(keeping,),
    )  # fmt: skip
    run = Runner(spec)
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    for mode in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        y, total = mode(keeping, Call(x, weight, None, 2.0, None, False))
        (y.sum() + total.sum()).backward()
        assert torch.allclose(x.grad, 4.0 * weight.expand(2, 3))
        assert torch.allclose(weight.grad, 4.0 * x.sum(0))
        x.grad = weight.grad = None
    with torch.no_grad():
        assert len(run(keeping, Call(x, weight, None, 2.0, None, False))) == 2
    alone = torch.ops.foci.toy_keeping_keeping_alone.default
    y, total = alone(x, weight, None, 2.0, None, False)  # by a program that was exported without gradients
    (y.sum() + total.sum()).backward()
    assert torch.allclose(x.grad, 4.0 * weight.expand(2, 3))


def test_a_backend_is_given_numbers_as_they_lie_in_memory(monkeypatch) -> None:
    """The imaginary part of a conjugate is negated when it is read, which a kernel would not do."""
    module, seen = SPEC.backend("opaque").load(), []
    monkeypatch.setattr(module, "forward", lambda call: seen.append(call.x.is_neg()) or equation(call))

    def looking(call: Call, made: Any, grads: Any, needs: list[bool]) -> tuple[Tensor | None, ...]:
        seen.append(call.x.is_neg() or any(g is not None and g.is_neg() for g in grads))
        return backward(call, made, grads, needs)

    monkeypatch.setattr(module, "backward", looking)

    def negated() -> Tensor:
        return torch.view_as_complex(torch.randn(4, 3, 2)).conj().imag

    assert negated().is_neg()
    x = negated()
    assert torch.equal(toy(x)[0], toy(x.clone(), backend="plain")[0])
    for first, second in ((negated(), negated()), (torch.randn(4, 3), negated())):
        ours, theirs = first.detach().requires_grad_(), first.detach().clone().requires_grad_()
        found = [
            torch.autograd.grad(toy(x, backend=b)[0], x, second)[0] for x, b in ((ours, "opaque"), (theirs, "plain"))
        ]
        assert torch.equal(*found)
    assert seen == [False] * 5
    assert _needs_dispatch((torch.randn(3), torch._efficientzerotensor((3,))))
