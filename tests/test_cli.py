"""The command line ends every way of asking wrongly in one sentence and exit code 2, and hides no fault of ours."""

from __future__ import annotations

import subprocess
import sys

import pytest

from foci import cli
from foci.core.errors import Unsupported


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("brew", "No such command 'brew'"),
        ("explain", "Missing argument 'OPERATOR'"),
        ("explain softmax", "Missing option '--shape'"),
        ("explain softmax --shape T4,H6,K8 --softcap warm", "'--softcap'"),
        ("explain softmax --shape T4,H6,K8 --color red", "No such option"),
    ],
)
def test_usage_errors_are_one_line(capsys, arguments: str, sentence: str) -> None:
    code, out, err = run(capsys, *arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err


@pytest.mark.parametrize(
    "error", [ValueError("softcap"), Unsupported("what", ["why"]), FileNotFoundError(2, "No such file", "plan.json")]
)
def test_a_users_mistake_is_a_sentence(capsys, monkeypatch, error: Exception) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    code, _, err = run(capsys)
    assert (code, err) == (2, f"{type(error).__name__}: {error}\n")


def test_our_own_faults_keep_their_traceback(monkeypatch) -> None:
    def fail(arguments: list[str]) -> int:
        raise RuntimeError("ours")

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(RuntimeError, match="ours"):
        cli.main([])


def test_interruption(capsys, monkeypatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert run(capsys) == (130, "", "interrupted\n")


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from foci.cli import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "MissingExtra: this needs typer, which is not installed: pip install 'foci[cli]'\n"


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "foci", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "doctor" in done.stdout
