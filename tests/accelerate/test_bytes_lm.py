"""bytes-lm: a transformers model of foci's layers, its cache and padding, how it writes, and what is shipped."""

from __future__ import annotations

import copy
import math
import re
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from foci.accelerate import bytes_lm
from foci.accelerate.apply import apply
from foci.accelerate.run import accelerate
from foci.accelerate.shown import write_code
from foci.core.errors import ShapeError
from foci.integrations.layers import find_sites
from foci.ops import native

pytest.importorskip("transformers")
DOCS = Path(__file__).parents[2] / "docs"
BITS = {256: 2.15, 2048: 2.10}  # by the length of a stretch; measured 2.09 and 2.05 on Python 3.11's files
SMALL = {"hidden_size": 32, "intermediate_size": 48, "window": 8, "layer_types": bytes_lm.HYBRID["layer_types"][2:5]}


@pytest.fixture(scope="module")
def model() -> Any:
    """Three small layers of both kinds, weights large enough that every byte depends on those before it."""
    made = bytes_lm.untrained(SMALL).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(
                0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return made.double()


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, 256, (batch, length), generator=torch.Generator().manual_seed(length))


def test_saved_and_loaded_it_is_the_same_model(model, tmp_path):
    model.float().save_pretrained(tmp_path)
    ids = _ids(1, 20)
    for again in (bytes_lm.load(tmp_path), bytes_lm.model_class().from_pretrained(tmp_path)):
        assert torch.equal(again(ids).logits, model(ids).logits)
    model.double()


@torch.no_grad()
def test_prefill_and_steps_equal_the_whole(model):
    ids = _ids(2, 30)
    whole = model(ids, use_cache=False)
    assert whole.past_key_values is None
    first = model(ids[:, :20])
    pieces, memory = [first.logits], first.past_key_values
    for place in range(20, 30):
        pieces.append(model(ids[:, place : place + 1], past_key_values=memory).logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole.logits)
    assert memory.get_seq_length() == 30


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, side):
    ids, mask = _ids(2, 16), torch.ones(2, 16, dtype=torch.long)
    mask[0, slice(0, 5) if side == "left" else slice(11, 16)] = 0
    real = mask[0].bool()
    padded = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[0, real], model(ids[:1, real]).logits[0])
    torch.testing.assert_close(padded[1], model(ids[1:]).logits[0])


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 5), (2, 40), (3, 17), (1, 17), (2, 1, 17, 17), (17,)])
def test_a_mask_of_another_shape_is_refused_even_if_it_hides_nothing(model, shape):
    said = f"attention_mask has shape {list(shape)}; expected [2, 17]"
    with pytest.raises(ShapeError, match=re.escape(said)):
        model(_ids(2, 17), attention_mask=torch.ones(shape))


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.tensor([[0.0, 0.0, 0.0, -1e9]]), "is float32; expected bool or integers"),  # it was taken inverted
        (torch.ones(1, 4), "is float32; expected bool or integers"),
        (torch.tensor([[1, 1, 2, 1]]), "holds 2; expected 1"),
        (torch.tensor([[1, 1, -1, 1]]), "holds -1; expected 1"),
    ],
)
def test_a_mask_that_is_added_to_logits_is_refused(model, mask, said):
    with pytest.raises(ValueError, match=f"^bytes-lm: attention_mask {said}"):
        model(_ids(1, 4), attention_mask=mask)
    with pytest.raises(TypeError, match=r"^bytes-lm: attention_mask must be a tensor"):
        model(_ids(1, 4), attention_mask=[1, 1, 1, 1])


@torch.no_grad()
def test_a_mask_behind_a_cache_is_of_all_bytes_or_of_these(model):
    memory = model(_ids(2, 17)).past_key_values
    with pytest.raises(ShapeError, match=r"expected \[2, 20\]"):
        model(_ids(2, 3), attention_mask=torch.ones(2, 19), past_key_values=memory)
    masks = [
        model(_ids(2, 3), attention_mask=torch.ones(2, T, dtype=torch.long), past_key_values=copy.deepcopy(memory))
        for T in (3, 20)
    ]
    assert masks[0].logits.equal(masks[1].logits)


def test_generation_with_padding_equals_each_row_alone(model):
    ids, mask = _ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    together = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=None).equal(
        together
    )
    for row, first in ((0, 5), (1, 0)):
        alone = ids[row : row + 1, first:]
        alone = model.generate(
            alone, attention_mask=torch.ones_like(alone), max_new_tokens=10, do_sample=False, eos_token_id=None
        )
        assert together[row, 12:].tolist() == alone[0, 12 - first :].tolist()
    without = model.generate(
        ids, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=None, use_cache=False
    )
    assert together.equal(without)


def test_beams_carry_their_own_states(model):
    ids = _ids(1, 10)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "num_beams": 3, "eos_token_id": None}
    assert model.generate(ids, **options).equal(model.generate(ids, **options, use_cache=False))


def test_a_model_in_training_has_a_cache_where_it_is_asked_for_one(model):
    ids = _ids(2, 12)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    try:
        assert model.train().generate(ids, **options).equal(expected)  # which hands on one byte at a time
        assert model(ids).past_key_values is None
    finally:
        model.eval()
    assert model(ids, labels=ids).past_key_values is None
    assert model(ids, labels=ids, use_cache=True).past_key_values.seen == 12


def test_loss_is_that_of_the_next_byte(model):
    ids = _ids(1, 129)
    loss = model(ids, labels=ids).loss.item()
    assert bytes_lm.bits_per_byte(model, ids[0], length=128) == pytest.approx(loss / math.log(2), rel=1e-6)
    with pytest.raises(ValueError, match="expected at least 1001"):
        bytes_lm.bits_per_byte(model, ids[0], length=1000)


def test_writing_streams_what_it_returns_and_repeats_by_seed(model):
    pieces: list[str] = []
    text = bytes_lm.write(model, "def é(", tokens=30, seed=3, emit=pieces.append)
    assert pieces[0] == "def é("
    assert "".join(pieces) == text
    assert text == bytes_lm.write(model, "def é(", tokens=30, seed=3)
    assert text != bytes_lm.write(model, "def é(", tokens=30, seed=4)
    greedy = [bytes_lm.write(model, "def ", tokens=30, temperature=0, seed=seed) for seed in (0, 1)]
    assert greedy[0] == greedy[1] == bytes_lm.write(model, "def ", tokens=30, temperature=1e-320)
    assert bytes_lm.write(model, "", tokens=1, seed=2**64 - 1) is not None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": 0}, ValueError, "tokens is 0; expected an integer of at least 1"),
        ({"tokens": -1}, ValueError, "tokens is -1; expected an integer of at least 1"),
        ({"tokens": 2.5}, ValueError, "tokens is 2.5; expected an integer"),
        ({"tokens": True}, ValueError, "tokens is True; expected an integer"),
        ({"tokens": "3"}, ValueError, "tokens is '3'; expected an integer"),
        ({"temperature": -1}, ValueError, "temperature must be a number of at least 0, got -1"),
        ({"temperature": math.nan}, ValueError, "temperature must be a number of at least 0, got nan"),
        ({"temperature": "1"}, TypeError, "temperature must be a number, got '1'"),
        ({"temperature": True}, TypeError, "temperature must be a number, got True"),
        ({"seed": 2**64}, ValueError, f"seed is {2**64}; expected an integer from -2.63 to 2.64 - 1"),
        ({"seed": -(2**63) - 1}, ValueError, f"seed is {-(2**63) - 1}; expected an integer from"),
        ({"seed": 1.5}, ValueError, "seed is 1.5; expected an integer from"),
        ({"seed": True}, ValueError, "seed is True; expected an integer from"),
        ({"seed": None}, ValueError, "seed is None; expected an integer from"),
        ({"prompt": b"def "}, TypeError, "prompt must be a str, got b'def '"),
        ({"prompt": "a\udcff"}, ValueError, r"prompt has '\\udcff' at 1; expected text"),
    ],
)
def test_what_writing_cannot_take_is_named_before_it_writes(model, change, error, message):
    with pytest.raises(error, match=f"^bytes-lm: {message}"):
        bytes_lm.write(model, **{"prompt": "", **change}, emit=lambda text: pytest.fail("it wrote"))


def test_the_split_is_by_file_and_follows_the_name_alone():
    training, held = (bytes_lm.library_files(split) for split in ("train", "validation"))
    assert not set(training) & set(held)
    assert 0.01 < len(held) / len(training) < 0.12
    assert bytes_lm.held_out("minidom.py") == bytes_lm.held_out("minidom.py")
    assert not any("site-packages" in path.parts or "test" in path.parts for path in training + held)
    text = bytes_lm.text_of(held[:2])
    assert text[0] == bytes_lm.NEWFILE and (text == bytes_lm.NEWFILE).sum() == 2


def test_cost_is_flat_for_the_hybrid_and_grows_for_the_twin(model):
    twin = bytes_lm.untrained({**SMALL, "layer_types": ["full_attention"] * 3, "window": None}).eval()
    rows = bytes_lm.cost({"hybrid": model, "twin": twin}, contexts=(64, 1024), rounds=2)
    assert [(row["model"], row["context"]) for row in rows] == [(m, c) for m in ("hybrid", "twin") for c in (64, 1024)]
    assert rows[0]["cache"] == rows[1]["cache"]
    assert rows[3]["cache"] > 8 * rows[2]["cache"]
    assert all(row["milliseconds"] > 0 for row in rows)


def test_accelerate_plans_proves_and_restores_layers_of_both_kinds(tmp_path, monkeypatch):
    monkeypatch.setattr(bytes_lm, "CONTEXTS", (8, 64))
    model = bytes_lm.untrained(SMALL).eval()
    layers = find_sites(model)
    for layer in layers.values():
        layer.backend = "reference"
    shown = partial(write_code, model, length=12)
    done = accelerate(model, {"input_ids": _ids(2, 40), "use_cache": False}, compile="off", show=shown)
    fastest = "chunked" if native._unavailable() else "native"
    assert {site.name: (site.operator, site.backend) for site in done.plan.sites} == {
        "blocks.0.mixer": ("delta", fastest),
        "blocks.1.mixer": ("softmax", "chunked"),
        "blocks.2.mixer": ("delta", fastest),
    }
    assert all(layer.backend is None for layer in layers.values())
    assert "gradient of log_decay" in {row["what"] for row in done.plan.proof}
    demo = done.plan.demo
    assert demo["lines_before"] == demo["lines_after"]
    assert "cost" in demo["after"] and "cost" not in demo["before"]
    assert re.search(r"hybrid \d+ and \d+ tokens/s behind 8 and 64, cache", demo["sentence"])
    done.restore()
    assert all(layer.backend == "reference" for layer in layers.values())
    with apply(model, done.plan.save(tmp_path / "plan.json")):
        assert all(layer.backend is None for layer in layers.values())


@pytest.fixture(scope="module")
def shipped() -> Any:
    return bytes_lm.load()


def test_what_is_shipped_is_small_and_described():
    weights = list(bytes_lm.ASSETS.glob("*.safetensors"))
    assert [path.name for path in weights] == ["model.safetensors"]
    assert sum(path.stat().st_size for path in weights) <= 4_000_000
    assert "bits per byte" in (bytes_lm.ASSETS / "README.md").read_text()
    assert "polyline" in (DOCS / "img" / "bytes_lm_loss.svg").read_text()


@torch.no_grad()
@pytest.mark.parametrize("length", [256, 2048])
def test_held_out_files_cost_few_bits_per_byte(shipped, length):
    """Also in stretches eight times as long as those it learned in."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [root / name for name in ("uuid.py", "xml/dom/minidom.py")]
    assert all(bytes_lm.held_out(path.relative_to(root).as_posix()) for path in files)
    text = torch.cat([bytes_lm.text_of([path])[:8193] for path in files])
    assert bytes_lm.bits_per_byte(shipped, text, length=length, batch=4) < BITS[length]


def test_it_writes_what_looks_like_python(shipped):
    text = bytes_lm.write(shipped, "class Tree:\n    def __init__(self", tokens=60, temperature=0)
    assert text.startswith("class Tree:\n    def __init__(self, ")
    assert "):\n        " in text
    assert text == bytes_lm.write(shipped, "class Tree:\n    def __init__(self", tokens=60, temperature=0)
