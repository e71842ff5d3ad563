"""Choosing a backend: the first that can, every reason otherwise, never another one than named."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

from foci.core.errors import Unsupported
from foci.core.select import choose, explain
from foci.core.spec import Backend, Spec


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> Spec:
    """Calls are sets of words; each backend refuses the words it does not know."""
    backends = []
    for name, known in (("fast", set()), ("middle", {"mask"}), ("slow", {"mask", "bias"})):
        module = ModuleType(f"toy_{name}")
        module.reasons = lambda call, known=known: [f"{word} is not supported" for word in sorted(call - known)]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        backends.append(Backend(name, module.__name__, note="quick" if name == "middle" else ""))
    backends.append(Backend("gpu", "toy_gpu", needs=("no_such_package_of_anyone",)))
    return Spec(
        name="toy", equation="", paper="", reference=lambda: (), plain=lambda: (), output_names=(), differentiable=(),
        cases=(), backends=tuple(backends),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "chosen"), [(set(), "fast"), ({"mask"}, "middle"), ({"bias"}, "slow"), ({"bias", "mask"}, "slow")]
)
def test_the_first_that_can_is_chosen(spec: Spec, call: set, chosen: str) -> None:
    assert choose(spec, call).name == chosen
    assert explain(spec, call).chosen == chosen


def test_one_may_prefer_another_that_can(spec: Spec) -> None:
    """As torch's kernels do Triton's for decoding: it is taken where it can run the call, and only then."""
    sys.modules["toy_fast"].prefers = lambda call, single: "middle"
    assert choose(spec, set()).name == explain(spec, set()).chosen == "middle"
    assert choose(spec, set(), "fast").name == explain(spec, set(), "fast").chosen == "fast"
    sys.modules["toy_fast"].prefers = lambda call, single: "gpu"  # which is not there
    assert choose(spec, set()).name == explain(spec, set()).chosen == "fast"


def test_the_named_one_runs_even_when_a_faster_one_could(spec: Spec) -> None:
    assert choose(spec, set(), "slow").name == "slow"


def test_the_named_one_never_falls_back(spec: Spec) -> None:
    with pytest.raises(Unsupported) as caught:
        choose(spec, {"mask", "bias"}, "fast")
    assert caught.value.reasons == ["bias is not supported", "mask is not supported"]
    assert str(caught.value) == (
        "toy: backend 'fast' cannot run this call:\n"
        "  - bias is not supported\n"
        "  - mask is not supported\n"
        "  use backend=None to let foci choose (slow would run)"
    )
    with pytest.raises(Unsupported, match="no_such_package_of_anyone is not installed"):
        choose(spec, set(), "gpu")


def test_when_none_can_every_backend_says_why(spec: Spec) -> None:
    with pytest.raises(Unsupported, match="toy: no backend can run this call") as caught:
        choose(spec, {"sink"})
    assert caught.value.reasons == [
        "fast: sink is not supported",
        "middle: sink is not supported",
        "slow: sink is not supported",
        "gpu: no_such_package_of_anyone is not installed",
    ]
    with pytest.raises(Unsupported, match="no other backend can either"):
        choose(spec, {"sink"}, "fast")


@pytest.mark.parametrize("backend", ["cudnn", "", 3, "FAST"])
def test_an_unknown_name_lists_the_known(spec: Spec, backend: object) -> None:
    with pytest.raises(ValueError, match=r"unknown backend .*; expected one of 'fast', 'middle', 'slow', 'gpu'"):
        choose(spec, set(), backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown backend"):
        explain(spec, set(), backend)  # type: ignore[arg-type]


def test_an_explanation_reads_like_one(spec: Spec) -> None:
    assert str(explain(spec, {"mask"})) == (
        "chosen   middle\n"
        "refused  fast       mask is not supported\n"
        "         gpu        no_such_package_of_anyone is not installed\n"
        "also ok  slow"
    )
    found = explain(spec, set(), "slow")
    assert (found.chosen, found.also) == ("slow", {"fast": "", "middle": "quick"})
    assert str(found).endswith("also ok  fast, middle (quick)")


def test_an_explanation_of_a_refused_choice_chooses_nothing(spec: Spec) -> None:
    found = explain(spec, {"mask"}, "fast")
    assert found.chosen is None
    assert found.refused["fast"] == ["mask is not supported"]
    assert set(found.also) == {"middle", "slow"}
    assert explain(spec, {"sink"}).chosen is None
    assert str(explain(spec, {"sink"})).startswith("chosen   none: every backend refuses")


@pytest.mark.parametrize("interpreter", ["1", "0"])
def test_a_named_backend_is_asked_once_what_it_needs_is_imported(interpreter: str) -> None:
    """In a process of its own: Triton is told by its environment that CPU tensors are for its interpreter."""
    pytest.importorskip("triton")
    program = """
import sys, torch, foci
x = torch.ones(1, 4, 2)
assert "triton" not in sys.modules
try:
    h, _ = foci.scan(x, 0 * x, backend="triton")
    print("ran", h[0, -1, 0].item())
except foci.Unsupported as refused:
    print(*refused.reasons)
"""
    environment = {**os.environ, "TRITON_INTERPRET": interpreter}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in ended.stderr:  # Triton 3.6
        pytest.skip("this Triton's interpreter cannot run kernels with this numpy")
    if "mask has unsupported dtype" in ended.stderr:  # Triton 3.9
        pytest.skip("this Triton's interpreter takes no comparison of two scalars as a mask")
    expected = "ran 4.0" if interpreter == "1" else "it needs a GPU, the tensors are on cpu"
    assert ended.stdout.strip() == expected, ended.stderr


def test_an_explanation_knows_it_too() -> None:
    pytest.importorskip("triton")
    program = "import torch, foci; x = torch.ones(1, 4, 2); print(foci.explain('scan', x, 0 * x).refused)"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "triton" not in ended.stdout and ended.returncode == 0, ended.stdout + ended.stderr
