"""The command: one line a phase, JSON alone when asked, one sentence for bad input, no half-written file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from foci import cli
from foci.accelerate import zoo


def foci(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["accelerate", *words])
    return int(end.value.code or 0)


def test_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert foci("bert", "--compile", "off", "--out", str(tmp_path / "new" / "out")) == 0
    text = capsys.readouterr().out
    assert text.startswith("foci 0.1.0 · torch")
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if line][1:] == [
        "bert",
        "find",
        "plan",
        "prove",
        "time",
        "compile",
        "wrote",
    ]
    assert "\x1b" not in text
    assert {path.name for path in (tmp_path / "new" / "out").iterdir()} == {"plan.json", "report.html"}


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert foci("bert", "--compile", "off", "--out", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["digits-dti"], "unknown model 'digits-dti'; expected one of digits-dit"),
        (["nobody/nothing"], "is neither in the local cache nor could it be fetched"),
        (["bert", "--compile", "perhaps"], "--compile must be auto, on or off, got 'perhaps'"),
        (["bert", "--calls", "0"], "calls must be at least 1, got 0"),
        (["bert", "--dtype", "int3"], "dtype must be one of"),
        (["bert", "--device", "warp"], "device must be like cpu or cuda:0, got 'warp'"),
    ],
)
def test_bad_input(words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert foci(*words, "--out", str(tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words", [["--calls", "0"], ["--calls", "-3"], ["--dtype", "int3"], ["--device", "warp"], ["--compile", "so"]]
)
def test_bad_options_are_refused_before_a_model_is_loaded(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(zoo, "_subject", lambda name: pytest.fail(f"{name} was loaded"))
    assert foci("bert", *words, "--out", str(tmp_path / "out")) == 2
    assert words[0].strip("-") in capsys.readouterr().err


def test_out_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert foci("bert", "--out", str(tmp_path / "file" / "out")) == 2
    assert f"--out {tmp_path / 'file' / 'out'}: Not a directory: " in capsys.readouterr().err
    (tmp_path / "plan.json").mkdir()
    assert foci("bert", "--out", str(tmp_path)) == 2
    assert f"--out {tmp_path}: Is a directory: {tmp_path / 'plan.json'}" in capsys.readouterr().err
    if sys.platform == "linux":  # it says that anyone may write there
        assert foci("bert", "--out", "/proc/x") == 2
        assert "--out /proc/x: No such file or directory: /proc/x" in capsys.readouterr().err
    if os.geteuid():  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        assert foci("bert", "--out", str(tmp_path / "closed" / "out")) == 2
        assert "Permission denied" in capsys.readouterr().err


def test_model_directory_without_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import diffusers

    diffusers.AutoencoderTiny(in_channels=1, out_channels=1).save_pretrained(tmp_path / "vae")
    assert foci(str(tmp_path / "vae"), "--out", str(tmp_path / "out")) == 2
    assert "AutoencoderTiny" in capsys.readouterr().err


def test_missing_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert foci("flux", "--out", str(tmp_path / "out")) == 2
    assert "pip install 'foci[diffusers]'" in capsys.readouterr().err


def test_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from foci.accelerate import run

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_time", interrupted)
    assert foci("bert", "--out", str(tmp_path / "out")) == 130
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_main_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert foci("--out", str(tmp_path)) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "report.html", "digits.png"}
    assert len(plan["sites"]) == 6 and plan["skipped"] == []
    for shown in (plan["demo"]["before"], plan["demo"]["after"]):
        assert shown["samples"] == 200 and shown["right"] >= 180
    assert plan["demo"]["difference"] <= 1e-3
    assert all(row["error"] <= row["budget"] for row in plan["proof"])
    assert "digits from the same noise" in capsys.readouterr().out
