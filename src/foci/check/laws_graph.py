"""Laws about torch.compile, fake tensors, dtypes and invalid input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from foci.check import compare, diagnose, laws, laws_effects, laws_memory, laws_pieces  # noqa: F401  these register
from foci.check.exam import Exam, cast
from foci.check.laws import Finding, Findings, Law, NotTested, as_plain, label, law, sized
from foci.core.spec import Bad, Case, Inputs, Outputs

HALF = torch.bfloat16
SMALL = 1e-2  # of the largest gradient: one that is smaller is mostly rounding in half precision
CALLS, SIZES, GRAPHS = 6, (17, 24, 33, 48, 65, 96), 2
COMPILED = "{} differs when compiled"
# Reading a value of a tensor in Python: right, but not visible to a fake tensor.
UNREAD = (
    "offsets and lengths that lie on the GPU: a bad one is not refused, since reading it would wait for the GPU; that "
    "no kernel faults was asked"
)
READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


@law(1, "shapes and dtypes")
def shapes(exam: Exam) -> Findings:
    """Declared shapes and dtypes are the real ones."""
    for dtype in exam.dtypes:
        for case in exam.cases():
            found = exam.forward(case, dtype).outputs
            if found is None:
                continue
            for name, got, promised in zip(exam.names, found, exam.declared(case, dtype), strict=True):
                wrong = got.dtype != promised.dtype and (exam.candidate.strict or name not in exam.spec.logs)
                what = f"{name} is {_short(got)} where {_short(promised)} is expected: all after it would compute in it"
                yield Finding(label(case, dtype), None, what if wrong else None)


@law(1, "fake tensors")
def fakes(exam: Exam) -> Findings:
    """Shapes, dtypes and strides under FakeTensorMode are the real ones, also of gradients."""
    unseen, dtype = "", exam.dtype
    trained = set(exam.covering_cases(lambda case: exam.gradients(case, dtype, exam.names).gradients is not None))
    for case in exam.cases():
        real = exam.forward(case, dtype).outputs
        if real is None:
            continue
        try:
            fake, gradients = _fake(exam, case, dtype, case in trained)
        except READS_VALUES:
            unseen = "it reads values of tensors"
            continue
        except (UnsupportedOperatorException, NotImplementedError) as error:
            yield Finding(
                case.name, None, f"an op has no fake: torch.compile would stop ({diagnose.first_line(error)})"
            )
            continue
        except Exception as error:
            yield Finding(
                case.name, None, f"it cannot run on fake tensors, so not compiled: {diagnose.first_line(error)}"
            )
            continue
        for name, output, said in zip(exam.names, real, fake, strict=True):
            yield Finding(case.name, None, _mismatch(name, output, said))
        true = exam.gradients(case, dtype, exam.names).gradients or {}
        for leaf, gradient in gradients.items():
            got = true.get(leaf)
            if got is not None and (gradient.shape, gradient.dtype) != (got.shape, got.dtype):
                yield Finding(case.name, None, _mismatch(f"d{leaf}", got, gradient))
    if unseen:
        exam.refused["fake tensors"] = unseen


def _fake(exam: Exam, case: Case, dtype: torch.dtype, wants: bool) -> tuple[Outputs, dict[str, Tensor]]:
    """Fake outputs without grad, as the real ones were computed, and, if `wants`, fake gradients of a second call."""
    real = exam.fresh(case, dtype)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        outputs = exam.run(exam.candidate.call, _as_fakes(mode, real))
        if not wants:
            return outputs, {}
        imitated = _as_fakes(mode, real)
        leaves = exam.leaves(imitated)
        roots = [output for output in exam.run(exam.candidate.call, imitated) if output.requires_grad]
        if not roots or not leaves:
            return outputs, {}
        ones = [torch.ones_like(root) for root in roots]
        found = torch.autograd.grad(roots, list(leaves.values()), ones, allow_unused=True)
        return outputs, {leaf: g for leaf, g in zip(leaves, found, strict=True) if g is not None}


def _as_fakes(mode: FakeTensorMode, inputs: dict[str, Any]) -> dict[str, Any]:
    """Tensors become fake; modules and masks stay real, which the mode allows."""
    return tree_map(lambda item: mode.from_tensor(item) if isinstance(item, Tensor) else item, inputs)


def _mismatch(name: str, real: Tensor, fake: Tensor) -> str | None:
    """A sentence if the fake's shape, dtype or strides differ from the real tensor's."""
    for what, true, said in (
        ("shape", list(real.shape), list(fake.shape)),
        ("dtype", _short(real), _short(fake)),
        # Strides of dimensions of size 1 are arbitrary: kernels and torch's own checks ignore them.
        ("strides", *(tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) for t in (real, fake))),
    ):
        if true != said and real.numel() > 1:
            silently = "compiled code would read it as such: garbage or a crash, without an error"
            return f"the fake says {name} has {what} {said}, really it is {true}; {silently}"
    return None


@law(12, "custom ops")
def custom_ops(exam: Exam) -> Findings:
    """torch.library.opcheck on every op of its own that the candidate calls."""
    found: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
    for case in exam.cases():
        with _Recorder(found):
            exam.attempt(exam.fresh(case, exam.dtype))
            exam.attempt_gradients(case, exam.dtype, exam.names)
    if not found:
        raise NotTested("it calls no custom op")
    for name, (op, args, kwargs) in found.items():
        try:
            torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor"))
        except Exception as error:
            yield Finding(name, None, f"opcheck of {name}: {diagnose.first_line(error)}")
        else:
            yield Finding(name)


class _Recorder(TorchDispatchMode):
    """Keeps one call of every op that is not torch's own."""

    def __init__(self, found: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prim", "prims", "profiler", "quantized", "mkldnn", "mkl", "onednn"):
            keep = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs or {}))
            self.found.setdefault(str(func), (func, *keep))
        return func(*args, **(kwargs or {}))


@law(12, "compiled = eager")
def compiled(exam: Exam) -> Findings:
    """fullgraph=True gives the eager numbers, forward and backward; equal calls never compile twice."""
    case, dtype = sized(exam)(SIZES[0]), exam.dtype
    _require(exam, case)
    with _compiling(exam, dynamic=False) as (call, graphs):
        found = exam.check_shapes(case, dtype, exam.attempt(exam.fresh(case, dtype), call))
        if found.outputs is None:
            yield Finding(case.name, None, f"fullgraph=True fails: {found.fault or found.refused}")
            return
        yield from as_plain(exam, case, found.outputs, COMPILED)
        yield from _compiled_gradients(exam, case, call)
        yield from _recompiles(exam, case, call, graphs)


def _recompiles(exam: Exam, case: Case, call: Callable[..., Outputs], graphs: list[None]) -> Findings:
    inputs, counts = exam.fresh(case, exam.dtype), []
    for _ in range(CALLS):
        fault = exam.attempt(inputs, call).fault
        if fault:
            yield Finding(case.name, None, f"called again, compiled: {fault}")
            return
        counts.append(len(graphs))
    again = counts[-1] - counts[0]
    what = (
        f"{CALLS} equal calls compile {again + 1} times (a Python step counter?): torch would give up and run eagerly, "
        "slower than uncompiled"
    )
    yield Finding(case.name, None, what if again else None)


def _compiled_gradients(exam: Exam, case: Case, call: Callable[..., Outputs]) -> Findings:
    eager = exam.gradients(case, exam.dtype, exam.names).gradients
    if eager is None:
        return
    try:
        found = exam.differentiate(call, case, exam.dtype, exam.names, exact=False)
    except Exception as raised:
        yield Finding(case.name, None, f"its backward cannot be compiled: {diagnose.first_line(raised)}")
        return
    for leaf, right in eager.items():
        if right is None:
            continue
        got = found[leaf]
        error = None if got is None else exam.gradient_error(case, exam.dtype, exam.names, leaf, got, right)
        what = f"d{leaf} differs when compiled"
        yield Finding(case.name, error, None if error is not None and error.ok else what)


@law(12, "graphs over six lengths")
def graphs_over_lengths(exam: Exam) -> Findings:
    """At most two graphs over six lengths, and the eager numbers at each."""
    make, dtype = sized(exam), exam.dtype
    with _compiling(exam, dynamic=None) as (call, graphs):
        for length in SIZES:
            case = make(length)
            _require(exam, case)
            found = exam.check_shapes(case, dtype, exam.attempt(exam.fresh(case, dtype), call))
            if found.outputs is None:
                yield Finding(case.name, None, f"compiled at T={length}: {found.fault or found.refused}")
                return
            yield from as_plain(exam, case, found.outputs, COMPILED)
            if len(graphs) > GRAPHS:
                break  # it has failed already, and a loop over tokens takes a minute to compile per length
        count, asked = len(graphs), SIZES.index(length) + 1
        what = f"{count} graphs over {asked} lengths: every new length would compile again"
        yield Finding(f"{len(SIZES)} lengths", compare.Error(count, GRAPHS), None if count <= GRAPHS else what)


def _require(exam: Exam, case: Case) -> None:
    found = exam.forward(case, exam.dtype)
    if found.outputs is None:
        raise NotTested(f"{case.name} does not run: {found.fault or found.refused}")


@contextmanager
def _compiling(exam: Exam, dynamic: bool | None) -> Iterator[tuple[Callable[..., Outputs], list[None]]]:
    """The candidate compiled with fullgraph=True through AOTAutograd, on eager kernels, and its graphs."""
    graphs: list[None] = []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(module: Any, examples: Any) -> Any:
        graphs.append(None)
        return aot_eager(module, examples)

    def call(inputs: dict[str, Any]) -> Outputs:
        return exam.candidate.call(inputs)

    torch.compiler.reset()
    try:
        yield torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic), graphs
    finally:
        torch.compiler.reset()


@law(13, "autocast and mixed dtypes")
def autocast(exam: Exam) -> Findings:
    """Under autocast and with mixed dtypes: right within the half budget or a clear error, never an upcast."""
    mixed, halves = set[str](), None
    for case in exam.covering_cases(lambda case: exam.forward(case, torch.float32).outputs is not None):
        halves = _halves(exam, case)
        with torch.autocast(exam.device.type, HALF):
            found = exam.check_shapes(case, torch.float32, exam.attempt(exam.fresh(case, torch.float32)))
        if found.fault:
            yield Finding(f"{case.name}, autocast", None, f"under autocast: {found.fault}")
        if found.outputs is not None:
            yield from _half(exam, case, found.outputs, exam.truth(case, torch.float32), halves, "under autocast")
            yield from _trained(exam, case)
        tensors = {name for name, value in exam.inputs(case, torch.float32).items() if isinstance(value, Tensor)}
        for name in [name for name in exam.spec.differentiable if name in tensors - mixed]:
            given, copied = (exam.fresh(case, torch.float32) for _ in range(2))
            given[name], copied[name] = given[name].to(HALF), copied[name].to(HALF)
            outputs = exam.attempt(copied).outputs
            if outputs is not None:  # an error is right here; a number must be the right one
                exact = exam.run(exam._reference, cast(given, torch.float64))
                yield from _half(exam, case, outputs, exact, halves, f"with {name} in another dtype")
        mixed |= tensors
    if halves is None:
        raise NotTested("no case runs in float32")


def _halves(exam: Exam, case: Case) -> tuple[Outputs, Outputs]:
    """Reference and plain computation with all inputs rounded to half precision."""
    inputs = [cast(exam.fresh(case, torch.float32), HALF) for _ in range(2)]  # a cast changes modules in place
    return exam.run(exam._reference, cast(inputs[0], torch.float64)), exam.run(exam._plain, inputs[1])


def _half(
    exam: Exam, case: Case, outputs: Outputs, exact: Outputs, halves: tuple[Outputs, Outputs], when: str
) -> Findings:
    """Errors against `exact` or the reference on rounded inputs, whichever is closer, by the plain one's error."""
    for name, got, whole, half, plain in zip(exam.names, outputs, exact, *halves, strict=True):
        if name in exam.spec.logs:
            continue  # its budget is finer than the rounding of the inputs, for which the candidate is not to blame
        # A candidate may round its inputs to half precision or not.
        error = min((compare.twice(got, plain, truth) for truth in (whole, half)), key=lambda e: e.share)
        what = None if error.ok else f"{name} is wrong {when}"
        if got.dtype not in (torch.float32, HALF):
            what = f"{name} is {_short(got)} {when}: a silent upcast of everything after it"
        yield Finding(f"{case.name}, {when}", error, what)


def _trained(exam: Exam, case: Case) -> Findings:
    """The gradients of a forward under autocast; its backward runs outside, as torch's own examples have it."""
    single, name = torch.float32, f"{case.name}, autocast"
    through = tuple(output for output in exam.names if output not in exam.spec.logs)
    eager = exam.gradients(case, single, through).gradients
    if eager is None:
        return

    def call(inputs: Inputs) -> Outputs:
        with torch.autocast(exam.device.type, HALF):
            return exam.candidate.call(inputs)

    try:
        found = exam.differentiate(call, case, single, through, exact=False)
    except NotImplementedError as refused:
        exam.refused[f"gradients of {name}"] = diagnose.refusal(refused)
        return
    except Exception as raised:
        yield Finding(name, None, f"under autocast: {diagnose.exception(raised, 'backward')}")
        return
    truths = [exam.true_gradients(case, dtype, through) for dtype in (single, HALF)]
    largest = max((compare.extent(truth) for truth in truths[0].values() if truth is not None), default=0.0)
    for leaf, plain in exam.plain_gradients(case, HALF, through).items():
        got, exact = found[leaf], [truth[leaf] for truth in truths]
        if got is None and eager[leaf] is not None:
            yield Finding(name, None, f"d{leaf} is None under autocast: a trained {leaf} would silently never move")
        rights = [right for right in exact if right is not None and compare.extent(right) > SMALL * largest]
        if got is None or plain is None or len(rights) < len(exact):
            continue
        error = min((compare.twice(got, plain, right) for right in rights), key=lambda error: error.share)
        yield Finding(name, error, None if error.ok else f"d{leaf} is wrong under autocast")


@law(14, "bad input")
def bad_input(exam: Exam) -> Findings:
    """Arguments that do not fit raise an error, one that names the argument where the candidate promises that."""
    if not exam.spec.probes.bad:
        raise NotTested("no bad input is named for these cases")
    case = next(exam.cases(), None)
    if case is None:
        raise NotTested("no case runs")
    for bad in exam.spec.probes.bad:
        if bad.strict and not exam.candidate.strict:
            continue
        for _ in exam.cases([_invalid(case, bad)]):
            yield Finding(bad.name, None, _rejection_fault(exam, bad, exam.fresh(case, exam.dtype)))
            if exam.device.type == "cuda":
                yield from _harmless(exam, bad, exam.fresh(case, exam.dtype))


def _harmless(exam: Exam, bad: Bad, inputs: dict[str, Any]) -> Findings:
    """Invalid integer tensors on the GPU need not raise, since reading them would synchronise, but must not crash."""
    spoiled, moved = _move_integers(exam.device, bad.change(inputs))
    if not moved:
        return
    name = f"{bad.name}, on the GPU"
    try:
        exam.candidate.call(spoiled)
        if exam.device.type == "cuda":
            torch.cuda.synchronize(exam.device)
    except (ValueError, TypeError, NotImplementedError):
        yield Finding(name)
    except Exception as error:
        yield Finding(name, None, f"{name}: its kernels leave their tensors ({diagnose.first_line(error)})")
    else:
        yield Finding(name)
        exam.refused[name] = UNREAD


def _move_integers(device: torch.device, value: Any) -> tuple[Any, bool]:
    """The value with all its integer tensors, also inside masks, moved to a device; and whether there was one."""
    if isinstance(value, Tensor):
        moves = not value.is_floating_point() and value.dtype != torch.bool
        return (value.to(device), True) if moves else (value, False)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _move_integers(device, getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{n: x for n, (x, _) in parts.items()}), any(m for _, m in parts.values())
    if isinstance(value, dict):
        pairs = {name: _move_integers(device, x) for name, x in value.items()}
        return {name: x for name, (x, _) in pairs.items()}, any(m for _, m in pairs.values())
    if isinstance(value, tuple):
        items = [_move_integers(device, x) for x in value]
        return tuple(x for x, _ in items), any(m for _, m in items)
    return value, False


def _invalid(case: Case, bad: Bad) -> Case:
    return Case(bad.name, frozenset(), lambda dtype, device, seed: bad.change(case.make(dtype, device, seed)))


def _rejection_fault(exam: Exam, bad: Bad, inputs: dict[str, Any]) -> str | None:
    try:
        exam.candidate.call(bad.change(inputs))
    except (ValueError, TypeError, NotImplementedError) as error:
        if exam.candidate.strict and bad.argument not in str(error):
            return f"{bad.name}: its error does not name {bad.argument}: {diagnose.first_line(error)}"
    except Exception as error:
        if exam.candidate.strict:
            return f"{bad.name}: {type(error).__name__} from the inside, not one that names {bad.argument}"
    else:
        return f"{bad.name}: answered with a number instead of an error"
    return None


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# The laws of all files, in order.
LAWS: tuple[Law, ...] = tuple(sorted(laws.LAWS, key=lambda law: law.number))
