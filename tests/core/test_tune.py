"""Configurations, tables of a GPU, and launches that are noted and not made."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.core import tune
from foci.core.tune import TARGETS, Config, Target, configure, launch, record_launches, target_of

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
    meta = {"IS_CAUSAL": True, "BLOCK_T": 16, "num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert kernel.launched == [((2, 1), (x, 7), meta)]


def test_the_device_is_that_of_the_first_tensor_wherever_it_stands() -> None:
    kernel, x = Kernel(), torch.ones(3)
    launch(kernel, (1,), None, 7, x, config=Config())
    assert len(kernel.launched) == 1


def jitted(x, y, z, BLOCK, num) -> None:  # type: ignore[no-untyped-def]
    """A kernel that is never compiled."""


class Compiled:
    """Stands for what Triton compiled; notes what it is launched with, in either way."""

    packed_metadata = function = None

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def launch_metadata(self, *rest: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        self.launched.append(((x, y, z), rest[6:]))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launched.append((grid[:3], arguments))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """Every kernel that Triton compiles, which here takes no time and no GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import jit

    made: list[Compiled] = []

    def compile(self: Any, key: Any, signature: Any, device: int, *rest: Any) -> Compiled:
        made.append(Compiled())
        self.device_caches[device][0][key] = made[-1]
        return made[-1]

    offline = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", offline)
    monkeypatch.setattr(jit.JITFunction, "_do_compile", compile)
    monkeypatch.setattr(jit.JITFunction, "cache_key", "a hash")
    monkeypatch.setattr(tune, "_COMPILED", {})
    return made


def constants(kernel: Any, *names: str) -> Any:
    for place, name in enumerate(kernel.arg_names):
        if name in names:
            kernel.params[place].__dict__["is_constexpr"] = True
    return kernel


@pytest.mark.parametrize("gluon", [False, True])
def test_what_triton_compiles_apart_is_launched_apart_and_nothing_is_looked_for_twice(
    compiled: list[Compiled], gluon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.runtime.jit import JITFunction

    kernel = constants((GluonJITFunction if gluon else JITFunction)(jitted), "BLOCK", "num")
    x = torch.zeros(64)
    values = [
        None, 0, 1, 2, 16, 17, -16, 2**31 - 16, 2**31, 2**31 + 1, 2**40, 2**63, True, False, 0.0, 1.0, 2.5, x[1:],
        x[4:], x.bfloat16(), x.long(), x.bool(), (), (1,), (16, 1), (16, 3), (3, 16), (2**40, 1), (None, 16), (x, 16),
        (x[1:], 16), ((1, 16), 3),
    ]  # fmt: skip
    launches = (Config({"BLOCK": 16}), 1), (Config({"BLOCK": 32}), 1), (Config({"BLOCK": 16}, 8), 2)
    calls = [((x, y, z), config, num) for y in values for z in (1, 48) for config, num in launches]

    def by(start: Any) -> list[Compiled]:
        """Which compiled kernel each call reaches; all are given the same arguments in the same order."""
        found = []
        for arguments, config, num in calls:
            before = {id(each): len(each.launched) for each in compiled}
            start(kernel, (2, 3), *arguments, num=num, **({"config": config} if start is launch else config.meta))
            [reached] = [each for each in compiled if len(each.launched) > before.get(id(each), 0)]
            grid, given = reached.launched[-1]
            assert (grid, given) == ((2, 3, 1), (*arguments, config["BLOCK"], num))
            found.append(reached)
        return found

    truth = by(lambda kernel, grid, *arguments, **meta: kernel[grid](*arguments, **meta, **tune._OPTIONS))
    assert len(set(map(id, truth))) > 100
    assert by(launch) == truth
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", None)  # whoever asks Triton again fails
        assert by(launch) == truth


def test_a_switch_of_triton_that_compiles_anew_is_asked_for(
    compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs
    from triton.runtime.jit import JITFunction

    kernel, x = constants(JITFunction(jitted), "BLOCK", "num"), torch.zeros(4)
    for debug in (False, True, False, True):
        monkeypatch.setattr(knobs.runtime, "debug", debug)
        launch(kernel, (1,), x, 2, 3, config=Config({"BLOCK": 16}), num=1)
    assert [len(each.launched) for each in compiled] == [2, 2]


def test_recording_notes_launches_for_its_target_and_makes_none() -> None:
    kernel, x = Kernel(), torch.ones(3, device="meta")
    with record_launches(TARGETS["sm_120"]) as seen:
        assert target_of(x.device) == target_of(CPU) == TARGETS["sm_120"]
        launch(kernel, (5,), x, config=configure("a", (), rule, target_of(x.device)), IS_CAUSAL=False)
        launch(kernel, (0,), x, config=Config())
    assert kernel.launched == []
    assert [(each.kernel, each.grid, each.arguments) for each in seen] == [(kernel, (5,), (x,))]
    assert seen[0].meta == {"IS_CAUSAL": False, "BLOCK_T": 32, "num_warps": 4, "num_stages": 3}


def test_recording_ends_when_it_ends_even_by_an_error() -> None:
    kernel, x = Kernel(), torch.ones(3)
    with pytest.raises(RuntimeError, match="on purpose"), record_launches(TARGETS["sm_90"]):
        raise RuntimeError("on purpose")
    launch(kernel, (1,), x, config=Config())
    assert len(kernel.launched) == 1


def test_recordings_nest() -> None:
    kernel, x = Kernel(), torch.ones(3)
    with record_launches(TARGETS["sm_90"]) as outer:
        with record_launches(TARGETS["gfx942"]) as inner:
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


def test_a_table_without_rows_was_never_measured() -> None:
    assert tune.measurement_dates({"kernels": {}}) == tune.measurement_dates({"kernels": {"a": {}}}) == ""
    assert tune.measurement_dates({"kernels": {"a": {"1": {"date": "2"}, "2": {"date": "1"}}}}) == "1 to 2"


def test_every_shipped_table_is_of_a_machine_that_measured_it() -> None:
    for path in sorted(tune.TABLES.glob("*.json")):
        table = json.loads(path.read_text())
        assert tune.file_name(table["gpu"]) == path.stem
        assert table["target"] in TARGETS  # what it chooses can be compiled: benchmarks/kernels.py
        for rows in table["kernels"].values():
            for row in rows.values():
                assert row["ms"] < row["rule_ms"] and row["date"] and row["versions"]["triton"]


def test_targets_are_named_as_their_compilers_name_them() -> None:
    for name, target in TARGETS.items():
        assert name == target.architecture


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


@pytest.mark.parametrize(
    ("dtype", "target", "expected"),
    [
        (torch.float32, "sm_90", "tf32x3"),
        (torch.bfloat16, "sm_90", "tf32"),
        (torch.float16, "sm_80", "tf32x3" if tune.interpreting() else "bf16x3"),
        (torch.float16, "gfx942", "ieee"),
    ],
)
def test_float32_tiles_of_half_inputs_keep_more_digits_than_these(
    dtype: torch.dtype, target: str, expected: str
) -> None:
    assert tune.float_precision(dtype, TARGETS[target]) == expected


def test_the_compiler_does_not_trace_into_the_facts() -> None:
    def add(x: Tensor) -> Tensor:
        return x + target_of(x.device).arch + tune.interpreting()

    assert torch.compile(add, fullgraph=True, backend="eager")(torch.zeros(())).item() == 90 + tune.interpreting()


def test_choosing_puts_a_configuration_in_place_of_the_rule_and_tells_what_was_asked(tables: Path) -> None:
    tried = Config({"BLOCK_T": 16}, 2, 1)
    target = TARGETS["sm_90"]
    with tune.override_configs({("a", "128"): tried}) as asked:
        assert configure("a", (128,), rule, target, {"BLOCK_T": (16, 64)}) == tried
        assert configure("a", (256,), rule, target) == rule(target)
    assert asked == {
        ("a", "128"): tune.ConfigRequest(rule(target), {"BLOCK_T": (16, 64)}),
        ("a", "256"): tune.ConfigRequest(rule(target), {}),
    }
    assert configure("a", (128,), rule, target) == rule(target)


def test_candidates_vary_the_blocks_that_may_and_warps_and_stages_and_begin_with_the_rule() -> None:
    asked = tune.ConfigRequest(Config({"BLOCK_T": 64, "CHUNK": 64}, warps=4, stages=2), {"BLOCK_T": (32, 64)})
    found = tune.candidates(asked)
    assert found[0] == asked.rule
    assert len(found) == len({json.dumps(config.meta) for config in found}) == 2 * 3 * 3
    assert {config["BLOCK_T"] for config in found} == {32, 64}
    assert {config["CHUNK"] for config in found} == {64}
    assert {config.warps for config in found} == {2, 4, 8}
    assert {config.stages for config in found} == {1, 2, 3}


def test_tma_reads_rows_that_lie_apart_at_multiples_of_16_bytes() -> None:
    x = torch.zeros(2, 8, 3, 24, dtype=torch.bfloat16)
    assert tune.by_tma(None) and tune.by_tma(x) and tune.by_tma(x[:, 1:, :2]) and tune.by_tma(x[..., 8:])
    for other in (x[..., 1:], x[..., ::2], x.mT, x[:, :1].expand(2, 8, 3, 24), x.reshape(2, 8, 8, 9)):
        assert not tune.by_tma(other)


@pytest.mark.parametrize("size", [0, 128])
def test_a_kernel_that_asks_for_memory_of_its_own_is_lent_some_while_it_is_started(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from triton.runtime import _allocation

    before, seen = _allocation._allocator.get(), []
    monkeypatch.setattr(tune.torch, "empty", lambda size, **_: ("lent", size))

    class Run:
        global_scratch_size = size

        def __call__(self, *rest: Any) -> None:
            seen.append(_allocation._allocator.get())

    compiled = SimpleNamespace(run=Run(), function=0, packed_metadata=b"")
    tune.launch_compiled(compiled, (1, 1, 1), 0, ())
    assert _allocation._allocator.get() is before
    assert (seen[0] is before) == (size == 0)
    assert size == 0 or seen[0](size, 128, None) == ("lent", size)


@pytest.mark.parametrize("size", [0, 128])
def test_the_launcher_in_c_is_given_what_tritons_own_gives_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against the Triton that is here, of which CI has each that `launcher_of` knows."""
    triton = pytest.importorskip("triton")
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace())  # which Triton 3.9 looks for
    monkeypatch.setattr(tune, "_allocate", lambda size, alignment, stream: ("lent", size))
    seen: list[tuple[Any, ...]] = []
    launcher = driver.CudaLauncher.__new__(driver.CudaLauncher)
    named = {
        "launch": lambda *given: seen.append(given), "launch_cooperative_grid": False, "launch_pdl": True,
        "num_ctas": 2,
        "arg_annotations": ("annotations",), "kernel_signature": b"signature", "global_scratch_align": 128,
        "global_scratch_size": size, "profile_scratch_align": 1, "profile_scratch_size": 0,
        "gsan_enabled": False,
    }  # fmt: skip
    for name, value in named.items():
        setattr(launcher, name, value)
    compiled = SimpleNamespace(run=launcher, function=5, packed_metadata=(4, 1, 99))
    arguments = (16, (3, 1), None, True)
    tune.launch_compiled(compiled, (3, 5, 7), 11, arguments)
    found = tune.launcher_of(compiled, (3, 5, 7))
    assert found.launch == launcher.launch and found.scratch == size * 2 * 105
    told = {tune.STREAM: 11, tune.SCRATCH: ("lent", found.scratch)}
    head = tuple(told.get(x, x) if x.__hash__ else x for x in found.head)
    found.launch(*head, arguments) if found.nested else found.launch(*head, *arguments)
    assert seen[0] == seen[1]
    launcher.gsan_enabled = True  # then Triton's own adds arguments
    assert tune.launcher_of(compiled, (3, 5, 7)).head == (tune.STREAM,)


def test_a_launcher_that_is_not_known_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(tune, "launch_compiled", lambda *given: seen.append(given))
    compiled = SimpleNamespace(run=print)
    found = tune.launcher_of(compiled, (3, 5, 7))
    assert found.head == (tune.STREAM,) and not found.nested and not found.scratch
    found.launch(11, 1, 2)
    assert seen == [(compiled, (3, 5, 7), 11, (1, 2))]


def test_what_a_target_can() -> None:
    assert [name for name, target in TARGETS.items() if target.warpgroups] == ["sm_90", "sm_100"]
    assert {name: target.lanes for name, target in TARGETS.items() if target.lanes != 32} == {"gfx942": 64}
    there = not tune.interpreting()
    for name, launches in (("sm_80", False), ("sm_90", there), ("sm_100", there), ("gfx942", False)):
        assert tune.dependent_launch(TARGETS[name], second=False) == {"BESIDE": launches}
        second = {"BESIDE": True, "launch_pdl": True} if launches else {"BESIDE": False}
        assert tune.dependent_launch(TARGETS[name], second=True) == second


def test_warps_and_stages_are_varied_within_bounds() -> None:
    def of(warps: int, stages: int) -> tuple[set[int], set[int]]:
        found = tune.candidates(tune.ConfigRequest(Config({}, warps, stages), {}))
        return {config.warps for config in found}, {config.stages for config in found}

    assert of(1, 1) == ({1, 2}, {1, 2}) and of(2, 4) == ({1, 2, 4}, {3, 4, 5})
    assert of(16, 5) == ({8, 16}, {4, 5}) and of(8, 3) == ({4, 8, 16}, {2, 3, 4})


def test_a_table_is_measured_from_its_first_day_to_its_last() -> None:
    def table(*dates: str) -> dict[str, Any]:
        return {"kernels": {date + str(i): {"row": {"date": date}} for i, date in enumerate(dates)}}

    assert tune.measurement_dates(table("2026-03-02", "2026-01-09", "2026-02-01")) == "2026-01-09 to 2026-03-02"
    assert tune.measurement_dates(table("2026-03-02", "2026-03-02")) == "2026-03-02"


def test_hooks_are_heard_where_their_chain_holds_one() -> None:
    empty, full = SimpleNamespace(calls=[]), SimpleNamespace(calls=[print])
    for hooks, told in (((), False), ((None, empty), False), ((None, full), True), ((print, None), True)):
        assert tune.any_hook_set(*hooks) is told


def test_sides_dtypes_and_strides_that_kernels_are_told() -> None:
    assert [tune.side(size, 128) for size in (1, 16, 17, 32, 33, 128, 129)] == [16, 16, 32, 32, 64, 128, 128]
    stored = {dtype: tune.state_dtype(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    assert {dtype for dtype, kept in stored.items() if kept != torch.float32} == {torch.bfloat16}
    assert stored[torch.bfloat16] == torch.bfloat16
    x = torch.zeros(2, 3, 1, 4)
    assert tune.strides(None) is None and tune.strides(x) == (12, 4, 0, 1) and tune.strides(x[:, :, 0]) == (12, 4, 1)
    assert tune.strides(x.expand(2, 3, 5, 4)) == (12, 4, 0, 1)
