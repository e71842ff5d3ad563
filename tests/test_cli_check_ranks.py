"""`foci check --world`: faults of parallel functions as exit codes and sentences, ours, and options that do not fit."""

from __future__ import annotations

import json
import re

import pytest

from foci import cli, cli_check_ranks
from foci.check.across import examine_ranks

THEIRS = """
import torch
import torch.distributed as dist
import torch.nn.functional as F

def local(q, k, v, *, is_causal=False, group):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)

def forgets(q, k, v):
    return q.shape[-1] ** -0.5 * torch.einsum("bhts,bshv->bthv", torch.einsum("bthk,bshk->bhts", q, k).tril(), v)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A module in the current directory, and only the quick laws."""
    (tmp_path / "parallel_theirs.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    quick = ("forward", "gradients")
    monkeypatch.setattr(cli_check_ranks, "examine_ranks", lambda *a, **o: examine_ranks(*a, **o | {"only": quick}))
    return tmp_path


def run(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["check", *words])
    out, err = capsys.readouterr()
    return end.value.code, re.sub(r"\s+", " ", out), err


def test_a_local_attention_is_named(here, capsys) -> None:
    code, out, _ = run(capsys, "parallel_theirs:local", "--like", "softmax", "--world", "2", "--dtype", "float32")
    assert code == 1
    assert "as if each rank attended to its own keys alone" in out and "on every rank at positions 0..15" in out


def test_a_recurrence_without_the_state_of_the_ranks_before(here, capsys) -> None:
    words = ["parallel_theirs:forgets", "--like", "linear", "--world", "2", "--dtype", "float32", "--json"]
    words.append("report.json")
    code, out, _ = run(capsys, *words)
    assert code == 1 and "on rank 1 at positions 8..15" in out
    assert json.loads((here / "report.json").read_text())["candidate"] == "parallel_theirs:forgets"


def test_ours_pass(here, capsys) -> None:
    code, out, _ = run(capsys, "softmax", "--world", "2", "--wrap", "ulysses", "--dtype", "float32")
    assert code == 0 and "foci ulysses" in out, out


@pytest.mark.parametrize(
    "words, said",
    [
        (("softmax", "--order", "zigzag"), "--order is for ranks: give --world as well"),
        (("softmax", "--wrap", "ring"), "--wrap is for ranks"),
        (("softmax", "--world", "2"), "--wrap must be one of ring, ulysses, usp, handoff for 'softmax'"),
        (("softmax", "--world", "0", "--wrap", "ring"), "--world must be at least 2, got 0"),
        (("softmax", "--world", "3", "--wrap", "usp"), "usp takes an even number of ranks"),
        (("softmax", "--world", "2", "--wrap", "handoff"), "handoff is for recurrences"),
        (("linear", "--world", "2", "--wrap", "ring"), "ring and usp for softmax"),
        (("softmax", "--world", "2", "--wrap", "ulysses", "--order", "zigzag"), "ulysses takes tokens in plain order"),
        (("softmax", "--world", "2", "--wrap", "ring", "--order", "sorted"), "--order must be one of plain"),
        (("softmax", "--world", "2", "--wrap", "ring", "--backend", "aten"), "do not apply with --world"),
        (("parallel_theirs:local", "--like", "softmax", "--world", "2", "--wrap", "ring"), "--wrap is for an operator"),
        (("parallel_theirs:local", "--world", "2"), "--like must be softmax, linear, delta or scan"),
        (("parallel_theirs:nothing", "--world", "2", "--like", "softmax"), "has no nothing"),
        (("parallel_theirs:local", "--world", "2", "--like", "softmax", "--limit", "0"), "positive number of seconds"),
    ],
)
def test_options_that_do_not_fit_are_refused(here, capsys, words, said) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2 and said in re.sub(r"\s+", " ", err)


@pytest.mark.parametrize("name", ["linear", "delta", "scan", "selective_scan"])
def test_no_case_is_asked_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        cli_check_ranks, "examine_ranks", lambda spec, *_, **__: seen.append([case.name for case in spec.cases])
    )
    cli_check_ranks.check_ranks(name, "", "", 2, "", "handoff")
    assert sorted(set(seen[0])) == sorted(seen[0]) and any("packed" in each for each in seen[0])
