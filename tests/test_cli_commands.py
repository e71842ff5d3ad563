"""`foci doctor` and `foci explain`: what they print is what the library says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import foci
from foci import cli
from foci.core.device import Gpu, machine, platform
from foci.core.ledger import in_force
from foci.core.tune import measurement_dates, table_of
from foci.ops import native


def run(capsys, arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split())
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def test_doctor_json_holds_the_machine_its_backends_and_the_defects_in_force(capsys) -> None:
    code, out, _ = run(capsys, "doctor --json")
    facts = json.loads(out)
    assert code == 0
    assert facts["machine"] == json.loads(json.dumps(machine().as_dict()))
    assert facts["foci"] == foci.__version__
    ready = {row["backend"]: row["reasons"] for row in facts["backends"] if row["device"] == "cpu"}
    assert ready.pop("triton") == ["it needs a GPU, the tensors are on cpu"]
    assert ready.pop("flash")
    assert ready == {"aten": [], "chunked": [], "reference": [], "native": native.unavailable()}
    known = [d["issue"] for d in facts["defects"] if d["device"] == "cpu"]
    assert known == [d.issue for d in in_force(platform(torch.device("cpu")))]


def test_doctor_prints_the_same_in_words(capsys) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert out.startswith(f"foci {foci.__version__} · {machine().line}\n")
    assert "softmax         cpu     chunked    ready" in out
    assert "selective_scan  cpu     chunked    ready" in out
    assert "pytorch#141219" in out


def test_doctor_says_what_is_true_of_triton_here(capsys, monkeypatch) -> None:
    from foci import cli_commands
    from foci.core import assembler

    here = machine()
    version = here.packages["triton"]
    facts = json.loads(run(capsys, "doctor --json")[1])["triton"]
    assert facts["version"] == version
    if not here.gpus:
        assert facts["line"] == f"{version}, interpreter {'on' if facts['interpreter'] else 'off'}; no GPU"
    assert facts["assembler"] == assembler.describe_ptxas() and not cli_commands._triton(False)["assembler"]
    gpus = tuple(Gpu(place, f"NVIDIA {name}", (9, 0), 1, 1, 1) for place, name in enumerate(("H200", "H100")))
    monkeypatch.setattr(cli_commands, "machine", lambda: replace(here, gpus=gpus))
    shipped = table_of("NVIDIA H200")
    said = f"measured {measurement_dates(shipped)}" if shipped else "by rule, not yet measured"
    assert f"NVIDIA H200: configurations {said}; " in cli_commands._triton(True)["line"]
    table = {"kernels": {"a": {"64": {"date": "2026-01-01"}}}}
    monkeypatch.setattr(cli_commands, "table_of", lambda gpu: table if "H200" in gpu else None)
    assert cli_commands._triton(True)["line"].endswith(
        "NVIDIA H200: configurations measured 2026-01-01; NVIDIA H100: configurations by rule, not yet measured"
    )
    assert cli_commands._triton(False)["line"] == "not installed: no kernels of our own"
    monkeypatch.setattr(cli_commands, "proven", lambda: False)
    assert cli_commands._triton(True)["line"].endswith("foci's kernels have not been proven on a GPU by this version")


def test_doctor_says_why_a_backend_is_not_there(capsys, monkeypatch) -> None:
    from foci import cli_commands
    from foci.core.spec import Backend
    from foci.ops import SPECS

    spec = SPECS["softmax"]
    ghost = Backend("ghost", "foci.ghost", needs=("no_such_package",))
    monkeypatch.setattr(cli_commands, "SPECS", {"softmax": replace(spec, backends=(*spec.backends, ghost))})
    assert "ghost      no_such_package is not installed" in run(capsys, "doctor")[1]


def test_explain_names_the_chosen_backend_and_the_reasons_of_the_others(capsys) -> None:
    code, out, _ = run(capsys, "explain softmax --shape B1,T4096,S4096,H32,G8,K128 --mask causal --softcap 30 --lse")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "chosen   chunked"
    assert lines[1].startswith("refused  aten")
    assert "softcap" in lines[1]
    assert lines[-1] == "returns  out [1, 4096, 32, 128] float32, lse [1, 4096, 32] float32"


def test_explain_agrees_with_the_library(capsys) -> None:
    out = json.loads(run(capsys, "explain softmax --shape B2,T8,H4,G2,K16,V32 --mask window:3,0&causal --json")[1])
    q, k, v = torch.empty(2, 8, 4, 16), torch.empty(2, 8, 2, 16), torch.empty(2, 8, 2, 32)
    mask = foci.Window(3, 0) & foci.Causal()
    expected = foci.explain("softmax", q, k, v, mask=mask)
    assert (out["chosen"], out["refused"], out["also"]) == (expected.chosen, expected.refused, expected.also)
    assert out["returns"] == {"out": {"shape": [2, 8, 4, 32], "dtype": "float32"}}


@pytest.mark.parametrize(("words", "mask"), [("256,", foci.Window(256, None)), (",3", foci.Window(None, 3))])
def test_a_window_without_a_side_is_open_there(words: str, mask: foci.Window) -> None:
    from foci.cli_commands import _mask

    assert _mask(f"window:{words}", {"B": 1, "T": 8}, torch.device("cpu")) == mask


@pytest.mark.parametrize(
    "mask",
    [
        "causal",
        "causal:top-left",
        "window:2,0",
        "window:2,",
        "window:,0",
        "packed:0,3,8",
        "lengths:5",
        "dense",
        "causal&lengths:5",
    ],
)
def test_explain_understands_every_mask(capsys, mask: str) -> None:
    assert run(capsys, f"explain softmax --shape T8,H4,K16 --mask {mask} --dtype bfloat16")[0] == 0


def test_explain_tells_a_bias_that_is_trained_from_one_that_is_not(capsys) -> None:
    fixed = json.loads(run(capsys, "explain softmax --shape T8,H4,K16 --with bias --json")[1])
    trained = json.loads(run(capsys, "explain softmax --shape T8,H4,K16 --with bias --grad --json")[1])
    assert list(fixed["refused"]) == ["flash", "triton"]
    assert any("gradient" in reason for reason in trained["refused"]["aten"])


def test_explain_passes_dropout(capsys) -> None:
    out = json.loads(run(capsys, "explain softmax --shape T8,H4,K16 --with sink,dropout --json")[1])
    assert any("dropout" in reason for reason in out["refused"]["aten"])


def test_explain_takes_no_memory_for_its_tensors(capsys) -> None:
    assert run(capsys, "explain softmax --shape B64,T1000000,H64,K128 --with bias")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "returns"),
    [
        (
            "linear --shape B2,T9,H4,G2,K16,V8 --with log_decay,bonus,state",
            {"out": [2, 9, 4, 8], "state": [2, 4, 16, 8]},
        ),
        ("delta --shape T9,H4,K16 --with erase", {"out": [1, 9, 4, 16], "state": [1, 4, 16, 16]}),
        ("scan --shape B2,T9,D8 --with state", {"out": [2, 9, 8], "state": [2, 8]}),
        ("selective_scan --shape B2,T9,D8,K4 --with skip", {"out": [2, 9, 8], "state": [2, 8, 4]}),
    ],
)
def test_explain_knows_the_sizes_of_every_operator(capsys, arguments: str, returns: dict[str, list[int]]) -> None:
    code, out, _ = run(capsys, f"explain {arguments} --lse --json")
    assert code == 0
    assert {name: value["shape"] for name, value in json.loads(out)["returns"].items()} == returns


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("sftmax --shape T4,H6,K8", "unknown operator 'sftmax'; expected one of 'softmax'"),
        ("softmax --shape T4", "--shape must give H, K; got 'T4'"),
        ("softmax --shape T99999999999999999999,H6,K8", "q [1, 99999999999999999999, 6, 8] is larger than any tensor"),
        ("softmax --shape T4,H6,K8,Z2", "--shape: unknown letter 'Z'; expected B, G, H, K, S, T, V"),
        ("linear --shape T4,S5,H6,K8", "--shape: unknown letter 'S'; expected B, G, H, K, T, V"),
        ("linear --shape T4,H6,K8 --mask causal", "linear has no mask; it has q, k, v, log_decay, bonus"),
        ("delta --shape T4,H6,K8 --softcap 3", "delta has no softcap; it has q, k, v, beta"),
        ("delta --shape T4,H6,K8 --with sink", "delta has no optional 'sink'; it has log_decay, erase, state"),
        ("scan --shape T4", "--shape must give D; got 'T4'"),
        ("softmax --shape T4,H6,K8,K9", "--shape gives a letter twice: 'T4,H6,K8,K9'"),
        ("softmax --shape four", "--shape must be letters with sizes, like B1,T4096,H32,G8,K128; got 'four'"),
        ("softmax --shape T4,H6,G4,K8", "k has 4 heads but q has 6; q heads must be a multiple of k heads"),
        ("softmax --shape T4,H6,K8 --softcap -3", "softcap must be a positive finite number, got -3.0"),
        ("softmax --shape T4,H6,K8 --dtype int8", "--dtype must be one of float64, float32, bfloat16, float16"),
        ("softmax --shape T4,H6,K8 --device tpu", "--device must be cpu or cuda, got 'tpu'"),
        ("softmax --shape T4,H6,K8 --with bia", "softmax has no optional 'bia'; it has bias, sink, dropout"),
        ("softmax --shape T4,H6,K8 --mask windy", "--mask: unknown mask 'windy'; expected one of causal, window"),
        ("softmax --shape T4,H6,K8 --mask window:3", "--mask window: expected 2 whole numbers separated by commas"),
        ("softmax --shape T4,H6,K8 --mask packed:0,x", "--mask packed: expected whole numbers separated by commas"),
        ("softmax --shape T4,H6,K8 --mask causal:left", "--mask causal: Causal: align must be 'bottom-right' or"),
        ("softmax --shape T4,H6,K8 --mask dense:junk", "--mask dense: expected nothing behind it, got 'junk'"),
        ("softmax --shape T4,H6,K8 --mask dense:1,2,3", "--mask dense: expected nothing behind it, got '1,2,3'"),
        ("softmax --shape T4,H6,K8 --mask &", "--mask: a part of '&' is empty; expected masks joined with &"),
        ("softmax --shape T4,H6,K8 --mask causal&&", "--mask: a part of 'causal&&' is empty"),
        ("softmax --shape T4,H6,K8 --mask window:,", "--mask window: expected 2 whole numbers separated by commas"),
        ("softmax --shape T4,H6,K8 --mask window:1,2,", "--mask window: expected 2 whole numbers separated by commas"),
        ("softmax --shape T4,H6,K8 --mask window:-1,", "one may be left out: an open side; got '-1,'"),
        ("softmax --shape B2,T4,H6,K8 --mask packed:0,4", "Packed needs a batch of 1"),
        (
            "softmax --shape T4,H2,K8 --mask packed:0,9",
            "--mask packed:0,9: Packed: q_offsets ends at 9, past the 4 tokens",
        ),
        ("softmax --shape T4,H2,K8 --mask packed:1,2", "--mask packed:1,2: Packed: q_offsets must start at 0, got 1"),
        ("softmax --shape T4,H2,K8 --mask packed:0,3,2", "--mask packed:0,3,2: Packed: q_offsets must never decrease"),
        ("softmax --shape T4,H2,K8 --mask causal&lengths:7", "--mask causal&lengths:7: Lengths: kv_lengths[0] is 7"),
    ],
)
def test_explain_asked_wrongly_says_how_in_one_sentence(capsys, arguments: str, sentence: str) -> None:
    code, out, err = run(capsys, f"explain {arguments}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_explain_does_not_guess_about_a_gpu_that_is_not_there(capsys) -> None:
    code, _, err = run(capsys, "explain softmax --shape T4,H6,K8 --device cuda")
    assert code == 2
    assert "this machine has no CUDA device" in err
