"""What every Triton backend refuses, and how many chunks it goes through."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from foci.core.errors import Unsupported
from foci.core.tune import TARGETS
from foci.ops import SPECS, gpu
from foci.ops.gpu import CHUNK, brought, chunks, placed, unsuitable
from foci.ops.recurrent import sequences

NO_GPU = "it needs a GPU, the tensors are on cpu"


@pytest.fixture(params=[False, True])
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(gpu, "interpreting", lambda: request.param)
    return request.param


def test_a_tensor_of_the_cpu_is_for_the_interpreter_alone(interpreted: bool) -> None:
    assert unsuitable(torch.ones(1), (1, 2), (64, 64)) == ([] if interpreted else [NO_GPU])


def test_tensors_without_memory_are_refused(interpreted: bool) -> None:
    assert unsuitable(torch.ones(1, device="meta"), (1,), (64,)) == ["it needs a GPU, the tensors are on meta"]


def test_every_reason_is_given_at_once(interpreted: bool) -> None:
    found = unsuitable(torch.ones(1, dtype=torch.float64), (2, 0), (64, 513))
    assert found == [
        *([] if interpreted else [NO_GPU]),
        "float64 is not supported",
        "there is nothing to compute: a size is 0",
        "heads wider than 512 are not supported",
    ]


def test_the_interpreter_is_wrong_in_bfloat16(interpreted: bool) -> None:
    found = unsuitable(torch.ones(1, dtype=torch.bfloat16), (1,), (64,))
    assert found == (["Triton's interpreter computes bfloat16 wrongly"] if interpreted else [NO_GPU])


@pytest.mark.parametrize(
    ("name", "arch", "expected"),
    [("sm_80", 75, ["sm_75 is older than sm_80, the oldest that kernels are compiled and tested for"])]
    + [(name, target.arch, []) for name, target in TARGETS.items()],
)
def test_gpus_older_than_those_compiled_for_are_refused(
    name: str, arch: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    like = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float16)
    monkeypatch.setattr(gpu, "interpreting", lambda: False)
    monkeypatch.setattr(gpu, "target_of", lambda device: TARGETS[name]._replace(arch=arch))
    assert unsuitable(like, (1,), (64,)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TARGETS)
def test_hopper_is_refused_where_nothing_assembles_its_kernels_right(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float16)
    monkeypatch.setattr(gpu, "interpreting", lambda: False)
    monkeypatch.setattr(gpu, "imported", lambda package: package == "triton")
    monkeypatch.setattr(gpu, "refusal", lambda: "ptxas is too old")
    monkeypatch.setattr(gpu, "target_of", lambda device: TARGETS[name])
    assert unsuitable(like, (1,), (64,)) == (["ptxas is too old"] if name == "sm_90" else [])  # type: ignore[arg-type]


# Of every recurrence the arguments whose last dimension is a width that kernels hold whole.
WIDTHS = {"linear": ["qk", "v"], "delta": ["qk", "v"], "scan": [], "selective_scan": ["ABC"]}


@pytest.mark.parametrize("name", WIDTHS)
def test_backends_say_what_no_kernel_computes(name: str, interpreted: bool) -> None:
    spec = SPECS[name]
    assert spec.bind is not None

    def reasons(dtype: torch.dtype = torch.float32, **changed: torch.Tensor) -> list[str]:
        inputs = spec.cases[0].make(dtype, torch.device("cpu"), 0)
        return spec.backend("triton").load().reasons(spec.bind(**inputs | changed))

    assert reasons() == ([] if interpreted else [NO_GPU])
    assert "float64 is not supported" in reasons(torch.float64)
    inputs = spec.cases[0].make(torch.float32, torch.device("cpu"), 0)
    none = {n: inputs[n][:, :0] for n in sequences(inputs)}
    assert "there is nothing to compute: a size is 0" in reasons(**none)
    for names in WIDTHS[name]:
        wide = {n: inputs[n].new_zeros(*inputs[n].shape[:-1], 513) for n in names}
        assert "heads wider than 512 are not supported" in reasons(**wide)


def test_a_step_takes_plain_float32_states_on_a_gpu() -> None:
    assert not gpu.can_step(torch.zeros(2, 3, 8, 8))
    assert not gpu.can_step(torch.zeros(2, 3, 8, 8, device="meta"))


def test_the_compiler_traces_through_the_reasons() -> None:
    def count(x: torch.Tensor) -> torch.Tensor:
        return x + len(unsuitable(x, x.shape, (64,)))

    x = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(torch.compile(count, fullgraph=True, backend="eager")(x), count(x))


@pytest.mark.parametrize(("T", "B", "expected"), [(1, 1, 1), (64, 3, 3), (65, 3, 6), (1000, 2, 32)])
def test_chunks_of_a_batch(T: int, B: int, expected: int) -> None:
    assert chunks(T, B, None) == expected


def test_chunks_of_packed_documents_are_enough_and_at_most_one_a_document_too_many() -> None:
    draw = random.Random(0)
    for _ in range(200):
        lengths = [draw.choice((0, 1, 63, 64, 65, 200)) for _ in range(draw.randint(1, 6))]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        needed = sum(-(-length // CHUNK) for length in lengths)
        assert needed <= chunks(sum(lengths), 1, offsets) <= needed + len(lengths), lengths


def test_offsets_are_placed_and_those_on_the_cpu_checked() -> None:
    tokens = torch.zeros(1, 9, 2, 4)
    apart = torch.stack([torch.tensor([0, 4, 9]), torch.zeros(3, dtype=torch.int64)], 1)[:, 0]
    found = placed("scan", apart, tokens)
    assert found is not None and found.is_contiguous() and found.tolist() == [0, 4, 9]
    assert placed("scan", None, tokens) is None
    for wrong in ([0, 5, 4, 9], [0, 12], [1, 9], [0, 8]):
        with pytest.raises(ValueError, match="scan: offsets must rise from 0 to T=9"):
            placed("scan", torch.tensor(wrong), tokens)


def test_what_lies_on_the_cpu_is_copied_to_a_gpu_but_not_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = torch.tensor([[1, 2], [3, 4]])[:, 0]
    assert brought("attention", "band_low", bound, torch.device("meta")).is_meta
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert brought("attention", "band_low", bound, bound.device).is_contiguous()
    with pytest.raises(Unsupported, match=r"captured in a CUDA graph:\n.*band_low is on cpu\n.*on cuda:0 before"):
        brought("attention", "band_low", bound, torch.device("cuda:0"))
