"""The machine is asked once, late, and its facts are plain values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from foci.core import device
from foci.core.device import Platform, machine, platform, version_of
from tests.ops.in_native import BUILT


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.13.0+cu126", (2, 13, 0)), ("2.14.0a0+git12ab", (2, 14, 0)), ("12.9", (12, 9)), (None, ()), ("nightly", ())],
)
def test_version_of(text: str | None, version: tuple[int, ...]) -> None:
    assert version_of(text) == version


def test_machine_is_asked_once_and_survives_json() -> None:
    assert machine() is machine()
    facts = json.loads(json.dumps(machine().as_dict()))
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cores"] >= 1
    assert facts["packages"]["numpy"]


def test_what_stands_in_a_package_s_place_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that somebody made up, so that an import of it does not fail."""
    monkeypatch.setitem(sys.modules, "no_such_package_either", ModuleType("no_such_package_either"))
    assert not device.installed("no_such_package_either")


def test_threads_follow_the_setting() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert machine().threads == 1
        assert "1 threads" in machine().line
    finally:
        torch.set_num_threads(before)


def test_platform_of_the_cpu_carries_no_gpu_versions() -> None:
    assert platform(torch.device("cpu")) == Platform("cpu", version_of(torch.__version__))


@pytest.mark.parametrize(("number", "version"), [(91002, (9, 10, 2)), (92600, (9, 26, 0)), (8907, (8, 9, 7))])
def test_cudnn_numbers(monkeypatch, number: int, version: tuple[int, ...]) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert device._cudnn() == version


def test_facts_do_not_break_a_graph() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + len(platform(x.device).torch) + machine().cores

    assert torch.compile(f, backend="eager", fullgraph=True)(torch.zeros(1)) == f(torch.zeros(1))


def test_importing_asks_nothing() -> None:
    code = "import foci.core.device as d, sys; assert d._machine.cache_info().currsize == 0; "
    code += "import torch; assert not torch.cuda.is_initialized(); assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


ON_THE_CPU = """
import torch

def woken(*_):
    raise SystemExit("a call on the CPU asks for GPUs: CUDA is initialised, and no fork can use it")

torch._C._cuda_getDeviceCount = torch.cuda.get_device_properties = torch.cuda._lazy_init = woken
torch.cuda._device_count_nvml, torch.version.cuda = lambda: 1, "13.0"
import foci

x, gate = torch.randn(1, 80, 64, 8, requires_grad=True), torch.rand(1, 80, 64)
foci.attention(x, x, x).sum().backward()
for out, _ in (
    foci.linear_attention(x, x, x, log_decay=-gate), foci.delta_rule(x, x, x, gate),
    foci.delta_rule(x, x, x, gate, backend="native"), foci.scan(x[:, :, 0], -x[:, :, 0].abs()),
):
    out.sum().backward()
"""


@BUILT
def test_a_call_on_the_cpu_wakes_no_gpu() -> None:
    """The compiled recurrences asked for all facts of the machine to know one of the processor.

    To have them built, they asked CUDA whether there is a GPU, as torch.utils.cpp_extension does.
    """
    subprocess.run([sys.executable, "-c", ON_THE_CPU], check=True, env={**os.environ, "CUDA_HOME": "/usr"})
