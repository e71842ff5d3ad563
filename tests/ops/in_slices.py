"""What the folders of the recurrences promise alike, file by file; a subclass says of which operator."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import foci
from foci.core.errors import ShapeError
from foci.core.library import _schema
from foci.core.spec import Bad, Case, Mistake, Spec
from foci.ops import SPECS, native
from foci.ops.faults import walk
from tests.ops.recurrences import CPU, answers, inputs_of
from tests.ops.test_faults import differs

F64 = torch.float64
B, T, G, H, K, V = 2, 5, 1, 3, 4, 6


class _Each:
    """A test that takes `case`, `ordered` (a causal case), `bad` or `mistake` is run for every one of the Spec's."""

    spec: Spec

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        every = {"case": self.spec.cases, "bad": self.spec.probes.bad, "mistake": self.spec.mistakes}
        every["ordered"] = tuple(case for case in self.spec.cases if "not causal" not in case.features)
        for name in every.keys() & set(metafunc.fixturenames):
            metafunc.parametrize(name, every[name], ids=lambda each: each.name)


class InProbes(_Each):
    def test_bad_input_is_refused_by_name(self, bad: Bad) -> None:
        with pytest.raises((ValueError, TypeError), match=bad.argument):
            self.spec.reference(**bad.change(self.spec.cases[0].make(F64, CPU, 0)))


class InScanProbes(InProbes):
    """Parts are cases of their own and make the whole; the future does not matter."""

    def test_parts_make_the_whole(self, case: Case) -> None:
        spec, inputs = self.spec, case.make(F64, CPU, 0)
        whole, state = dict(zip(spec.output_names, spec.reference(**inputs), strict=True)), None
        for take in (spec.probes.cut, spec.probes.documents, spec.probes.rows):
            for part in take(case, inputs):
                resumed = dict.fromkeys(part.resumes, state)
                found = spec.reference(**part.case.make(F64, CPU, 0) | resumed)
                state = found[1]
                for name, got in zip(spec.output_names, found, strict=True):
                    place = part.place.get(name) if isinstance(part.place, dict) else part.place
                    if place is not None:
                        torch.testing.assert_close(got, whole[name][place])

    def test_they_apply_where_they_should(self) -> None:
        probes, counts = self.spec.probes, {}
        for case in self.spec.cases:
            inputs = case.make(F64, CPU, 0)
            counts[case.name] = [len(take(case, inputs)) for take in (probes.cut, probes.documents, probes.rows)]
        assert counts["plain"] == [3, 0, 2] and counts["packed"] == [3, 3, 0] and counts["one token"] == [0, 0, 2]

    def test_the_future_is_changed_and_does_not_matter(self, case: Case) -> None:
        inputs = case.make(F64, CPU, 0)
        future = self.spec.probes.future(case, inputs)
        if future is None:
            assert inputs["x"].shape[1] == 1
            return
        assert not torch.equal(future.inputs["x"], inputs["x"])
        place = future.place["out"]
        assert torch.equal(self.spec.reference(**future.inputs)[0][place], self.spec.reference(**inputs)[0][place])


class InMistakes(_Each):
    """Every mistake is wrong somewhere, and none is wrong where it does not apply."""

    module: ModuleType  # ops/<slice>/mistakes.py

    def test_it_is_wrong_in_some_case_and_says_so(self, mistake: Mistake) -> None:
        assert any(differs(mistake, case.make(F64, CPU, 0), self.module.forward) for case in self.spec.cases)
        assert len(mistake.sentence) < 160 and "\n" not in mistake.sentence
        assert ("{" in mistake.sentence) == mistake.fits

    def test_names_are_unique(self) -> None:
        assert len({mistake.name for mistake in self.spec.mistakes}) == len(self.spec.mistakes)

    def wrong_in_a_plain_case(self) -> set[str]:
        inputs = inputs_of(self.spec, "plain")
        return {mistake.name for mistake in self.spec.mistakes if differs(mistake, inputs, self.module.forward)}


class InWalkedMistakes(InMistakes):
    def test_the_step_that_faults_are_made_of_is_right(self, ordered: Case) -> None:
        inputs, read = ordered.make(F64, CPU, 0), getattr(self.module, "read", None)
        found = walk(inputs, self.module.step, *[read] * (read is not None))
        for made, right in zip(found, self.module.forward(inputs), strict=True):
            torch.testing.assert_close(made, right)


class InSpec(_Each):
    """Declared outputs are the real ones; the operator's answers are those of its equation."""

    def test_it_is_listed_under_its_name(self) -> None:
        assert SPECS[self.spec.name] is self.spec
        assert self.spec.recurrent

    def test_declared_outputs_are_real(self, case: Case) -> None:
        assert self.spec.outputs is not None and self.spec.bind is not None
        call = self.spec.bind(**case.make(torch.float32, CPU, 0))
        for backend in (each for each in self.spec.backends if not each.reasons(call)):
            made = backend.load().forward(call)
            for output, tensor in zip(self.spec.outputs(call), made, strict=True):
                assert (output.shape, output.dtype) == (tuple(tensor.shape), tensor.dtype)
                assert tensor.is_contiguous()

    def test_the_reference_is_the_equation_and_plain_stays_in_its_dtype(self) -> None:
        inputs = self.spec.cases[0].make(F64, CPU, 0)
        torch.testing.assert_close(self.spec.reference(**inputs), self.spec.plain(**inputs))
        half = {n: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
        exact, rough = self.spec.reference(**half)[0].double(), self.spec.plain(**half)[0].double()
        assert 0 < (exact - rough).norm() / exact.norm() < 0.2


class InScanSpec(_Each):
    """Declared outputs are real in every dtype, gradients too, and the ops keep their schema."""

    function: Any

    @pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_declared_shapes_dtypes_and_strides_are_real(self, case: Case, dtype: torch.dtype) -> None:
        spec, inputs = self.spec, case.make(dtype, CPU, 0)
        assert spec.outputs is not None and spec.bind is not None and dtype in spec.dtypes
        for backend in ("chunked", "reference"):
            found = answers(self.function, spec, inputs, backend)
            for declared in spec.outputs(spec.bind(**inputs)):
                real = found[declared.name]
                assert (tuple(real.shape), real.dtype) == (declared.shape, declared.dtype), (backend, declared.name)
                assert real.is_contiguous(), (backend, declared.name)
            for name in spec.differentiable:
                if name in inputs:
                    assert found[f"d{name}"].shape == inputs[name].shape, (backend, name)
                    assert found[f"d{name}"].dtype == inputs[name].dtype, (backend, name)

    def test_the_ops_keep_their_schema(self) -> None:
        assert self.spec.bind is not None
        call = self.spec.bind(**inputs_of(self.spec, "packed", torch.float32))
        made, tests = self.spec.backend("chunked").load().forward(call), ("test_schema", "test_faketensor")
        needs = [getattr(call, name) is not None for name in self.spec.differentiable]
        for way, args in (("fwd", tuple(call)), ("bwd", (*made, *made, needs, *call))):
            op = getattr(torch.ops.foci, f"{self.spec.name}_chunked_{way}")
            torch.library.opcheck(op.default, args, test_utils=tests)


class InScanCases(_Each):
    """Named once, the same for the same seed, and what they say of themselves is true."""

    def test_names_are_unique(self) -> None:
        assert len({case.name for case in self.spec.cases}) == len(self.spec.cases)

    def test_some_documents_without_a_state_are_longer_than_a_chunk(self) -> None:
        packed = [case.make(torch.float32, CPU, 0) for case in self.spec.cases if "packed" in case.features]
        assert any("state" not in inputs and inputs["offsets"].diff().max() > 64 for inputs in packed)

    def test_features_are_what_the_arguments_say(self, case: Case) -> None:
        inputs, other = (case.make(torch.float32, CPU, seed) for seed in (0, 1))
        assert not torch.equal(inputs["x"], other["x"])
        said = {
            "state": "state" in inputs,
            "packed": "offsets" in inputs,
            "skip": "skip" in inputs,
            "strided": not inputs["x"].is_contiguous(),
            "extreme": bool((inputs.get("A", inputs.get("log_decay")) == -torch.inf).any()),
        }
        for feature, present in said.items():
            assert (feature in case.features) == present, feature


class InCall:
    """Sizes, defaults, and log_decay in its one form whatever its rank."""

    module: ModuleType  # ops/<slice>/call.py
    args: tuple[Tensor, ...]

    @pytest.mark.parametrize(
        ("shape", "form"), [((H,), (1, 1, H, 1)), ((B, T, H), (B, T, H, 1)), ((B, T, H, K), (B, T, H, K))]
    )
    def test_decay_has_one_form(self, shape: tuple[int, ...], form: tuple[int, ...]) -> None:
        call = self.module.bind(*self.args, log_decay=torch.zeros(shape))
        assert call.log_decay is not None
        assert call.log_decay.shape == form

    def test_sizes_and_defaults(self) -> None:
        call = self.module.bind(*self.args)
        assert call.sizes == (B, T, G, H, K, V, B)
        assert call.scale == 0.5
        assert call.accumulator == torch.float32
        packed = self.module.bind(*(x[:1] for x in self.args), offsets=torch.tensor([0, 0, 5], dtype=torch.int32))
        assert packed.sizes[-1] == 2

    def test_heads_that_no_key_head_serves_are_refused(self) -> None:
        q, k, v, *rest = self.args
        two = (torch.zeros(B, T, 2, K) for _ in (q, k))
        with pytest.raises(ShapeError, match=r"k has 2 heads but v has 3; v heads must be a multiple of k heads"):
            self.module.bind(*two, v, *rest)

    def test_the_schema_names_every_field(self) -> None:
        names = [part.split()[1].split("=")[0] for part in _schema(self.module.Call).split(", ")]
        assert names == list(self.module.Call._fields)


class InApi:
    """The public functions: what they return, choose and refuse."""

    spec: Spec
    function: Any
    more: tuple[Tensor, ...] = ()  # what is behind q, k and v

    @property
    def args(self) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(0)
        q, v = (torch.randn(B, T, H, width, generator=draw) for width in (K, V))
        return (q, q, v, *self.more)

    def test_the_state_is_given_when_asked_for(self) -> None:
        out, state = self.function(*self.args)
        assert out.shape == (B, T, H, V)
        assert state is None
        again, state = self.function(*self.args, return_state=True)
        assert torch.equal(out, again)
        assert state is not None
        assert state.shape == (B, H, K, V)

    def test_a_state_is_not_changed_and_does_not_come_back(self) -> None:
        given = torch.randn(B, H, K, V)
        before = given.clone()
        _, state = self.function(*self.args, state=given, return_state=True)
        assert torch.equal(given, before)
        assert state is not None
        assert state.data_ptr() != given.data_ptr()

    def test_backends(self) -> None:
        assert self.spec.bind is not None
        chosen = "chunked" if native.reasons(self.spec.bind(*self.args)) else "native"
        assert foci.explain(self.spec.name, *self.args).chosen == chosen
        torch.testing.assert_close(self.function(*self.args, backend="reference")[0], self.function(*self.args)[0])
        with pytest.raises(ValueError, match="unknown backend 'magic'"):
            self.function(*self.args, backend="magic")

    def test_every_argument_of_the_call_is_one_of_the_function(self) -> None:
        assert self.spec.bind is not None
        named = set(inspect.signature(self.function).parameters) - {"backend"}
        assert named == set(inspect.signature(self.spec.bind).parameters)
        assert set(self.spec.differentiable) <= named

    def test_vmap_and_functional_gradients(self) -> None:
        q, k, value, *more = self.args

        def of(v: Tensor) -> Tensor:
            out: Tensor = self.function(q, k, v, *more)[0]
            return out

        mapped = torch.func.vmap(of)(torch.stack([value, 2 * value]))
        torch.testing.assert_close(mapped[1], 2 * mapped[0])
        leaf = value.clone().requires_grad_()
        of(leaf).sum().backward()
        torch.testing.assert_close(torch.func.grad(lambda v: of(v).sum())(value), leaf.grad)
