"""Configurations, tables of a GPU, and launches that are noted and not made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core import tune
from foci.core.tune import TARGETS, Config, Target, configure, launch, recording, target_of

CPU = torch.device("cpu")


class Kernel:
    """Stands for a jitted kernel: notes how it is launched."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **meta: self.launched.append((grid, arguments, meta))


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tune, "TABLES", tmp_path)
    tune._kernels.cache_clear()
    yield tmp_path
    tune._kernels.cache_clear()


def rule(target: Target) -> Config:
    return Config({"BLOCK_T": 64 if target.shared > 200_000 else 32}, warps=4, stages=3)


def test_a_config_gives_its_blocks_and_the_keywords_of_a_launch() -> None:
    config = Config({"BLOCK_T": 64, "BLOCK_V": 32}, warps=8, stages=3)
    assert config["BLOCK_V"] == 32
    assert config.meta == {"BLOCK_T": 64, "BLOCK_V": 32, "num_warps": 8, "num_stages": 3}


def test_a_launch_reaches_the_kernel_and_an_empty_grid_does_not() -> None:
    kernel, x = Kernel(), torch.ones(3)
    launch(kernel, (2, 1), x, 7, config=Config({"BLOCK_T": 16}), IS_CAUSAL=True)
    launch(kernel, (0, 4), x, 7, config=Config())
    meta = {"IS_CAUSAL": True, "BLOCK_T": 16, "num_warps": 4, "num_stages": 2}
    assert kernel.launched == [((2, 1), (x, 7), meta)]


def test_the_device_is_that_of_the_first_tensor_wherever_it_stands() -> None:
    kernel, x = Kernel(), torch.ones(3)
    launch(kernel, (1,), None, 7, x, config=Config())
    assert len(kernel.launched) == 1


def test_recording_notes_launches_for_its_target_and_makes_none() -> None:
    kernel, x = Kernel(), torch.ones(3, device="meta")
    with recording(TARGETS["sm_120"]) as seen:
        assert target_of(x.device) == target_of(CPU) == TARGETS["sm_120"]
        launch(kernel, (5,), x, config=configure("a", (), rule, target_of(x.device)), IS_CAUSAL=False)
        launch(kernel, (0,), x, config=Config())
    assert kernel.launched == []
    assert [(each.kernel, each.grid, each.arguments) for each in seen] == [(kernel, (5,), (x,))]
    assert seen[0].meta == {"IS_CAUSAL": False, "BLOCK_T": 32, "num_warps": 4, "num_stages": 3}


def test_recording_ends_when_it_ends_even_by_an_error() -> None:
    kernel, x = Kernel(), torch.ones(3)
    with pytest.raises(RuntimeError, match="on purpose"), recording(TARGETS["sm_90"]):
        raise RuntimeError("on purpose")
    launch(kernel, (1,), x, config=Config())
    assert len(kernel.launched) == 1


def test_recordings_nest() -> None:
    kernel, x = Kernel(), torch.ones(3)
    with recording(TARGETS["sm_90"]) as outer:
        with recording(TARGETS["gfx942"]) as inner:
            launch(kernel, (1,), x, config=Config())
            assert target_of(CPU).kind == "hip"
        launch(kernel, (2,), x, config=Config())
    assert ([each.grid for each in outer], [each.grid for each in inner]) == ([(2,)], [(1,)])


def test_without_a_gpu_the_target_is_hopper_with_few_processors() -> None:
    assert target_of(CPU) == TARGETS["sm_90"]._replace(processors=4)


def test_the_rule_decides_where_nothing_was_measured(tables: Path) -> None:
    for target in (TARGETS["sm_90"], TARGETS["sm_90"]._replace(name="NVIDIA H200")):
        assert configure("a", (128, "float16"), rule, target) == Config({"BLOCK_T": 64}, 4, 3)


def test_a_measured_row_goes_before_the_rule_for_its_gpu_kernel_and_key_alone(tables: Path) -> None:
    row = {"blocks": {"BLOCK_T": 128}, "warps": 8, "stages": 2}
    table = {"gpu": "NVIDIA H200", "kernels": {"a": {"128,float16": row}}}
    (tables / "nvidia_h200.json").write_text(json.dumps(table))
    h200, b200 = (TARGETS["sm_90"]._replace(name=f"NVIDIA {name}") for name in ("H200", "B200"))
    assert configure("a", (128, "float16"), rule, h200) == Config({"BLOCK_T": 128}, 8, 2)
    assert tune.table_of("NVIDIA H200") == table
    assert tune.table_of("NVIDIA B200") is None
    assert configure("a", (64, "float16"), rule, h200) == rule(h200)
    assert configure("b", (128, "float16"), rule, h200) == rule(h200)
    assert configure("a", (128, "float16"), rule, b200) == rule(b200)


@pytest.mark.parametrize(
    ("gpu", "file"),
    [
        ("NVIDIA H200", "nvidia_h200"),
        ("NVIDIA GH200 480GB", "nvidia_gh200_480gb"),
        ("NVIDIA A100-SXM4-80GB", "nvidia_a100_sxm4_80gb"),
        ("NVIDIA RTX PRO 6000 / Server", "nvidia_rtx_pro_6000_server"),
        ("../../NVIDIA", "nvidia"),
    ],
)
def test_a_gpu_has_a_file_name_that_stays_in_its_folder(gpu: str, file: str) -> None:
    assert tune.file_name(gpu) == file


def test_every_shipped_table_is_of_a_machine_that_measured_it() -> None:
    for path in sorted(tune.TABLES.glob("*.json")):
        table = json.loads(path.read_text())
        assert tune.file_name(table["gpu"]) == path.stem
        assert table["date"] and table["versions"]["triton"]
        for rows in table["kernels"].values():
            assert all(row["ms"] < row["rule_ms"] for row in rows.values())


def test_targets_are_named_as_their_compilers_name_them() -> None:
    for name, target in TARGETS.items():
        assert name == (f"gfx{target.arch:x}" if target.kind == "hip" else f"sm_{target.arch}")


@pytest.mark.parametrize(
    ("dtype", "target", "expected"),
    [
        (torch.float32, "sm_90", "tf32x3"),
        (torch.bfloat16, "sm_90", "ieee"),
        (torch.float32, "gfx942", "ieee"),
    ],
)
def test_float32_products_are_in_full(dtype: torch.dtype, target: str, expected: str) -> None:
    assert tune.precision(dtype, TARGETS[target]) == expected


def test_the_compiler_does_not_trace_into_the_facts() -> None:
    def add(x: Tensor) -> Tensor:
        return x + target_of(x.device).arch + tune.interpreting()

    assert torch.compile(add, fullgraph=True, backend="eager")(torch.zeros(())).item() == 90 + tune.interpreting()


def test_choosing_puts_a_configuration_in_place_of_the_rule_and_tells_what_was_asked(tables: Path) -> None:
    tried = Config({"BLOCK_T": 16}, 2, 1)
    target = TARGETS["sm_90"]
    with tune.choosing({("a", "128"): tried}) as asked:
        assert configure("a", (128,), rule, target, {"BLOCK_T": (16, 64)}) == tried
        assert configure("a", (256,), rule, target) == rule(target)
    assert asked == {
        ("a", "128"): tune.Asked(rule(target), {"BLOCK_T": (16, 64)}),
        ("a", "256"): tune.Asked(rule(target), {}),
    }
    assert configure("a", (128,), rule, target) == rule(target)


def test_candidates_vary_the_blocks_that_may_and_warps_and_stages_and_begin_with_the_rule() -> None:
    asked = tune.Asked(Config({"BLOCK_T": 64, "CHUNK": 64}, warps=4, stages=2), {"BLOCK_T": (32, 64)})
    found = tune.candidates(asked)
    assert found[0] == asked.rule
    assert len(found) == len({json.dumps(config.meta) for config in found}) == 2 * 3 * 3
    assert {config["BLOCK_T"] for config in found} == {32, 64}
    assert {config["CHUNK"] for config in found} == {64}
    assert {config.warps for config in found} == {2, 4, 8}
    assert {config.stages for config in found} == {1, 2, 3}
