"""What the tests of softmax share: running a backend with every gradient, and the error budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import foci
from foci.core.spec import Case
from foci.ops.softmax.spec import SPEC

CPU = torch.device("cpu")
# What runs on a CPU: the kernels' own tests (test_kernels_*) run them in Triton's interpreter, in a process of its own.
BACKENDS = tuple(backend.name for backend in SPEC.backends if backend.name not in ("flash", "triton"))
OPAQUE = tuple(name for name in BACKENDS if name != "reference")
HALVES = (torch.bfloat16, torch.float16)


def case(name: str) -> Case:
    return next(case for case in SPEC.cases if case.name == name)


def inputs_of(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Any]:
    return case(name).make(dtype, CPU, seed)


def tiny(name: str) -> dict[str, Any]:
    """A few dozen numbers in float64, leaves that want a gradient: for gradcheck, which moves each of them."""
    draw = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)

    qkv = {"q": normal(1, 3, 2, 2), "k": normal(1, 4, 1, 2), "v": normal(1, 4, 1, 3)}
    without_row = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]]).bool()
    return qkv | {
        "plain": dict,
        "everything": lambda: {
            "bias": normal(2, 3, 4), "sink": normal(2), "softcap": 2.0,
            "mask": foci.Causal() & foci.Window(2, None) & foci.Lengths(torch.tensor([3])),
        },
        "empty rows": lambda: {"mask": foci.Dense(without_row)},
        "empty rows, sink": lambda: {"mask": foci.Dense(without_row), "sink": normal(2)},
        "packed": lambda: {"mask": foci.Packed(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 2, 3, 3]))},
        "packed, bias": lambda: {"bias": normal(3, 1), "mask": foci.Packed(torch.tensor([0, 3]), torch.tensor([0, 3]))},
    }[name]()  # fmt: skip


TINY = ("plain", "everything", "empty rows", "empty rows, sink", "packed", "packed, bias")


def gradcheck(inputs: dict[str, Any], backend: str, second: bool = False) -> bool:
    """Numerical against analytical derivatives of out and of lse, where it is finite."""
    names = [name for name in SPEC.differentiable if inputs.get(name) is not None]

    def call(*tensors: Tensor) -> Tensor:
        out, lse = foci.attention_with_lse(**inputs | dict(zip(names, tensors, strict=True)), backend=backend)
        return torch.cat([out.flatten(), lse[lse > -torch.inf]])

    check = torch.autograd.gradgradcheck if second else torch.autograd.gradcheck
    return check(call, tuple(inputs[name] for name in names))


def promoted(inputs: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The same numbers in another dtype."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def refused(inputs: Mapping[str, Any], backend: str, bias_gradient: bool = True) -> list[str]:
    """The backend's reasons against these inputs, a bias (if so said) and a sink wanting their gradients."""
    inputs = dict(inputs)
    for name in ("bias", "sink") if bias_gradient else ("sink",):
        if inputs.get(name) is not None:
            inputs[name] = inputs[name].detach().requires_grad_()
    return foci.explain("softmax", **inputs).refused.get(backend, [])


def pulls(inputs: Mapping[str, Any], seed: int = 7) -> tuple[Tensor, Tensor]:
    """Random gradients of out and of lse, of empty rows too."""
    generator = torch.Generator().manual_seed(seed)
    (B, T, H, _), V = inputs["q"].shape, inputs["v"].shape[-1]
    dtype = inputs["v"].dtype
    dout = torch.randn(B, T, H, V, generator=generator, dtype=torch.float64).to(dtype)
    dlse = torch.randn(B, T, H, generator=generator, dtype=torch.float64)
    return dout, dlse.to(torch.float64 if dtype == torch.float64 else torch.float32)


def evaluate(
    inputs: Mapping[str, Any],
    backend: str = "reference",
    *,
    through: tuple[Tensor | None, Tensor | None] | None = None,
    call: Callable[..., tuple[Tensor, ...]] | None = None,
    leave: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """out, lse and the gradient of every differentiable input (but `leave`) of a sum of both, weighted by `through`.

    Leaves keep their strides; dropout restarts from the same seed each time.
    """
    taken, leaves = dict(inputs), {}
    for name in SPEC.differentiable:
        if inputs.get(name) is not None and name not in leave:
            taken[name] = leaves[name] = inputs[name].detach().requires_grad_()
    torch.manual_seed(3)
    run = call or (lambda **kw: foci.attention_with_lse(kw.pop("q"), kw.pop("k"), kw.pop("v"), backend=backend, **kw))
    out, lse = run(**taken)
    weights = pulls(inputs) if through is None else through
    wanted = [(y, w.to(y.dtype)) for y, w in zip((out, lse), weights, strict=True) if w is not None and y.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in wanted], list(leaves.values()), [w for _, w in wanted], allow_unused=True
    )
    found = {"out": out.detach(), "lse": lse.detach()}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def difference(got: Tensor, truth: Tensor) -> Tensor:
    """|got - truth| in float64; 0 where both are the same infinity, inf where either is not finite otherwise."""
    assert got.shape == truth.shape, f"{list(got.shape)} is not {list(truth.shape)}"
    got, truth = got.double(), truth.double()
    return torch.where(got == truth, 0.0, (got - truth).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)


def rms(x: Tensor) -> float:
    return float(x.masked_fill(x == -torch.inf, 0.0).double().square().mean().sqrt()) if x.numel() else 0.0


def assert_close(got: Mapping[str, Tensor], truth: Mapping[str, Tensor], budget: float = 1e-11) -> None:
    """Every tensor within a relative RMS error; -inf in the same places. Float64 by default."""
    assert got.keys() == truth.keys()
    scale = max((rms(x) for x in truth.values()), default=1.0)
    for name, expected in truth.items():
        assert got[name] is not None, f"{name} is None"
        error = rms(difference(got[name], expected))
        # What cancels to nothing is measured on the scale of its siblings.
        size = rms(expected)
        assert error <= budget * (size if size > 1e-6 * scale else scale), f"{name}: {error:.2e} of {size:.2e}"


def assert_budget(got: Mapping[str, Tensor], truth: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> None:
    """Half precision: max error <= 2x and RMS error <= 1x that of the plain computation; LSE within 2e-4."""
    floor = max(rms(x) for x in truth.values()) * 1e-5
    for name, expected in truth.items():
        error, plain_error = difference(got[name], expected), difference(plain[name], expected)
        if not error.numel():
            continue
        if name == "lse":
            assert float(error.max()) <= 2e-4, f"lse: {float(error.max()):.2e}"
            continue
        assert float(error.max()) <= max(2 * float(plain_error.max()), floor), f"{name}: max {float(error.max()):.2e}"
        ratio = rms(error) / max(rms(plain_error), floor)
        assert ratio <= 1, f"{name}: RMS error {ratio:.3f} x that of the plain computation"
