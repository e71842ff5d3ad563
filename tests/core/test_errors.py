"""Errors say which argument, which reasons, and which extra to install."""

from __future__ import annotations

import pickle

import pytest

from foci.core.errors import MissingExtra, ShapeError, Unsupported, require


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
