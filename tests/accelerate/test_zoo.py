"""Every name loads; a directory loads as its library would; what cannot be found or fetched is one clear sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foci.accelerate import zoo


def test_random_weights_are_the_same_everywhere_and_touch_no_generator() -> None:
    state = torch.get_rng_state()
    one, other = zoo.load("flux"), zoo.load("flux")
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not one.model.training


def test_a_programs_default_device_is_not_where_a_model_is_drawn() -> None:
    right = zoo.load("bert")
    with torch.device("meta"):
        found = zoo.load("bert")
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), right.model.parameters(), strict=True))
    assert all(torch.equal(found.inputs[name], tensor) for name, tensor in right.inputs.items() if name != "use_cache")


def test_dtype_is_everywhere() -> None:
    subject = zoo.load("bert", dtype="bfloat16")
    assert {parameter.dtype for parameter in subject.model.parameters()} == {torch.bfloat16}
    assert zoo.load("pixart", dtype="bfloat16").inputs["hidden_states"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["bert", "pixart"])
def test_directory_is_loaded_as_its_library_would(name: str, tmp_path: Path) -> None:
    made = zoo.load(name).model
    made.save_pretrained(tmp_path / "model")
    subject = zoo.load(str(tmp_path / "model"))
    assert type(subject.model) is type(made)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), subject.model.parameters(), strict=True))
    with torch.no_grad():
        subject.model(**subject.inputs)


def test_directory_of_a_pipeline_gives_its_transformer(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "P", "transformer": ["diffusers", "X"]}))
    zoo.load("pixart").model.save_pretrained(tmp_path / "transformer")
    assert type(zoo.load(str(tmp_path)).model).__name__ == "PixArtTransformer2DModel"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("digits-dti", r"unknown model 'digits-dti'; expected one of digits-dit, minilm, .*hub id like owner/name"),
        ("owner/absent-model", r"'owner/absent-model' is neither in the local cache nor could it be fetched"),
    ],
)
def test_unknown_model(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        zoo.load(name)
    assert "\n" not in str(error.value)


def test_a_hub_id_is_the_first_thing_a_process_asks_for() -> None:
    """Here other tests have imported what this must import itself."""
    code = "from foci.accelerate import zoo\ntry: zoo.load('owner/absent')\nexcept ValueError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "'owner/absent' is neither in the local cache nor could it be fetched" in done.stdout, done.stderr


def test_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no model: neither model_index.json nor config.json"):
        zoo.load(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        zoo.load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"_class_name": "Nothing2D"}')
    with pytest.raises(ValueError, match="names no model class"):
        zoo.load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    with pytest.raises(ValueError, match="BertModel cannot be loaded from"):
        zoo.load(str(tmp_path))


@pytest.mark.parametrize(("device", "dtype", "sentence"), [("warp", "float32", "device"), ("cpu", "int3", "dtype")])
def test_device_and_dtype_are_checked(device: str, dtype: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"accelerate: {sentence} must be"):
        zoo.load("bert", device=device, dtype=dtype)
