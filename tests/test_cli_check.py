"""`foci check`: verdicts as exit codes, the report as JSON, bad input as one sentence."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from foci import cli, cli_check
from foci.check.run import Limits, examine

ROOT = Path(__file__).parent.parent
GOOD = """
import torch.nn.functional as F

def good(q, k, v, *, attn_mask=None, is_causal=False):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

def right(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)

number = 3
"""

RECURRENT = """
import torch

def undecayed(q, k, v, g, beta):
    state, out = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    for t in range(v.shape[1]):
        error = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, ..., None]).sum(-2))
        state = g[:, t].exp()[..., None, None] * state + k[:, t, ..., None] * error[:, :, None]
        out.append(k.shape[3] ** -0.5 * (state * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1)

def additive(q, k, v):
    return k.shape[3] ** -0.5 * ((q @ k.mT).tril() @ v)

def hgrn(x, log_decay):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = log_decay[:, t].exp() * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A module in the current directory, and only the quick laws."""
    (tmp_path / "theirs.py").write_text(GOOD)
    (tmp_path / "loops.py").write_text(RECURRENT)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    (tmp_path / "asks.py").write_text("def __getattr__(name):\n    raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    quick = ("forward", "gradients", "logarithm", "bad input")
    monkeypatch.setattr(cli_check, "examine", lambda *args, **kwargs: examine(*args, only=quick, **kwargs))
    return tmp_path


def run(capsys, arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split())
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def test_ours(here, capsys) -> None:
    code, out, _ = run(capsys, "check softmax --backend chunked --dtype float32,float16")
    assert code == 0 and "foci chunked · cpu · float32, float16" in out and "every law holds" in out


def test_every_backend_of_ours(here, capsys) -> None:
    code, out, _ = run(capsys, "check softmax --dtype float32")
    assert code == 0 and [name for name in ("foci aten", "foci chunked", "foci reference") if name not in out] == []


@pytest.mark.parametrize("name", ["linear", "delta", "scan", "selective_scan"])
def test_recurrences_of_ours(here, capsys, name: str) -> None:
    code, out, _ = run(capsys, f"check {name} --dtype float32")
    assert code == 0 and f"{name} · foci chunked · cpu · float32" in out
    assert "foci reference" not in out, "a loop over tokens is asked by name only"


def test_the_loop_of_a_recurrence_is_asked_by_name(here, capsys) -> None:
    code, out, _ = run(capsys, "check scan --backend reference --dtype float32")
    assert code == 0 and "scan · foci reference" in out


@pytest.mark.parametrize("arguments", ["hgrn --like scan", "additive --like linear --layout bhtd"])
def test_recurrences_of_theirs(here, capsys, arguments: str) -> None:
    code, out, _ = run(capsys, f"check loops:{arguments} --dtype float32")
    assert code == 0 and "every law holds" in out


def test_kernels_are_asked_in_the_interpreter_where_it_is_on(tmp_path) -> None:
    """In a process of its own, which imports Triton after the word is said."""
    quick = """
import sys
from foci import cli, cli_check
from foci.check.run import examine
cli_check.examine = lambda *a, **k: examine(*a, only=("forward",), isolated=False, **k)
cli.main(sys.argv[1:])
"""
    words = ["check", "scan", "--backend", "triton", "--json", str(tmp_path / "it.json")]
    command = [sys.executable, "-c", quick, *words]
    ended = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0 and "scan · foci triton · cpu · float32\n" in ended.stdout, ended.stderr
    rows = json.loads((tmp_path / "it.json").read_text())["rows"]
    assert [(row["law"], row["verdict"]) for row in rows] == [("forward", "ok")]


DEADLY = """
import ctypes, os, time
import torch.nn.functional as F

def ends(q, k, v):
    os._exit(0)

def gated(q, k, v, g=None):
    os._exit(0)

def crosses(q, k, v):
    if q.shape[2] != k.shape[2]:
        ctypes.string_at(0)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

def hangs(q, k, v, g=None):
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("deadly:ends --like softmax --layout bhtd", "it ended the interpreter (exit code 0)"),
        ("deadly:gated --like linear", "it ended the interpreter (exit code 0)"),
        ("deadly:gated --like delta", "it ended the interpreter (exit code 0)"),
        ("deadly:crosses --like softmax --layout bhtd", "it killed the interpreter (SIGSEGV)"),
        ("deadly:hangs --like linear", "it gave no answer for 2 s and was stopped"),
    ],
)
def test_what_ends_the_process_or_hangs_is_a_fault(tmp_path, arguments: str, sentence: str) -> None:
    """In a process of its own: the tiny calls that tell what it takes once ended this one, with exit code 0."""
    (tmp_path / "deadly.py").write_text(DEADLY)
    command = [sys.executable, "-m", "foci", "check", *arguments.split()]
    ended = subprocess.run(
        [*command, "--dtype", "float32", "--laws", "1", "--limit", "2,30"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 1 and sentence in " ".join(ended.stdout.split()), ended.stdout + ended.stderr


def test_tiny_calls_are_made_here_where_what_was_imported_rules_a_child_out(here, monkeypatch) -> None:
    """As a module does that uses CUDA, or counts GPUs: whether a child can work is asked behind the import."""
    (here / "counts.py").write_text("def f(q, k, v):\n    asked.append(1)\n    return q\n\nasked = []\n")
    monkeypatch.delitem(sys.modules, "counts", raising=False)
    monkeypatch.setattr(cli_check.isolate, "why_unable", lambda device: device if "counts" in sys.modules else "")
    aside = functools.partial(cli_check._aside, "cpu", Limits())
    cli_check._theirs("counts:f", "softmax", "", aside)
    assert sys.modules["counts"].asked


def test_a_fault_of_a_recurrence_is_named(here, capsys) -> None:
    code, out, _ = run(capsys, "check loops:undecayed --like delta --dtype float32")
    assert code == 1 and "v - S^T k is read from the state before its decay" in " ".join(out.split())


def test_a_fault_is_exit_code_1_and_in_the_json(here, capsys) -> None:
    code, out, _ = run(capsys, "check theirs:good --like softmax --layout bhtd --dtype float32 --json report.json")
    assert code == 1 and "mask is ignored" in " ".join(out.split())
    facts = json.loads((here / "report.json").read_text())
    assert facts["ok"] is False and facts["candidate"] == "theirs:good"


def test_only_the_laws_that_are_named_are_asked(here, capsys, monkeypatch) -> None:
    monkeypatch.setattr(cli_check, "examine", examine)
    code, out, _ = run(capsys, "check scan --backend chunked --dtype float32 --laws 9,14 --json report.json")
    assert code == 0 and out.rstrip().endswith("only the laws of --laws 9,14 were asked")
    facts = json.loads(Path("report.json").read_text())
    assert [row["number"] for row in facts["rows"]] == [9, 14] and facts["asked"] == {"laws": "9,14"}


@pytest.mark.parametrize(
    ("chosen", "asked"),
    [
        ("", {}),
        ("--cases 2/9", {"cases": "2/9"}),
        ("--drawn 2", {"drawn": "2,0,21"}),
        ("--drawn 2,3 --cases 2/2", {"cases": "2/2", "drawn": "2,3,21"}),
        ("--drawn 2,3,15", {"drawn": "2,3,15"}),
    ],
)
def test_a_report_says_what_was_asked(here, capsys, chosen: str, asked: dict[str, str]) -> None:
    """A part that holds must not look as if all did."""
    code, out, _ = run(capsys, f"check scan --backend chunked --dtype float32 {chosen} --json report.json")
    facts = json.loads(Path("report.json").read_text())
    assert code == 0 and facts["ok"] and facts["asked"] == asked
    assert all(f"only the cases of --{option} {text} were asked" in out for option, text in asked.items())


@pytest.mark.parametrize("operator", cli_check.FUNCTIONS)
def test_what_a_gpu_drew_is_drawn_again_anywhere(operator: str) -> None:
    """Room enters the draw, and the printed line tells it."""
    spec = cli_check.SPECS[operator]
    there, here, own = (
        cli_check.drawn(spec, cli_check.drawing_of(text, device))
        for text, device in (("12,5", "cuda:1"), ("12,5,29", "cpu"), ("12,5", "cpu"))
    )
    assert [case.name for case in there.cases] == [case.name for case in here.cases]
    assert [case.name for case in here.cases] != [case.name for case in own.cases]
    assert str(cli_check.drawing_of("12,5", "cuda")) == "12,5,29"


def test_parts_of_the_cases_are_all_cases(here, capsys, monkeypatch) -> None:
    monkeypatch.setattr(cli_check, "examine", examine)
    counts = []
    for cases in ("", "--cases 1/2", "--cases 2/2"):
        code, out, _ = run(capsys, f"check scan --backend chunked --dtype float32 --laws 9 {cases} --json report.json")
        assert code == 0 and (f"only the cases of {cases} were asked" in out) == bool(cases)
        counts.append(json.loads(Path("report.json").read_text())["rows"][0]["cases"])
    assert counts[0] == counts[1] + counts[2] and min(counts) > 0


@pytest.mark.parametrize(("cases", "verdict"), [("1/2", "ok"), ("2/2", "not tested")])
def test_bad_inputs_are_the_first_case_spoiled(cases: str, verdict: str, here, capsys, monkeypatch) -> None:
    """Of the second case, which has a state, offsets that decrease were refused for the state: law 14 was broken."""
    monkeypatch.setattr(cli_check, "examine", examine)
    run(capsys, f"check scan --backend chunked --dtype float32 --laws 14 --cases {cases} --json report.json")
    assert json.loads(Path("report.json").read_text())["rows"][0]["verdict"] == verdict


def test_drawn_cases_are_asked_in_place_of_the_own_and_one_of_them_again(here, capsys, monkeypatch) -> None:
    monkeypatch.setattr(cli_check, "examine", examine)
    asked = "check delta --backend chunked --dtype float32 --laws 2 --drawn 6,3"
    code, out, _ = run(capsys, asked)
    assert code == 0 and out.rstrip().endswith("only the cases of --drawn 6,3,21 were asked")
    assert re.search(r" 2 forward +6 ", out)
    spec = cli_check.drawn(cli_check.SPECS["delta"], cli_check.drawing_of("6,3", "cpu"))
    assert [case.name.partition(":")[0] for case in spec.cases] == [f"3.{i}" for i in range(1, 7)]
    assert cli_check.of_cases(spec, "5/6").cases[0].name == spec.cases[4].name and not spec.probes.bad
    code, out, _ = run(capsys, f"{asked} --cases 5/6")
    assert code == 0 and re.search(r" 2 forward +1 ", out)


def test_a_drawn_case_shows_a_fault_of_theirs_and_is_named(here, capsys, monkeypatch) -> None:
    monkeypatch.setattr(cli_check, "examine", examine)
    code, out, _ = run(capsys, "check theirs:good --like softmax --layout bhtd --dtype float32 --laws 2 --drawn 20,1")
    assert code == 1 and re.search(r"\[1\.\d+: ", out), out


def test_what_ours_gives_is_asked_without_waking_a_gpu(monkeypatch) -> None:
    """A child of the process asks the laws, and no child of one that has used a GPU can use it."""
    asked: list[str | None] = []

    ours = cli_check.FUNCTIONS["linear"]

    @functools.wraps(ours)
    def noted(*args, backend=None, **options):
        asked.append(backend)
        return ours(*args, **options)

    candidate = cli_check.candidate_of(cli_check.SPECS["linear"], noted, "triton", "cuda")
    assert asked and set(asked) == {"reference"}  # what others would answer, and nothing to build
    assert candidate.outputs == cli_check._ours("linear", "chunked", "cpu")[0].outputs
    case = cli_check.SPECS["linear"].cases[0]
    candidate.call(case.make(cli_check.torch.float32, cli_check.torch.device("cpu"), 0))
    assert asked[-1] == "triton"


def test_json_alone_on_the_output(here, capsys) -> None:
    code, out, _ = run(capsys, "check theirs:right --like softmax --layout bhtd --dtype float32 --json -")
    assert code == 0 and json.loads(out)["ok"] is True


def test_what_kills_the_interpreter_while_it_is_imported_is_told(here) -> None:
    """The command ended without a word."""
    (here / "crashes.py").write_text("import ctypes\n\nctypes.string_at(0)\n")
    command = [sys.executable, "-m", "foci", "check", "crashes:f", "--like", "softmax"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in ended.stderr and f'File "{here / "crashes.py"}", line 3' in ended.stderr


LEAVES = {
    "at its import": "import os\n\nos._exit(0)\n",
    "by another name": "from os import _exit\n\n_exit(0)\n",
    "from a thread": "import os, threading\nit = threading.Thread(target=lambda:\nos._exit(0)); it.start(); it.join()",
    "when it is asked for": "import os\ndef __getattr__(name):\n    os._exit(0)\n",
}


@pytest.mark.parametrize("when", LEAVES)
def test_what_leaves_the_interpreter_does_not_pass(here, when) -> None:
    """The command ended with its code 0, as if every law held."""
    (here / "leaves.py").write_text(LEAVES[when])
    command = [sys.executable, "-m", "foci", "check", "leaves:f", "--like", "softmax"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert f"{here / 'leaves.py'}, line 3: os._exit(0) before there was a verdict" in ended.stderr


def test_children_of_what_is_imported_leave_as_they_like(here, capsys) -> None:
    code = """
        import os
        if not (child := os.fork()):
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        number = 1
    """
    (here / "forks.py").write_text(textwrap.dedent(code))
    leave = os._exit
    code, _, error = run(capsys, "check forks:number --like softmax")
    assert (code, os._exit) == (2, leave) and "forks:number is an int; expected a callable" in error


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("line", "after"), [("is_enabled()", None), ("enable(sys.__stdout__)", True), ("disable()", False)]
)
def test_faulthandler_is_afterwards_as_it_was_or_as_the_module_set_it(here, before, line, after) -> None:
    (here / "handles.py").write_text(f"import faulthandler, sys\nfaulthandler.{line}\n")
    code = "import faulthandler; from foci.cli_check import _load; "
    code += f"faulthandler.enable() if {before} else None; _load('handles:sys'); print(faulthandler.is_enabled())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(before if after is None else after)]


def test_a_layer_is_checked_as_a_class_or_an_object(here, capsys) -> None:
    code, out, _ = run(capsys, "check foci.nn:DeltaNet --like layer --dtype float32")
    assert code == 0 and "layer · foci.nn:DeltaNet" in out and "every law holds" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("check theirs:good", "layer, processor, transformers"),
        ("check theirs:good --like flash", "got 'flash'"),
        ("check nowhere.at_all:f --like softmax", "cannot import nowhere.at_all: ModuleNotFoundError"),
        ("check broken:f --like softmax", "No module named 'nothing_of_this_name'"),
        ("check script:f --like softmax", "cannot import script: SystemExit: 3"),
        ("check asks:f --like softmax", "ended the check before there was a verdict: SystemExit: 0"),
        ("check theirs:missing --like softmax", "theirs has no missing"),
        ("check theirs --like softmax", "expected package.module:name, got 'theirs'"),
        ("check theirs:number --like softmax", "theirs:number is an int; expected a callable"),
        ("check theirs:number --like layer", "layer is an int; expected an nn.Module"),
        ("check threading:Event --like layer", "threading:Event() is an Event; expected an nn.Module with forward("),
        ("check theirs:good --like softmax --layout tbd", "layout must be 'bthd' or 'bhtd', got 'tbd'"),
        ("check theirs:good --like scan --layout bhtd", "--layout is for softmax, linear, delta; it does not apply"),
        ("check delta --layout bhtd", "--layout is for an attention of yours; 'delta' is foci's own"),
        ("check theirs:good --like softmax --backend aten", "--backend chooses among foci's own"),
        ("check softmax --backend fast", "--backend: attention: unknown backend 'fast'"),
        ("check softmax --backend triton", "it needs a GPU, the tensors are on cpu; --device cuda asks it there, and"),
        ("check softmax --like softmax", "'softmax' is foci's own"),
        ("check softmax --dtype int8", "--dtype must be among float64, float32, bfloat16, float16; got 'int8'"),
        ("check softmax --device tpu", "--device must be cpu or cuda, or one of several such as cuda:1, got 'tpu'"),
        ("check softmax --device cpu:banana", "one of several such as cuda:1, got 'cpu:banana'"),
        ("check softmax --device cuda:", "one of several such as cuda:1, got 'cuda:'"),
        ("check softmax --device cuda:99", "--device cuda:99: this machine has "),
        ("check softmax --backend aten --limit 0", "--limit must be a positive number of seconds, got 0"),
        ("check softmax --backend aten --limit 60,soon", "--limit must be a positive number of seconds, got soon"),
        (
            "check softmax --dtype ,",
            "--dtype: ',' names no dtype; expected some of float64, float32",
        ),
        ("check softmax --limit ,", "--limit: ',' has no number of seconds; expected one, or 2 joined with a comma"),
        ("check softmax --world 2 --wrap ring --limit 10,9", "--limit takes one number with --world, what a rank"),
        ("check softmax --backend aten --limit 60,9,7", "--limit takes at most 2 numbers of seconds, got 3: 60,9,7"),
        ("check softmax --laws 1,16", "--laws: there is no law '16'; they are 1, 2, 3,"),
        ("check softmax --laws two", "--laws: there is no law 'two'"),
        ("check softmax --laws 1 --world 2", "--laws does not apply with --world"),
        ("check softmax --drawn 3 --world 2", "--drawn does not apply with --world"),
        ("check softmax --drawn 0", "room, 14 to 34: 40 or 40,7 or 40,7,29; got '0'"),
        ("check softmax --drawn 4,x", "--drawn must be how many, 1 to 100000, and after commas the seed"),
        ("check softmax --drawn 4,1,2", "--drawn must be how many, 1 to 100000, and after commas the seed"),
        ("check softmax --drawn 4,1,21,3", "got '4,1,21,3'"),
        ("check softmax --drawn 4,", "got '4,'"),
        ("check softmax --drawn=", "got ''"),
        ("check softmax --cases 1/\u0663", "--cases must be i/n, every nth from the ith, 1 <= i <= n <= "),
        ("check softmax --cases=", "--cases must be i/n, every nth from the ith, 1 <= i <= n <= "),
        ("check softmax --drawn= --world 2", "--drawn does not apply with --world"),
        ("check softmax --drawn \u0664", "got '\u0664'"),
        ("check softmax --drawn 100001", "--drawn must be how many, 1 to 100000,"),
        ("check softmax --drawn 99999999999", "--drawn must be how many, 1 to 100000,"),
        (f"check softmax --drawn 2,{'9' * 5000}", f"got '2,{'9' * 38}'"),
        ("check foci.nn:Attention --like layer --drawn 4", "--drawn is for softmax, linear, delta, scan,"),
        ("check softmax --cases 1/2 --world 2", "--cases does not apply with --world"),
        ("check softmax --cases 0/2", "--cases must be i/n, every nth from the ith, 1 <= i <= n <= "),
        ("check softmax --cases 3", "--cases must be i/n"),
        ("check softmax --json no/such/folder.json --backend aten --dtype float32", "no/such/folder.json"),
        ("check softmax --json . --backend aten --dtype float32", "--json .: that is a folder; expected a file"),
    ],
)
def test_bad_input_is_one_sentence(here, capsys, arguments: str, sentence: str) -> None:
    code, _, err = run(capsys, arguments)
    assert code == 2 and sentence in err and len(err.strip().splitlines()) == 1


PAGE = (ROOT / "docs" / "check.md").read_text()
SHOWN = re.findall(r"```python\n(.*?)```\s*```\n\$ foci (check [^\n]*)\n(.*?)\n```", PAGE, re.S)


def test_the_drawn_case_in_the_docs_is_drawn() -> None:
    (name,) = re.findall(r"`(3\.17: [^`]*)`", PAGE)
    spec = cli_check.drawn(cli_check.SPECS["delta"], cli_check.drawing_of("30,3,21", "cpu"))
    assert cli_check.of_cases(spec, "17/30").cases[0].name == name


@pytest.mark.parametrize(("code", "command", "printed"), SHOWN, ids=[command.split()[1] for _, command, _ in SHOWN])
def test_the_transcripts_in_the_docs_are_real(tmp_path, monkeypatch, capsys, code, command, printed) -> None:
    """Line by line but for the numbers."""
    assert len(SHOWN) == 3
    (tmp_path / "mylib.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mylib", raising=False)
    monkeypatch.setenv("COLUMNS", "118")
    status, out, _ = run(capsys, command)
    assert status == 1
    assert [re.sub(r"[\d.e+-]+", "", line) for line in out.strip().splitlines()] == [
        re.sub(r"[\d.e+-]+", "", line) for line in printed.strip().splitlines()
    ]
