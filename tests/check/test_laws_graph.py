"""The laws of the compiler, of dtypes and of bad input, where the gallery does not reach."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from foci.check.exam import Exam
from foci.check.laws import NotTested
from foci.check.laws_graph import HALF, LAWS, UNREAD, _harmless, _move_integers
from foci.core.spec import Bad, Candidate
from foci.ops.delta.api import delta_rule
from foci.ops.delta.spec import SPEC as DELTA
from foci.ops.masks import Causal, Packed, lower
from foci.ops.softmax.api import attention_with_lse
from foci.ops.softmax.conventions import adapt
from foci.ops.softmax.spec import SPEC
from tests.check import toy
from tests.check.gallery import right


def ask(law: str, candidate, spec=toy.SPEC) -> list[str]:
    exam = Exam(spec, candidate, torch.device("cpu"), (torch.float32,))
    (chosen,) = [each for each in LAWS if each.name == law]
    return [finding.sentence for finding in chosen.ask(exam) if finding.sentence]


def test_laws_are_in_order_and_named_once() -> None:
    assert [law.number for law in LAWS] == sorted(law.number for law in LAWS)
    assert {law.number for law in LAWS} == set(range(1, 16))
    assert len({law.name for law in LAWS}) == len(LAWS)


def test_a_break_in_the_graph_is_told() -> None:
    def breaks(x, gate):
        torch._dynamo.graph_break()
        return toy.reference(x, gate)

    assert ask("compiled = eager", toy.candidate()) == []
    told = ask("compiled = eager", toy.candidate(breaks))
    assert len(told) == 1 and told[0].startswith("fullgraph=True fails")


def test_a_missing_fake_is_told() -> None:
    @torch.library.custom_op("gallery::no_fake", mutates_args=())
    def no_fake(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    told = ask("fake tensors", toy.candidate(lambda x, gate: toy.reference(no_fake(x), gate)))
    assert told and "fake" in told[0]


def test_wrong_strides_of_a_fake_are_told() -> None:
    @torch.library.custom_op("gallery::turned", mutates_args=())
    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    turned.register_fake(torch.empty_like)

    def attend(x, gate):
        out, total = toy.reference(x, gate)
        return turned(out), total

    told = ask("fake tensors", toy.candidate(attend))
    assert told and "strides" in told[0]


def test_no_custom_op_is_not_tested() -> None:
    with pytest.raises(NotTested, match="calls no custom op"):
        ask("custom ops", toy.candidate())


def test_an_upcast_under_autocast_is_told() -> None:
    def doubles(x, gate):
        return tuple(o.double() if torch.is_autocast_enabled("cpu") else o for o in toy.reference(x, gate))

    told = ask("autocast and mixed dtypes", toy.candidate(doubles))
    assert told and "float64 under autocast" in told[0]


def test_mixed_dtypes_may_raise_but_not_lie() -> None:
    def strict(x, gate):
        if x.dtype != gate.dtype:
            raise TypeError("x and gate differ in dtype")
        return toy.reference(x, gate)

    def lies(x, gate):
        return toy.reference(x if x.dtype == gate.dtype else x * 0.9, gate)

    assert ask("autocast and mixed dtypes", toy.candidate(strict)) == []
    assert "with x in another dtype" in ask("autocast and mixed dtypes", toy.candidate(lies))[0]


def test_every_feature_is_asked_under_autocast_and_every_argument_in_another_dtype() -> None:
    """A delta rule's erase keys, which the first case has not, kept their dtype under autocast: a GPU broke there."""
    seen: list[tuple[str, ...]] = []

    @functools.wraps(delta_rule)
    def forgets(q, k, v, beta, **rest):
        seen.append(tuple(name for name, x in rest.items() if isinstance(x, torch.Tensor) and x.dtype == HALF))
        if torch.is_autocast_enabled("cpu") and rest.get("erase") is not None:
            raise TypeError("erase has another dtype")
        return delta_rule(q, k, v, beta, **rest)

    cases = tuple(case for case in DELTA.cases if case.name in ("plain", "erase", "state"))
    assert any("erase" in case.features for case in cases)
    candidate = DELTA.adapt(forgets, name="forgets")
    told = ask("autocast and mixed dtypes", candidate, dataclasses.replace(DELTA, cases=cases))
    assert told == ["under autocast: forward raised TypeError: erase has another dtype"]
    assert {("erase",), ("log_decay",), ("state",)} <= set(seen)


def test_bad_input() -> None:
    def names(x, gate):
        if gate.shape != x.shape[:2]:
            raise ValueError(f"gate has shape {list(gate.shape)}")
        return toy.reference(x, gate)

    def answers(x, gate):
        return toy.reference(x[:, : gate.shape[1]], gate)

    assert ask("bad input", toy.candidate(names, strict=True)) == []
    assert ask("bad input", toy.candidate(answers)) == ["a short gate: answered with a number instead of an error"]
    assert ask("bad input", toy.candidate()) == [], "any error will do of a stranger"
    (told,) = ask("bad input", toy.candidate(strict=True))
    assert "not one that names gate" in told


def test_our_errors_name_the_argument() -> None:
    assert ask("bad input", adapt(attention_with_lse), SPEC) == []


def test_dtype_of_the_outputs() -> None:
    exam = Exam(SPEC, adapt(lambda q, k, v: right(q, k, v)[0].double()), torch.device("cpu"), (torch.float32,))
    (law,) = [each for each in LAWS if each.name == "shapes and dtypes"]
    assert any("float64 where float32 is expected" in (finding.sentence or "") for finding in law.ask(exam))


def test_bad_offsets_on_a_gpu_may_be_taken_unread_but_do_no_harm() -> None:
    """The question itself, asked here of functions that answer as kernels might."""
    bad = Bad("offsets that overrun", "offsets", lambda inputs: inputs | {"offsets": torch.tensor([0, 999])})
    inputs = {"x": torch.ones(2), "mask": Packed(torch.tensor([0, 2])) & Causal()}

    def asked(raised: Exception | None) -> tuple[list[str], dict[str, str]]:
        def call(given):
            assert given["offsets"].device.type == "cpu" and given["x"] is inputs["x"]
            if raised is not None:
                raise raised
            return ()

        exam = Exam(toy.SPEC, Candidate("it", call), torch.device("cpu"), (torch.float32,))
        return [finding.sentence or "" for finding in _harmless(exam, bad, inputs)], exam.refused

    assert asked(ValueError("offsets must end at 2")) == ([""], {})
    assert asked(None) == ([""], {"offsets that overrun, on the GPU": UNREAD})
    (told,), refused = asked(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert "its kernels leave their tensors (" in told and refused == {}


def test_whole_numbers_alone_are_moved_also_those_of_masks() -> None:
    given = {
        "q": torch.ones(2),
        "live": torch.ones(2, dtype=torch.bool),
        "mask": Packed(torch.tensor([0, 2])) & Causal(),
    }
    moved, any_moved = _move_integers(torch.device("meta"), given)
    assert any_moved and lower(moved["mask"]).q_offsets.device.type == "meta" and lower(moved["mask"]).causal_end
    assert moved["q"] is given["q"] and moved["live"] is given["live"]
    assert _move_integers(torch.device("meta"), {"q": given["q"], "scale": 1.0})[1] is False
