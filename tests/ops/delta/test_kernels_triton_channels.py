"""Gates per channel in the backward: what only half precision does, near rows and far ones in every mix."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from foci.core import tune
from foci.ops.delta.api import delta_rule
from foci.ops.delta.cases import Delta
from foci.ops.delta.pieces import way
from foci.ops.delta.spec import SPEC
from tests.ops.delta.test_kernels_triton_backward import apart, draws, found, left_by_forward, problem, truth
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, answers, error, exact

from foci.ops.delta import kernels_triton_backward as backward  # isort: skip  after Triton's presence is known
from foci.ops.delta import kernels_triton_channels as kernels  # isort: skip
from foci.ops.delta import kernels_triton_channel_walks as walks  # isort: skip
from foci.ops.delta import kernels_triton_token_walks as others  # isort: skip
from foci.ops.kernels_triton_packed import rooms  # isort: skip

HALF = torch.float16


def gated(kind: str, T: int = 70, dtype: torch.dtype = HALF, **more: Any) -> dict[str, Any]:
    """Sums of gates that come to where rows are far on the way, one gate that forgets all, or chunks of both kinds."""
    inputs = problem(T, "channel", dtype=dtype, **more)
    gates, draw = inputs["log_decay"], torch.Generator().manual_seed(7)
    if kind == "meeting":
        gates.copy_(-3.5 * torch.rand(gates.shape, generator=draw))
    elif kind == "cut":
        gates[:, 20] = -torch.inf
    elif kind == "closed":
        gates.fill_(-torch.inf)
    elif kind == "bands":
        gates.copy_(-30.0 * torch.rand(gates.shape, generator=draw))
    elif kind == "one chunk":
        gates[:, :64, 1] = -5.0
    return inputs


@pytest.mark.parametrize("kind", ["open", "meeting", "cut", "one chunk", "bands"])
def test_gradients_in_half_precision(kind: str) -> None:
    errors = apart(gated(kind))
    assert all(e <= BUDGET[HALF] for e in errors.values()), errors


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
@pytest.mark.parametrize("kind", ["open", "bands"])
def test_gradients_in_bfloat16_that_are_small_or_large(kind: str, size: float) -> None:
    inputs = gated(kind, dtype=torch.bfloat16)
    errors = apart(inputs, tuple(size * x for x in draws(SPEC.bind(**inputs))))
    assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("K", [16, 64])  # walked by all blocks, and turned
@pytest.mark.parametrize(
    ("alike", "beta", "times"), [("identical", 1.0, 0.0), ("identical", 1.0, 1.0), ("correlated", 2.0, 1.0)]
)
def test_alike_keys_in_bfloat16_through_the_state_alone(K: int, alike: str, beta: float, times: float) -> None:
    """With beta k rounded next to its decays, and dS behind it, v and beta were at up to 3 times their budget."""
    worst: dict[str, float] = {}
    for seed in range(3):
        made = Delta("", B=1, T=128, H=1, K=K, decay="channel", alike=alike, beta=beta, full=alike == "identical")
        inputs = made.case.make(torch.bfloat16, torch.device("cpu"), seed)
        inputs["log_decay"] *= times
        errors = apart(inputs, (None, draws(SPEC.bind(**inputs))[1]))
        worst = {n: max(e, worst.get(n, 0.0)) for n, e in errors.items()}
    assert all(e <= BUDGET[torch.bfloat16] for e in worst.values()), worst


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("least", [1e-8, 1e-10, 1e-13, 1e-16, 1e-20, 0.0])
def test_a_beta_may_be_so_small_that_dv_has_lost_digits(least: float) -> None:
    """Its gradient is not d dv / beta then: by that it was at up to 173 times its budget."""
    inputs = Delta("", B=1, T=70, H=1, K=32, decay="channel").case.make(torch.bfloat16, torch.device("cpu"), 0)
    inputs["beta"][:, ::3] = least
    got = answers(delta_rule, SPEC, there(inputs), "triton")
    wanted = answers(delta_rule, SPEC, exact(there(inputs)), "reference")
    errors = {n: error(got[n], wanted[n]) for n in wanted if wanted[n].numel()}
    assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_where_all_is_forgotten_gates_and_the_first_state_have_no_gradient(
    dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if dtype == torch.bfloat16:
        request.getfixturevalue("halves")
    inputs = gated("closed", dtype=dtype)
    grads = draws(SPEC.bind(**inputs))
    got, wanted = found(inputs, grads), truth(inputs, grads)
    for name in "log_decay", "state":
        gradient = got.pop(name)
        assert gradient is not None and gradient.abs().max() < 1e-5 and wanted[name].abs().max() == 0, name
    for name, gradient in got.items():
        assert gradient is not None and error(gradient, wanted[name]) <= BUDGET[dtype], name


def test_another_key_erases_among_packed_documents() -> None:
    errors = apart(gated("meeting", 100, erase=True, offsets=(0, 0, 65, 66, 66, 100)))
    assert all(e <= BUDGET[HALF] for e in errors.values()), errors


@pytest.mark.parametrize("kind", ["open", "meeting"])
def test_gradients_of_a_prefix_do_not_know_what_follows(kind: str) -> None:
    inputs, stop = gated(kind), 41
    out, _ = draws(SPEC.bind(**inputs))
    out[:, stop:] = 0
    later = {n: x.clone() for n, x in inputs.items()}
    for name in ("q", "k", "v", "beta"):
        later[name][:, stop:] *= -0.5
    later["log_decay"][:, stop:] = -torch.inf
    one, other = found(inputs, (out, None)), found(later, (out, None))
    for name, x in one.items():
        before = slice(None) if name == "state" else (slice(None), slice(0, stop))
        assert x is not None and torch.equal(x[before], other[name][before]), name  # type: ignore[index]


def test_far_rows_have_a_launch_of_their_own_in_half_precision_alone() -> None:
    for dtype, launches in (torch.float32, 1), (torch.bfloat16, 2):
        inputs = problem(65, "channel", dtype=dtype)
        call = SPEC.bind(**inputs)
        wanted = [getattr(call, n) is not None for n in SPEC.differentiable]
        with tune.record_launches(tune.TARGETS["sm_90"]) as seen:
            back = rooms(call, call[: len(wanted)], wanted)
            backward.backward(
                call,
                left_by_forward(call),
                draws(call),
                back,
                partial(way, call, True, others, None),
                kernels,
                None,
                (others, None),
                None,
                walks,
            )
        wide = [launch for launch in seen if launch.kernel is kernels.side_by_channel_kernel]
        sides = [launch for launch in seen if launch.kernel is kernels.near_side_kernel]
        assert len(wide) + len(sides) == launches
        assert [launch.meta["FAR"] for launch in sides] == [True, False][: 2 * (dtype == torch.bfloat16)]
        assert len({launch.meta["num_warps"] for launch in sides}) < 2  # or near rows would know what comes later
