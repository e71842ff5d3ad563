"""`foci generate`: streams the model's text, the same for the same seed, and refuses in one sentence."""

from __future__ import annotations

import pytest

from foci import cli
from foci.accelerate import bytes_lm

pytest.importorskip("transformers")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", *arguments])
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    model = bytes_lm.untrained({"hidden_size": 32, "layer_types": ["linear_attention", "full_attention"]}).eval()
    monkeypatch.setattr(bytes_lm, "load", lambda: model)


def test_it_writes_behind_the_prompt_and_repeats_by_seed(capsys) -> None:
    options = ["bytes-lm", "--prompt", "class Tree", "--max-tokens", "20", "--seed", "5"]
    code, out, err = run(capsys, *options)
    assert (code, err) == (0, "")
    assert out == bytes_lm.write(bytes_lm.load(), "class Tree", tokens=20, temperature=0.7, seed=5) + "\n"
    assert run(capsys, *options)[1] == out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gpt-9"], "unknown model 'gpt-9'; expected bytes-lm"),
        (["--max-tokens", "0"], "tokens is 0; expected an integer of at least 1"),
        (["--temperature", "-1"], "temperature must be a number of at least 0, got -1.0"),
        (["--temperature", "nan"], "temperature must be a number of at least 0, got nan"),
        (["--prompt", "a\udcff"], "prompt has '\\udcff' at 1; expected text, whole characters"),
        (["--seed", "9" * 23], f"seed is {'9' * 23}; expected an integer from -2^63 to 2^64 - 1"),
    ],
)
def test_bad_input_is_one_sentence(capsys, arguments, sentence) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err and err.count("\n") == 1
