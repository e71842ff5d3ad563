"""Prove a routed model: outputs and gradients against the original and against float64, per site and end to end."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from foci.accelerate.calls import (
    SOFTMAX,
    Call,
    arguments,
    in_float64,
    one_head,
    reference_elements,
    run_on_backend,
    spec_of,
)
from foci.accelerate.sites import Site
from foci.check.compare import HALF, RELATIVE, VANISHED, Error, compare, difference, extent, rms
from foci.core.errors import a_type
from foci.nn import Cache

# Elements beyond which the reference runs for one head only, as it holds the whole T x S matrix, or all states.
_MOST_ENTRIES = 2**27
_SAME = 2.0**-5  # by how much a scaled loss may move gradients; its rounding moves those of deep models by 0.005
_KEPT = 8  # states that autograd saves per step of a recurrent reference; of softmax's scores it saves about one


@dataclass(frozen=True)
class Row:
    """One comparison: what was compared with what, its error and budget; `left_out`: how many elements were excluded.

    Excluded are elements not finite in the original but finite in the reference: they overflow in half precision.
    """

    where: str
    what: str
    against: str
    error: float
    budget: float
    left_out: int = 0

    @property
    def ok(self) -> bool:
        return self.error <= self.budget  # NaN is not

    @property
    def text(self) -> str:
        return f"{self.error:.1e} of {self.budget:.0e}{self.excluded}"

    @property
    def excluded(self) -> str:
        return f" but {self.left_out} numbers, not finite in the original" if self.left_out else ""


@dataclass(frozen=True)
class Problem:
    """A model and how to call it, and what its loss is multiplied by."""

    model: nn.Module
    inputs: Mapping[str, Any]
    loss_scale: float = 1.0

    def results(self, output: Any) -> list[Tensor]:
        """The output's floating-point tensors, without positions that an attention mask [B, L] marks as padding.

        Results at padding are not used, and arbitrary if all of a row's keys are padding.
        """
        tensors = tensors_of(output)
        real = self.inputs.get("attention_mask")
        if not isinstance(real, Tensor) or real.dim() != 2:
            return tensors
        return [x[real.bool()] if x.dim() > 2 and x.shape[:2] == real.shape else x for x in tensors]

    def run(self, model: nn.Module | None = None, inputs: Mapping[str, Any] | None = None) -> Any:
        given = self.inputs if inputs is None else inputs
        return (model or self.model)(**{name: _fresh(name, value) for name, value in given.items()})


def _fresh(name: str, value: Any) -> Any:
    """A copy of a cache (also inside a mapping), since a call appends to it; other values unchanged."""
    if not hasattr(value, "get_seq_length") and not isinstance(value, Cache):
        parts = (
            {key: _fresh(f"{name}[{key!r}]", part) for key, part in value.items()} if isinstance(value, Mapping) else {}
        )
        return parts if any(part is not value[key] for key, part in parts.items()) else value
    try:
        return copy.deepcopy(value)
    except RuntimeError as error:
        raise ValueError(
            f"accelerate: {name} of example_inputs is {a_type(value)} that cannot be copied for each call; "
            "expected a cache without a graph: fill it under torch.no_grad()"
        ) from error


def relative_rms(value: Tensor, truth: Tensor) -> float:
    """The root mean square of value - truth over that of truth; infinite where either is NaN or only one is finite."""
    return _relative(rms(difference(value, truth)), extent(truth))


def _relative(error: float, scale: float) -> float:
    return error / scale if scale and math.isfinite(scale) else error


def max_error(values: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
    """The worst relative error of several tensors; infinite when shapes or their number differ."""
    if [value.shape for value in values] != [truth.shape for truth in truths]:
        return float("inf")
    return max((relative_rms(a, b.to(a.device)) for a, b in zip(values, truths, strict=True)), default=0.0)


def tensors_of(output: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output, in order, without a cache."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = [value for key, value in output.items() if key != "past_key_values"]
    return [tensor for part in output for tensor in tensors_of(part)] if isinstance(output, list | tuple) else []


def prove_site(site: Site, backend: str) -> list[Row]:
    """Every distinct call of a site on its planned backend against the float64 reference: out, lse, every gradient.

    The budget is the checker's. If the activations are so ill-conditioned that a plain float32 computation exceeds it,
    the budget is twice the plain computation's error.
    """
    rows: list[Row] = []
    for call, _ in site.calls:
        spec = spec_of(call)
        whole = reference_elements(call) * (_KEPT if spec.recurrent else 1) <= _MOST_ENTRIES
        call = call if whole else one_head(call)
        dtype = call[0].dtype
        truth = _forward_backward(in_float64(call), "reference", dtype)
        ours = _forward_backward(call, backend, dtype)
        plain = _forward_backward(call, None, dtype)
        for what, value in ours.items():
            error = _judge(value, truth[what], plain[what], dtype, log=what in spec.logs, recurrent=spec.recurrent)
            # If the reference is exactly zero, the error must be, too.
            budget = error.budget or (0.0 if error.size else RELATIVE)
            rows.append(Row(site.name, what, "float64" if whole else "float64, one head", error.size, budget))
    return rows


def _judge(
    value: Tensor | None, truth: Tensor | None, plain: Tensor | None, dtype: torch.dtype, *, log: bool, recurrent: bool
) -> Error:
    if value is None or truth is None or plain is None:
        return Error(0.0 if value is truth else float("inf"), RELATIVE)
    error = compare(value, truth, difference(plain, truth), dtype, log=log, recurrent=recurrent)
    if not error.ok and not log and dtype in (torch.float32, torch.float64):
        own = relative_rms(plain, truth)
        return Error(error.size, max(error.budget, 2 * own if math.isfinite(own) else 0.0))
    return error


def _forward_backward(call: Call, backend: str | None, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Outputs by name, and "gradient of <name>" of each floating-point input (softmax: q, k, v).

    Of what the call itself returns, with cotangents that `dtype` holds, so that they are the same for all. A state's,
    where nothing reads it, would be felt by the last tokens alone, and be most of the gradients.
    """
    spec = spec_of(call)
    names = "qkv" if spec.name == SOFTMAX else [name for name in spec.differentiable if getattr(call, name) is not None]
    leaves = {name: getattr(call, name).detach().requires_grad_() for name in names}
    changed = call._replace(**leaves)
    # Without a backend: the plain computation of the same equation in the same dtype.
    found = run_on_backend(changed, backend) if backend else spec.plain(**arguments(changed))
    outputs = dict(zip(spec.output_names, found, strict=True))
    generator = torch.Generator().manual_seed(0)
    # No cotangent for lse, which may be -inf.
    unread = {*spec.logs, *(() if getattr(call, "return_state", True) else ("state",))}
    given = [out for name, out in outputs.items() if name not in unread]
    cotangents = [_normal(out, generator).to(dtype).to(out) for out in given]
    torch.autograd.backward(given, cotangents)
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
    return {**{name: out.detach() for name, out in outputs.items()}, **gradients}


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Drawn on the CPU, so that each device gets the same numbers."""
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


@dataclass(frozen=True)
class Result:
    """A model's outputs, and gradients of its parameters and floating-point inputs; `dtype`: set for the reference."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    dtype: str = ""

    @property
    def numbers(self) -> dict[str, list[Tensor]]:
        """The outputs, and the gradients that are not None."""
        return {"output": self.outputs, "gradients": [x for x in self.gradients.values() if x is not None]}

    @property
    def finite(self) -> bool:
        """Whether all outputs and gradients are finite."""
        return self.differentiable and all(bool(x.isfinite().all()) for x in self.outputs)

    @property
    def differentiable(self) -> bool:
        """Whether all gradients are finite."""
        return all(bool(x.isfinite().all()) for x in self.numbers["gradients"])


def differentiate(
    problem: Problem, model: nn.Module | None = None, dtype: torch.dtype | None = None, *, graph: bool = True
) -> Result:
    """One forward and backward with a fixed random cotangent, in evaluation mode, leaving no gradient behind.

    Without `graph` the forward alone, under torch.no_grad(), and no gradients. Floating-point inputs are cast to
    `dtype`, if given. Those with `mask` in their name get a gradient if they require one.
    """
    model = model or problem.model
    inputs = {name: _leaf(name, value, dtype, graph) for name, value in problem.inputs.items()}
    leaves = {f"input {name}": value for name, value in inputs.items() if _is_leaf(value)}
    leaves |= {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.enable_grad() if graph else torch.no_grad():
        outputs = problem.results(problem.run(model, inputs))
        attached = [output for output in outputs if output.requires_grad]
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if attached and leaves:
            generator = torch.Generator().manual_seed(0)
            directions = [_normal(o, generator) * problem.loss_scale for o in attached]
            gradients = torch.autograd.grad(attached, list(leaves.values()), directions, allow_unused=True)
    named = str(dtype).removeprefix("torch.") if dtype else ""
    return Result([output.detach() for output in outputs], dict(zip(leaves, gradients, strict=True)), named)


def settled(problem: Problem) -> tuple[Problem, Result]:
    """The problem with a loss scale that keeps float16's gradients finite, if one does; and its result.

    Not one under which others vanish: the original would be so far from the truth that foci could be anywhere.
    """
    found = differentiate(problem)
    if found.differentiable or all(parameter.dtype != torch.float16 for parameter in problem.model.parameters()):
        return problem, found
    for exponent in (6, 12, 18):
        scaled = replace(problem, loss_scale=2.0**-exponent)
        other = differentiate(scaled)
        if other.differentiable:
            return (scaled, other) if _moved(found, other, scaled.loss_scale) <= _SAME else (problem, found)
    return problem, found


def _moved(found: Result, other: Result, scale: float) -> float:
    """How far gradients that were finite already are from those of a scaled loss: but for what vanishes, nothing."""
    wide = {name: None if x is None else x.double() / scale for name, x in other.gradients.items()}
    _, before, after, _ = _finite(found, found, replace(other, gradients=wide))
    return max_gradient_error(after.gradients, before.gradients, before.gradients)


def _leaf(name: str, value: Any, dtype: torch.dtype | None, graph: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _leaf(key, part, dtype, graph) for key, part in value.items()}
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    # A mask's gradient, which nobody asks for unless the mask says so, takes other backends than the plan's.
    wanted = graph and ("mask" not in name or value.requires_grad)
    return value.to(dtype or value.dtype).detach().clone().requires_grad_(wanted)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def max_gradient_error(
    ours: Mapping[str, Tensor | None], truths: Mapping[str, Tensor | None], exact: Mapping[str, Tensor | None]
) -> float:
    """The largest relative error of the gradients; infinite if one is missing or unexpected.

    A gradient that is zero up to rounding (such as a key bias's) is compared on the scale of the largest one; `exact`:
    the gradients by which those are found.
    """
    sizes = {name: extent(gradient) for name, gradient in exact.items() if gradient is not None}
    largest = max(sizes.values(), default=0.0)
    worst = 0.0
    for name, truth in truths.items():
        value = ours.get(name)
        if value is None or truth is None:
            if value is not truth:
                return float("inf")
            continue
        scale = largest if sizes.get(name, 0.0) <= VANISHED * largest else extent(truth)
        worst = max(worst, _relative(rms(difference(value, truth)), scale))
    return worst


@dataclass(frozen=True)
class Expected:
    """What a model gives as it was made, and so in float64 (`truth_of`), by whether gradients are found.

    Without gradients each may compute otherwise.
    """

    problem: Problem
    found: Mapping[bool, tuple[Result, Result | None]]

    def rows(self, against: str, complete: Callable[[Result], Result] = lambda ours: ours) -> list[Row]:
        """Compare what the model gives now; `complete` is applied to what has gradients."""
        rows: list[Row] = []
        for graph, (original, truth) in self.found.items():
            ours = differentiate(self.problem, graph=graph)
            trained = any(gradient is not None for gradient in original.gradients.values())
            some = compare_results(complete(ours) if graph else ours, original, truth, against, trained=trained)
            said = "" if graph or True not in self.found else " without gradients"
            rows += [replace(row, what=row.what + said) for row in some]
        return rows


def expected(problem: Problem, *, trained: bool = True) -> Expected:
    """What its model gives, in evaluation mode: without gradients, and if `trained` with them."""
    wide = copy.deepcopy(problem.model)  # before any run: some modules keep tensors of their last one
    originals: dict[bool, Result] = {}
    if trained:
        problem, originals[True] = settled(problem)
    originals[False] = differentiate(problem, graph=False)
    return Expected(problem, {graph: (x, truth_of(problem, wide, graph=graph)) for graph, x in originals.items()})


def prove_model(problem: Problem, routed: Callable[[], AbstractContextManager[Any]]) -> list[Row]:
    """The whole model, original and routed, against each other and against the original in float64 (`truth_of`)."""
    with evaluating(problem.model):
        original = expected(problem)
        with routed():
            return original.rows("original")


def compare_results(
    ours: Result, original: Result, truth: Result | None, against: str, *, trained: bool = True
) -> list[Row]:
    """Compare outputs, and gradients if `trained`, with the original (called `against` in the rows) and the truth.

    The budget is 1e-5. If the original's own error against the truth is larger (a deep model, half precision), ours may
    have twice that error, and so differ by three times that from the original. Elements that are not finite in the
    original but in the truth are left out and counted; if all are, nothing is proved: the error is infinite.
    """
    left_out = {"output": 0, "gradients": 0}
    if truth is not None:
        ours, original, truth, left_out = _finite(ours, original, truth)
    exact = (truth or original).gradients
    many = {what: sum(x.numel() for x in some) for what, some in original.numbers.items()}
    rows: list[Row] = []
    for what, distance in (
        ("output", lambda a, b: max_error(a.outputs, b.outputs)),
        ("gradients", lambda a, b: max_gradient_error(a.gradients, b.gradients, exact)),
    ):
        if what == "gradients" and not trained:
            continue
        own, left = distance(original, truth) if truth else 0.0, left_out[what]
        own = own if math.isfinite(own) else 0.0
        for name, other, times in ((against, original, 3), (truth.dtype if truth else "", truth, 2)):
            if other:
                error = math.inf if left and left == many[what] else distance(ours, other)
                rows.append(Row("whole model", what, name, error, max(RELATIVE, times * own), left))
    return rows


def _finite(ours: Result, original: Result, truth: Result) -> tuple[Result, Result, Result, dict[str, int]]:
    """All three with 0 where the original is not finite but the truth is, and the counts of such elements."""
    outputs = [_overflowed(*each) for each in zip(original.outputs, truth.outputs, strict=False)]
    gradients = {name: _overflowed(x, truth.gradients.get(name)) for name, x in original.gradients.items()}

    def filled(result: Result) -> Result:
        kept = [_zeroed(x, lost) for x, lost in zip(result.outputs, outputs, strict=False)]
        kept += result.outputs[len(kept) :]
        made = {name: _zeroed(x, gradients.get(name)) for name, x in result.gradients.items()}
        return Result(kept, made, result.dtype)

    counts = {
        what: sum(int(lost.sum()) for lost in each if lost is not None)
        for what, each in (("output", outputs), ("gradients", gradients.values()))
    }
    return filled(ours), filled(original), filled(truth), counts


def _overflowed(value: Tensor | None, truth: Tensor | None) -> Tensor | None:
    if value is None or truth is None or value.shape != truth.shape:
        return None
    return ~value.isfinite() & truth.isfinite()


def _zeroed(value: Any, lost: Tensor | None) -> Any:
    same = lost is not None and value is not None and value.shape == lost.shape
    return value.masked_fill(lost, 0.0) if same else value


def truth_of(problem: Problem, wide: nn.Module, *, graph: bool = True) -> Result | None:
    """The original in float64; for a half-precision model, if that fails, in float32; None if both fail.

    Float64 fails for a grouped matmul of experts, and where a float32 softmax gets float64's lowest number. `wide` is a
    copy of the model, which is changed. `graph` as in `differentiate`.
    """
    half = any(parameter.dtype in HALF for parameter in problem.model.parameters())
    for dtype in (torch.float64, torch.float32) if half else (torch.float64,):
        wide = wide.double() if dtype == torch.float64 else wide.float()
        try:
            truth = differentiate(problem, wide, dtype, graph=graph)
        except (RuntimeError, ValueError):  # ValueError: foci's layers refuse a cache of another dtype
            continue
        if truth.finite:
            return truth
    return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it all modules are in evaluation mode and grad mode is on; afterwards both are restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def worst(rows: Sequence[Row], prefix: str) -> Row | None:
    """The row of that kind with the largest error relative to its budget."""
    kind = [row for row in rows if row.what.startswith(prefix)]
    return max(kind, key=lambda row: row.error / row.budget if row.error == row.error else float("inf"), default=None)
