"""benchmarks/kernels.py: what it calls wrong is called wrong, and its table says what was compiled."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import kernels_compile, kernels_page, kernels_spills, kernels_tables

from foci.core import tune
from foci.core.tune import TARGETS

ROOT = Path(__file__).parents[1]
OPS = ROOT / "src" / "foci" / "ops"
SCRIPT = '''"""Kernels that are good and bad on purpose."""
import torch, triton, triton.language as tl
from foci.core.tune import Config, launch

@triton.jit
def product(x_ptr, out_ptr, stride, N: tl.constexpr):
    r = tl.arange(0, N)
    x = tl.load(x_ptr + r[:, None] * stride + r[None, :])
    tl.store(out_ptr + r[:, None] * stride + r[None, :], tl.dot(x, x))

for N, warps in {sizes}:
    x = torch.empty(N, N, dtype=torch.bfloat16, device="meta")
    launch(product, (1,), x, x, N, N=N, config=Config({{}}, warps, 1))
'''
ROW = {
    "operator": "linear", "variant": "GLA", "direction": "forward", "kernel": "walk", "target": "sm_90",
    "meta": {"N": 16}, "registers": 128, "spills": 0, "stack": 0, "shared": 49152, "tensor": 0, "warps": 4,
    "launches": 1, "instructions": {"wgmma": 4, "cp.async": 8},
}  # fmt: skip


def compiled(folder: Path, sizes: list[tuple[int, int]], *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "planted.py").write_text(SCRIPT.format(sizes=sizes))
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--script", str(folder / "planted.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[object, str, str]]]:
    """What `compiled` says where nothing comes to be compiled, without a process that imports torch and Triton anew.

    The exit code, what was printed, and the errors, among them the words that Python prints of an exit with words.
    """
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which the module would take out for all that follow
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kernels, threads = importlib.import_module("kernels"), torch.get_num_threads()

    def ask(sizes: list[tuple[int, int]], *words: str) -> tuple[object, str, str]:
        (tmp_path / "planted.py").write_text(SCRIPT.format(sizes=sizes))
        monkeypatch.setattr(sys, "argv", ["kernels.py", "--script", str(tmp_path / "planted.py"), *words])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            sys.exit(kernels.main())
        out, err = capfd.readouterr()
        code = ended.value.code
        return (code, out, err) if isinstance(code, int) else (1, out, f"{err}{code}\n")

    yield ask
    torch.set_num_threads(threads)


def test_a_good_kernel_is_compiled_for_every_target_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = compiled(tmp_path, [(64, 4)], "--out", "lines.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    for target, instruction in zip(TARGETS, ("mma", "wgmma", "tcgen05", "mma", "mfma"), strict=True):
        line = next(line for line in done.stdout.split("\n") if line.startswith(target))
        following = done.stdout.split(line)[1].strip().splitlines()[0]
        assert instruction in following, done.stdout
    assert len((tmp_path / "lines.jsonl").read_text().splitlines()) == 1 + len(TARGETS)


def test_a_spill_is_wrong_and_said_with_the_configuration(tmp_path: Path) -> None:
    done = compiled(tmp_path, [(128, 1)], "--target", "sm_90")
    assert done.returncode == 1
    assert "script, planted: product on sm_90: spills " in done.stdout
    assert "(N 128, num_warps 1, num_stages 1)" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--write",), "without --script"),
        (("--check",), "without --script"),
        (("--triton", "3.6.0"), "without --script"),
        ((), "it launches no kernel"),
    ],
)
def test_a_script_that_launches_nothing_or_would_replace_the_table_is_wrong(
    words: tuple[str, ...], said: str, refused: Callable[..., tuple[object, str, str]]
) -> None:
    before = (ROOT / "docs" / "kernels.jsonl").read_bytes()
    code, out, err = refused([], *words)
    assert code == 1
    assert said in out + err
    assert (ROOT / "docs" / "kernels.jsonl").read_bytes() == before


def test_a_script_that_is_not_there_is_said_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--script", str(tmp_path / "nope.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines() == [f"--script {tmp_path / 'nope.py'}: there is no such file"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--workers 0", 2, "--workers: 0: expected a whole number above 0"),
        ("--check --write", 2, "--write: not allowed with argument --check"),
        ("--known nope.jsonl", 2, "--known: nope.jsonl: there is no such file"),
        ("--known cut.jsonl", 2, "--known: cut.jsonl: expected a table with identities"),
        (f"--known {ROOT}/docs/kernels.jsonl", 2, "kernels.jsonl: expected a table with identities"),
        ("--out .", 2, "--out: .: expected a file in a folder that is there"),
        ("--out nope/lines.jsonl", 2, "--out: nope/lines.jsonl: expected a file in a folder that is there"),
        ("--only planted nope", 1, "--only nope: no operator, variant or kernel that is asked for has such a name"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_compiled(
    words: str, code: int, said: str, tmp_path: Path, refused: Callable[..., tuple[object, str, str]]
) -> None:
    (tmp_path / "cut.jsonl").write_text('{"triton": "3.6.0"}\n{"operator": "li')
    ended, out, err = refused([(64, 4)], *words.split())
    assert (ended, out) == (code, "")
    assert said in err


def test_a_kernel_whose_products_wait_for_each_other_is_said() -> None:
    assert kernels_page.said(ROW) == "128, 48 K, wgmma cp.async"
    assert kernels_page.said(ROW | {"serial": True}) == "128, serial, 48 K, wgmma cp.async"
    changed = kernels_page.differences([ROW], [ROW | {"serial": True}])
    assert changed == ["linear, GLA, forward: walk on sm_90: serial None -> True"]


def test_every_known_spill_is_one_of_the_table_and_one_that_ended_is_named() -> None:
    rows = [json.loads(line) for line in (ROOT / "docs" / "kernels.jsonl").read_text().splitlines()[1:]]
    assert kernels_spills.outlived(rows) == []
    kept = next(iter(kernels_spills.SPILLS))
    without = [row for row in rows if (row["operator"], row["kernel"], row["target"]) != kept]
    assert kernels_spills.outlived(without) == [f"SPILLS: {', '.join(kept)} spills no more: take it out"]


def test_limits_of_a_target_and_a_missing_instruction_are_faults() -> None:
    record = {"shared": 101_376, "tensor": 512, "dots": 1, "instructions": {"mma": 3}}
    sm_120 = TARGETS["sm_120"]
    assert kernels_compile.faults(record, sm_120) == []
    assert kernels_compile.faults(record | {"shared": 131_072}, sm_120) == [
        "131072 bytes of shared memory, the target has 101376"
    ]
    assert kernels_compile.faults(record | {"tensor": 576}, sm_120) == ["576 columns of tensor memory, there are 512"]
    empty = record | {"instructions": {"cp.async": 3}}
    assert "has no matrix instruction" in kernels_compile.faults(empty, sm_120)[0]
    assert kernels_compile.faults(empty | {"dots": 0}, sm_120) == []
    assert kernels_compile.faults({"error": "the compiler died"}, sm_120) == ["the compiler died"]


def test_what_does_not_compile_is_said_with_its_reason(tmp_path: Path) -> None:
    done = compiled(tmp_path, [(48, 4)], "--target", "sm_90")
    assert done.returncode == 1
    assert "script, planted: product on sm_90: CompilationError" in done.stdout
    assert "power of 2" in done.stdout


def table(*rows: dict[str, Any]) -> str:
    text = f"# Page\n\nbefore\n\n{kernels_page.BEGIN}\nold\n{kernels_page.END}\n\nafter\n"
    reasons = {("linear", "walk", "sm_80"): "four bytes, outside the loop"}
    return kernels_page.page(text, list(rows), "3.7.1", reasons, {})


def test_the_page_has_a_row_a_kernel_and_a_column_a_target() -> None:
    spilled = ROW | {"target": "sm_80", "spills": 4, "instructions": {"mma": 2}}
    text = table(ROW, spilled)
    assert "old" not in text
    assert text.startswith("# Page\n\nbefore\n") and text.endswith("\nafter\n")
    row = next(line for line in text.splitlines() if "`walk`" in line)
    assert "128, **spills 4 B**, 48 K, mma | 128, 48 K, wgmma cp.async |  |" in row
    assert "- linear, `walk` on sm_80 (4): four bytes, outside the loop" in text
    assert table(ROW).count("four bytes") == 0


def test_the_page_is_made_from_itself_again() -> None:
    text = table(ROW)
    assert kernels_page.page(text, [ROW], "3.7.1", {}, {}) == text


def test_the_page_says_in_a_line_what_another_triton_makes_of_all() -> None:
    theirs = [ROW | {"spills": 8}, ROW | {"target": "sm_80", "registers": 130}, ROW | {"target": "sm_120", "spills": 0}]
    mine = [ROW, ROW | {"target": "sm_80"}, ROW | {"target": "sm_120", "spills": 4}]
    text = kernels_page.page(table(), mine, "3.7.1", {}, {"3.6.0": theirs})
    assert "| 3.6.0 | 3 | 2 | 1 | 1, `walk` on sm_90 most: 0 -> 8 bytes |" in text
    assert "| 3.6.0 | 3 | 0 | 0 | 0 |" in kernels_page.page(table(), mine, "3.7.1", {}, {"3.6.0": mine})


@pytest.fixture
def kernels_tritons(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("kernels_tritons")


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels_tritons: Any) -> Callable[..., int]:
    """What is said of a Triton 3.6.0 that makes such rows, beside tables of this one and perhaps its own."""

    def ask(
        rows: list[dict[str, Any]], known: list[dict[str, Any]] | None, wrong: Sequence[str] = (), ended: int = 0,
        failing: str = "", **how: bool,
    ) -> int:  # fmt: skip
        def write(path: Path, version: str, rows: list[dict[str, Any]], wrong: Sequence[str] = ()) -> None:
            lines = [{"triton": version, "wrong": list(wrong)}, *rows]
            path.write_text("\n".join(map(json.dumps, lines)) + "\n")

        def run(command: list[Any], **_: Any) -> Any:
            taken = how.get("check", True) or how.get("write", False)
            assert ("--known" in command) == (taken and known is not None), "what has not changed is not compiled again"
            write(Path(command[command.index("--out") + 1]), "3.6.0", rows, wrong)
            return subprocess.CompletedProcess(command, ended)

        others = kernels_tritons.Others(tmp_path / "kernels.jsonl")
        write(others.lines, "3.7.1", [ROW])
        if known is not None:
            write(others.path("3.6.0"), "3.6.0", known)
        monkeypatch.setattr(kernels_tritons, "_environment", lambda folder, version: Path("python"))
        monkeypatch.setattr(kernels_tritons, "_failing", lambda python: failing)
        monkeypatch.setattr(kernels_tritons.subprocess, "run", run)
        return others.ask("3.6.0", ["kernels.py"], **({"write": False, "check": True} | how))

    return ask


SPILLED = ROW | {"spills": 8}


@pytest.mark.parametrize("text", ["# nothing", kernels_page.BEGIN, f"{kernels_page.END}{kernels_page.BEGIN}"])
def test_a_page_without_its_marks_is_no_page(text: str) -> None:
    """It passed for one whose table is right, and was written as it was."""
    with pytest.raises(ValueError, match="expected one table between"):
        kernels_page.page(text, [ROW], "3.7.1", {}, {})


@pytest.mark.parametrize(
    ("error", "stopped"),
    [
        (RuntimeError("PTXASError: Internal Triton PTX codegen error\n`ptxas` failed with error code -9"), True),
        (OSError(28, "No space left on device"), True),
        (RuntimeError("`ptxas` failed with error code 255"), False),
        (ValueError("tile of 3"), False),
    ],
)
def test_what_the_machine_did_is_no_verdict_of_the_compiler(
    error: Exception, stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(launch: Any, target: Any) -> Any:
        raise error

    monkeypatch.setattr(kernels_compile, "_compiled", compiled)
    monkeypatch.setattr(kernels_compile.os, "dup2", lambda *_: None)  # which is of the child that this has none of
    with kernels_compile.triton.knobs.cache.scope():  # monkeypatch would fix the folder for all later tests
        kernels_compile._compile_into(tmp_path / "out", None, None)  # type: ignore[arg-type]
    assert ("stopped" in json.loads((tmp_path / "out" / "record.json").read_text())) == stopped


@pytest.mark.parametrize(
    ("rows", "known", "wrong", "code", "said"),
    [
        ([SPILLED], [SPILLED], (), 0, "Triton 3.6.0, as it is kept -> 3.6.0: 1 kernels, 0 differ"),
        ([SPILLED], [ROW], (), 1, "walk on sm_90: spills 0 -> 8"),
        ([SPILLED], None, (), 0, "Triton 3.7.1, as it is kept -> 3.6.0: 1 kernels, 1 differ"),
        ([ROW], None, ("the compiler died",), 1, "the compiler died"),
        ([ROW], [ROW], ("the compiler died",), 1, "the compiler died"),
        ([SPILLED], [SPILLED, ROW | {"target": "sm_80"}], (), 1, "walk on sm_80: is gone"),
    ],
)
def test_another_triton_is_held_to_its_own_table_and_without_one_to_what_a_gpu_asks(
    rows: list[dict[str, Any]], known: list[dict[str, Any]] | None, wrong: tuple[str, ...], code: int, said: str,
    another: Callable[..., int], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert another(rows, known, wrong) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("proven", [True, False])
def test_a_triton_whose_inside_is_another_is_told_of_and_wrong_where_it_is_proven(
    proven: bool, another: Callable[..., int], kernels_tritons: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(kernels_tritons, "PROVEN", ("3.6.",) if proven else ("3.7.",))
    assert another([ROW], [ROW], failing="1 failed") == proven
    said = capsys.readouterr().out
    assert "Triton 3.6.0: what foci takes from inside it is not as it was\n1 failed" in said
    assert another([ROW], [ROW], failing="1 failed", check=False) == 0


def test_what_is_written_against_the_inside_of_triton_is_asked(kernels_tritons: Any, tmp_path: Path) -> None:
    """By this Python and its Triton, and by one whose tests fail."""
    assert kernels_tritons._failing(Path(sys.executable)) == ""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 1 failed of $*\nexit 1\n")
    python.chmod(0o755)
    said = kernels_tritons._failing(python)
    assert said.startswith("1 failed of -m pytest") and "tests/core/test_tune.py" in said
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    assert kernels_tritons._failing(python) == "exit code -9"


def test_kernels_that_vanished_are_said_to_be_gone_and_none_is_no_table(
    another: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Only those of both were compared: of none left, 0 differed."""
    how: dict[str, Any] = {"write": True, "check": False}
    for rows, ended, said in (([], 0, "exit code 0"), ([SPILLED], 139, "exit code 139")):
        assert another(rows, None, ended=ended, **how) == 1
        assert f"Triton 3.6.0 gave no table, {said}" in capsys.readouterr().err
    assert not (tmp_path / "kernels-3.6.0.jsonl").exists()
    other = SPILLED | {"target": "sm_80"}
    for partly, found in ((False, "1 kernels, 2 differ"), (True, "0 kernels, 0 differ")):
        another([other], None, write=False, check=False, partly=partly)
        assert found in capsys.readouterr().out


def test_the_table_of_another_triton_is_written_beside_this_ones(
    another: Callable[..., int], kernels_tritons: Any, tmp_path: Path
) -> None:
    assert another([SPILLED], None, write=True, check=False) == 0
    others = kernels_tritons.Others(tmp_path / "kernels.jsonl")
    assert others.tables() == {"3.6.0": [SPILLED]}
    assert another([SPILLED], None, ("it has no matrix instruction",), write=False, check=False) == 1


def test_what_a_table_tells_of_is_not_compiled_again(kernels_tritons: Any, tmp_path: Path) -> None:
    keys = [f"{place:032x}" for place in range(kernels_tritons.DAYS + 1)]
    rows = [
        SPILLED | {"dots": 1, "identities": keys},
        ROW | {"error": "late", "stopped": True, "identities": ["f" * 32]},
    ]
    path = tmp_path / "kernels-3.6.0.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"triton": "3.6.0"}, *rows])))
    day = date.fromordinal(7 * kernels_tritons.DAYS)
    known = kernels_tritons.recalled([path], day)
    assert known.keys() == set(keys[1:-1]), "two are due that day"
    assert kernels_tritons.recalled([path], day.replace(day=day.day + 1)).keys() == {keys[0], *keys[2:]}
    record = known[keys[1]]
    assert record["spills"] == 8 and not {"operator", "meta", "launches", "identities"} & record.keys()
    assert kernels_compile.faults(record | {"instructions": {}}, TARGETS["sm_90"])


def test_every_kept_table_is_of_the_kernels_that_there_are(kernels_tritons: Any) -> None:
    lines = ROOT / "docs" / "kernels.jsonl"
    version, rows = kernels_page.table(lines)
    others = kernels_tritons.Others(lines).tables()
    assert "3.6.0" in others and version not in others and len(others) == 2
    for version, other in others.items():
        head = json.loads((ROOT / "docs" / f"kernels-{version}.jsonl").read_text().splitlines()[0])
        assert head["wrong"] == [], "Triton's own table has what no GPU could run"
        there, here = ({kernels_page.name_of(row) for row in each} for each in (other, rows))
        assert there == here


def test_tables_differ_by_what_is_compiled_not_by_what_is_counted() -> None:
    assert kernels_page.differences([ROW], [ROW | {"instructions": {"wgmma": 5, "cp.async": 9}}]) == []
    changed = ROW | {"registers": 255, "spills": 8, "instructions": {"mma": 4}}
    where = "linear, GLA, forward: walk on sm_90: "
    assert kernels_page.differences([ROW], [changed]) == [
        f"{where}registers 128 -> 255, spills 0 -> 8, instructions wgmma cp.async -> mma"
    ]
    # Two compilations of one kernel may differ by so much; more, or a spill, is another kernel.
    assert kernels_page.differences([ROW], [ROW | {"registers": 132}]) == []
    assert kernels_page.differences([ROW | {"registers": 132}], [ROW]) == []
    assert kernels_page.differences([ROW], [ROW | {"registers": 133}]) == [f"{where}registers 128 -> 133"]
    assert kernels_page.differences([ROW], [ROW | {"registers": 132, "spills": 4}]) == [f"{where}spills 0 -> 4"]
    assert kernels_page.differences([ROW], []) == [f"{where}is gone"]
    assert kernels_page.differences([], [ROW]) == [f"{where}is new"]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[list[dict[str, Any]], list[str]]]:
    """What would be compiled, for sm_90 where nothing else is said, and what is wrong before anything is."""
    if tune.interpreting():
        pytest.skip("what Triton interprets it does not compile")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which the module would take out for all that follow
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kernels = importlib.import_module("kernels")

    def record(**options: Any) -> tuple[list[dict[str, Any]], list[str]]:
        options = {"script": None, "drawn": [], "only": [], "target": ["sm_90"], "all": False} | options
        launches, wrong = kernels.recorded(argparse.Namespace(**options))
        return [names | {"module": launch.kernel.fn.__module__} for names, launch in launches], wrong

    return record


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tables of its own for the package: a file's rows, by kernel and key."""
    monkeypatch.setattr(tune, "TABLES", tmp_path)
    tune._kernels.cache_clear()

    def plant(kernels: dict[str, dict[str, Any]], gpu: str = "NVIDIA H200") -> None:
        table = {"gpu": gpu, "target": "sm_90", "kernels": kernels}
        (tmp_path / f"{tune.file_name(gpu)}.json").write_text(json.dumps(table))

    yield plant
    tune._kernels.cache_clear()


def test_every_kernel_is_compiled_for_every_target_that_is_known_to_launch_it(recorded: Any) -> None:
    """`--all` records more calls: of each kernel that these launch the page and CI have a row."""

    def kernels(**options: Any) -> set[tuple[str, str, str]]:
        rows, wrong = recorded(target=list(tune.TARGETS), **options)
        assert not wrong
        return {(row["module"], row["kernel"], row["target"]) for row in rows}

    compiled = kernels(all=False)
    assert kernels(all=True) <= compiled
    written = {
        (f"foci.ops.{'.'.join(path.relative_to(OPS).with_suffix('').parts)}", name)
        for path in OPS.rglob("kernels_*.py")
        for name in re.findall(r"^def (\w*kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(written) > 40 and {each[:2] for each in compiled} == written


def test_every_row_of_every_shipped_table_is_compiled_for_its_gpu_and_may_be_tuned(recorded: Any) -> None:
    rows, wrong = recorded()
    assert not wrong
    for gpu in kernels_tables.shipped():  # none at present: the next test plants two
        mine = [row for row in rows if row["variant"].endswith(f", {gpu.name}")]
        configs = {json.dumps(row["meta"]) for row in mine}
        for keys in (tune.table_of(gpu.name) or {})["kernels"].values():
            for row in keys.values():
                meta = {**row["blocks"], "num_warps": row["warps"], "num_stages": row["stages"]}
                assert any(meta.items() <= json.loads(config).items() for config in configs), (gpu.name, row)


def test_the_page_has_what_the_shipped_tables_choose() -> None:
    rows = [json.loads(line) for line in (ROOT / "docs" / "kernels.jsonl").read_text().splitlines()[1:]]
    for gpu in kernels_tables.shipped():
        assert any(row["variant"].endswith(f", {gpu.name}") and row["target"] == gpu.architecture for row in rows)


def test_a_table_is_compiled_only_where_it_chooses_otherwise_than_the_rule(recorded: Any, planted: Any) -> None:
    plain, wrong = recorded()
    assert not wrong
    for name, size in ("NVIDIA H200", 64), ("NVIDIA H1", 16):
        row = {"blocks": {"BLOCK_K": size}, "warps": 8, "stages": 1}
        planted({"linear_pairs": {"torch.bfloat16,128,True": row}}, name)
    rows, wrong = recorded()
    assert not wrong and [row for row in rows if row["variant"].count("NVIDIA") == 0] == plain
    for name, size in ("NVIDIA H200", 64), ("NVIDIA H1", 16):
        mine = [row for row in rows if row["variant"] == f"per channel, {name}"]
        assert [row["direction"] for row in mine] == ["backward"]
        assert {(row["kernel"], row["target"], row["meta"]["BLOCK_K"]) for row in mine} == {
            ("pairs_kernel", "sm_90", size)
        }


@pytest.mark.parametrize(
    ("kernel", "key", "block", "said"),
    [
        ("linear_pair", "torch.bfloat16,128,False", 16, "no specimen launches it (benchmarks/kernels_specimens.py)"),
        ("linear_pairs", "torch.bfloat16,72,False", 16, "no specimen launches it (benchmarks/kernels_specimens.py)"),
        ("linear_pairs", "torch.bfloat16,128,False", 32, "the rule chooses the same"),
        ("linear_pairs", "torch.bfloat16,128,False", 48, "foci tune would not try it"),
    ],
)
def test_a_row_of_a_table_that_chooses_nothing_is_wrong(
    kernel: str, key: str, block: int, said: str, recorded: Any, planted: Any
) -> None:
    planted({kernel: {key: {"blocks": {"BLOCK_K": block}, "warps": 4, "stages": 2}}})
    assert recorded()[1] == [f"nvidia_h200.json, {kernel}[{key}]: {said}"]
