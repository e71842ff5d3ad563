"""Errors say which argument, which reasons, and which extra to install."""

from __future__ import annotations

import pickle

import pytest

from foci.core.errors import Disagreement, MissingExtra, RankError, ShapeError, Unsupported, a_type, require


def test_a_type_has_its_article() -> None:
    class Attention: ...

    class UNet: ...

    assert [a_type(each) for each in (3, "", None, Attention(), UNet())] == [
        "an int",
        "a str",
        "a NoneType",
        "an Attention",
        "a UNet",
    ]


def test_unsupported_prints_its_reasons_one_a_line() -> None:
    error = Unsupported(
        "attention: backend 'cudnn' cannot run this call",
        ["softcap is not supported", "float32 is not supported"],
        "use backend=None to let foci choose (chunked would run)",
    )
    assert str(error).splitlines() == [
        "attention: backend 'cudnn' cannot run this call:",
        "  - softcap is not supported",
        "  - float32 is not supported",
        "  use backend=None to let foci choose (chunked would run)",
    ]
    assert isinstance(error, NotImplementedError)


def test_unsupported_without_reasons_is_one_sentence() -> None:
    assert str(Unsupported("attention: forward-mode derivatives are not defined")).endswith("not defined")
    assert Unsupported("x").reasons == []


def test_unsupported_survives_pickling_with_its_reasons() -> None:
    error = pickle.loads(pickle.dumps(Unsupported("what", ["a", "b"], "hint")))
    assert (error.reasons, error.hint, str(error)) == (["a", "b"], "hint", "what:\n  - a\n  - b\n  hint")


def test_reasons_are_a_copy() -> None:
    reasons = ["a"]
    error = Unsupported("what", reasons)
    reasons.append("b")
    assert error.reasons == ["a"]


def test_shape_error_is_a_value_error() -> None:
    assert issubclass(ShapeError, ValueError)


def test_require_returns_the_module() -> None:
    assert require("json.decoder", extra="cli").JSONDecoder


def test_require_names_the_extra() -> None:
    with pytest.raises(MissingExtra, match=r"needs no_such_package, .*pip install 'foci\[diffusers\]'") as caught:
        require("no_such_package.models", extra="diffusers")
    assert caught.value.name == "no_such_package"


def test_require_does_not_blame_the_extra_for_a_broken_package(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_package.py").write_text("import another_missing_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="another_missing_package") as caught:
        require("broken_package", extra="diffusers")
    assert not isinstance(caught.value, MissingExtra)


def test_rank_error_names_rank_step_and_direction_and_survives_pickling() -> None:
    error = RankError("attention", 2, "ValueError: no such key", step=1, direction="backward")
    assert str(error) == "attention: rank 2 failed in step 1 of the backward: ValueError: no such key"
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error) and str(again) == str(error)
    assert str(RankError("unshard", 0, "it is gone")) == "unshard: rank 0 failed: it is gone"
    assert "failed in the forward: it" in str(RankError("unshard", 0, "it is gone", direction="forward"))


def test_disagreement_says_who_says_what() -> None:
    error = Disagreement("attention", {"dtype": {0: "float32", 1: "bfloat16", 2: "float32"}, "T": {0: "4", 1: "5"}})
    assert str(error).splitlines() == [
        "attention: ranks disagree, so none of them began:",
        "  - dtype: float32 on ranks 0, 2; bfloat16 on rank 1",
        "  - T: 4 on rank 0; 5 on rank 1",
    ]
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.facts) == (str(error), error.facts)
