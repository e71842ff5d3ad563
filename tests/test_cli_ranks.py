"""foci accelerate over ranks: started here or by torchrun, and one sentence where nobody starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from foci import cli, cli_ranks


def foci(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["accelerate", *words])
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--ulysses", "2", "--ring", "2"],
            "ulysses 2 x ring 2 needs 4 ranks, and this is a single process; start it with torchrun "
            "--nproc-per-node 4 -m foci accelerate ..., or let foci start them: --world 4",
        ),
        (["--world", "4", "--ulysses", "2", "--ring", "1"], "ulysses 2 is 2 ranks, but there are 4"),
        (["--world", "4", "--data", "3"], "data 3 is 3 ranks, but there are 4"),
        (["--world", "4", "--cfg", "4"], "--cfg must be 1 or 2, as guidance has two branches, got 4"),
        (["--world", "2", "--dtype", "int3"], "dtype must be one of float32, bfloat16, float16, float64, got 'int3'"),
        (["--world", "2", "--device", "warp"], "--world starts ranks on the CPU, and --device is warp"),
        (["--world", "2", "--device", "cpu:one"], "device must be like cpu or cuda:0, got 'cpu:one'"),
        (["nobody", "--world", "2"], "unknown model 'nobody'; expected one of digits-dit"),
        (["--world", "0"], "--world must be at least 1, got 0"),
        (["--ring", "0", "--world", "2"], "--ring must be at least 1, got 0"),
        (["--world", "2", "--compile", "on"], "--compile on is not for a run over ranks"),
        (["--world", "2", "--calls", "7"], "--calls 7 is not for a run over ranks"),
        (
            ["--world", "2", "--device", "cuda"],
            "--world starts ranks on the CPU, and --device is cuda; for GPUs use torchrun",
        ),
        (["--world", "2", "--text", "half"], "--text must be auto, split or replicated, got 'half'"),
        (["--text", "split"], "--text is an option of --ulysses and --ring, which are 1"),
        (["--world", "2", "--cfg", "2", "--text", "split"], "--text is an option of --ulysses and --ring, which are 1"),
        (["--world", "2", "--patches", "4"], "--patches is an option of --pipe"),
    ],
)
def test_bad_input(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_ranks, "World", lambda *args, **options: pytest.fail("ranks were started"))
    model = () if not words[0].startswith("-") else ("pixart",)
    assert foci(*model, *words, "--out", str(tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def started(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: ranks write where the process wrote that first started some."""
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, timeout=800)


def test_a_world_of_its_own(tmp_path: Path) -> None:
    done = started("foci", "accelerate", "flux", "--world", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = ["flux", "find", "split", "prove", "time", "memory", "traffic", "wrote"]
    assert [line.split()[0] for line in lines if line][1:] == names
    assert lines[0].endswith("2 ranks of 1 thread")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["ranks"]["degrees"]["ulysses"] == 2 and (tmp_path / "report.html").exists()


def test_json_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert foci("pixart", "--world", "2", "--ring", "2", "--out", str(tmp_path), "--json") == 0
    assert json.loads(capfd.readouterr().out) == json.loads((tmp_path / "plan.json").read_text())


def torchrun(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    return started(
        "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "foci", "accelerate", *words
    )


@pytest.mark.slow
def test_digits_over_ulysses_and_ring_under_torchrun(tmp_path: Path) -> None:
    done = torchrun(4, "digits-dit", "--ulysses", "2", "--ring", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["ranks"]["degrees"]["ulysses"], plan["ranks"]["degrees"]["ring"]) == (2, 2)
    assert plan["demo"]["before"]["right"] == plan["demo"]["after"]["right"] and plan["demo"]["difference"] <= 1e-4
    assert (tmp_path / "digits.png").exists()


@pytest.mark.slow
def test_torchrun_and_world_are_one_too_many(tmp_path: Path) -> None:
    done = torchrun(2, "pixart", "--world", "2", "--out", str(tmp_path / "out"))
    assert done.returncode and "--world 2 starts ranks, but torchrun has started this one already" in done.stderr
