"""`foci tune` where there is no GPU, and what it is asked wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from foci import cli_tune
from foci.bench.tuning import Row
from foci.cli import main
from foci.core.device import Gpu, machine
from foci.core.tune import TARGETS, Config
from foci.ops import SPECS


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["tune", *words])
    return int(stopped.value.code or 0)


@pytest.mark.skipif(bool(machine().gpus), reason="there is a GPU, which it would measure for minutes")
def test_without_a_gpu_it_declines_in_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("linear", "--out", str(tmp_path / "tables")) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "ValueError: tune: there is no GPU here, and configurations can only be measured on the GPU they are for\n"
    )
    assert not (tmp_path / "tables").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("linaer",), "unknown operator 'linaer'"),
        (("linear", "--dtype", "float64"), "--dtype must be one of bfloat16, float16, float32; got 'float64'"),
        (("linear", "--limit", "nan"), "--limit must be seconds, 0 or more; got nan"),
        (("linear", "--limit", "-5"), "--limit must be seconds, 0 or more; got -5"),
        (("linear", "--shapes", "nonesuch"), "--shapes 'nonesuch': expected what is in a shape's name; "),
        (("linear", "--shapes", " , "), "--shapes ' , ': expected what is in a shape's name; "),
        (("linear", "--shapes", "small,nonesuch"), "--shapes 'nonesuch': expected what is in a shape's name; "),
    ],
)
def test_what_it_is_asked_wrongly_is_named(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert named in capsys.readouterr().err


def test_on_a_gpu_every_operator_is_searched_and_its_table_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def search(spec, module, problems, dtype, device, *, clock, tell, ahead, until):  # type: ignore[no-untyped-def]
        asked.append((spec.name, len(problems), device.type))
        yield ("kernel", "128"), Row(Config({}, 8, 2), 1.0, 2.0, "a problem")

    here = machine()
    gpu = Gpu(0, "NVIDIA Fake", (9, 0), 1, 1, 1)
    fake = type("Fake", (), {"gpus": (gpu,), "packages": here.packages, "cores": 2})()
    spec = SPECS["linear"]
    monkeypatch.setattr(cli_tune, "machine", lambda: fake)
    monkeypatch.setattr(cli_tune.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cli_tune, "clock_on", lambda device: None)
    monkeypatch.setattr(cli_tune, "target_of", lambda device: TARGETS["sm_90"]._replace(name=gpu.name))
    monkeypatch.setattr(cli_tune, "search", search)
    monkeypatch.setattr(type(spec), "backend", lambda self, name: self.backends[0])
    assert run("linear", "linear", "--shapes", spec.shapes[0].name, "--out", str(tmp_path)) == 0
    assert asked == [("linear", len(cli_tune.shapes_of([spec], spec.shapes[0].name)[0]), "cuda")]
    assert '"kernel"' in (tmp_path / "nvidia_fake.json").read_text()
    assert "linear: 1 configurations beat the rule" in capsys.readouterr().out
    assert run("linear", "--out", str(tmp_path / "nvidia_fake.json")) == 2
    assert "nvidia_fake.json: File exists" in capsys.readouterr().err and len(asked) == 1
    for spoilt in (
        "{",
        "[]",
        "{}",
        '{"kernels": {"a": 1}}',
        '{"kernels": {"a": {"64": {"ms": 1}}}}',
    ):  # told before anything is measured
        (tmp_path / "nvidia_fake.json").write_text(spoilt)
        assert run("linear", "--out", str(tmp_path)) == 2
        assert "nvidia_fake.json: no table of foci tune: " in capsys.readouterr().err and len(asked) == 1
    (tmp_path / "nvidia_fake.json").unlink()
    monkeypatch.setattr(cli_tune, "search", lambda *given, **named: iter(()))
    assert run("linear", "--out", str(tmp_path)) == 0
    assert "linear: 0 configurations beat the rule; nothing is written" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_shapes_come_in_the_order_of_the_words_each_once() -> None:
    spec = SPECS["delta"]
    [found] = cli_tune.shapes_of([spec], "small, KDA 1x512,small KDA")
    assert [case.name for case in found] == ["small GDN 1x256x4x64", "small KDA 1x256x4x64", "KDA 1x512x64x128"]
    assert cli_tune.shapes_of([spec], "") == [list(spec.shapes)]


def test_a_word_may_be_of_one_operator_alone_but_each_has_a_shape() -> None:
    specs = [SPECS["linear"], SPECS["delta"]]
    linear, delta = cli_tune.shapes_of(specs, "GLA,KDA")
    assert all("GLA" in case.name for case in linear) and all("KDA" in case.name for case in delta)
    with pytest.raises(ValueError, match="--shapes 'GLA': expected what is in a shape's name; delta has GDN"):
        cli_tune.shapes_of(specs, "GLA")
