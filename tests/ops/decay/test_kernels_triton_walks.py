"""Linear attention in one walk, both ways: bfloat16 on Hopper, in place of the launches that hand on states."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from foci.check import memory
from foci.core import tune
from foci.ops import stretches
from foci.ops.decay import gpu
from foci.ops.decay.api import linear_attention
from foci.ops.decay.call import Call, bind
from foci.ops.decay.cases import Linear
from foci.ops.decay.spec import SPEC
from foci.ops.draw import Draw
from tests.ops.in_bfloat16 import halves  # noqa: F401  a fixture
from tests.ops.in_triton import there
from tests.ops.recurrences import BUDGET, CPU, answers, error, exact, unasked

from foci.ops.decay import kernels_triton_walks as walks  # isort: skip  after Triton's presence is known

NAMES = ("q", "k", "v", "log_decay", "bonus", "state")
SQUARE: list[dict[str, Any]] = [
    {"B": 2, "T": 192, "H": 2, "decay": "token", "state": True},  # of whole chunks: by maps for TMA (tiles/maps.py)
    {"B": 2, "T": 150, "H": 2, "decay": "token", "state": True},
    {"T": 130, "H": 4, "decay": "head", "state": True},
    {"T": 66, "decay": ""},
    {"T": 129, "K": 128, "decay": "token"},
    {"T": 150, "K": 256, "H": 2, "decay": "", "state": True},
    {"T": 150, "H": 2, "decay": "token", "offsets": (0, 3, 3, 140, 150), "state": True},
    {"T": 150, "H": 4, "decay": "head", "offsets": (0, 70, 70, 150)},
    {"T": 200, "H": 2, "decay": "token", "gates": Draw.extremes},
]
CHANNELS: list[dict[str, Any]] = [
    {"B": 2, "T": 128, "H": 2, "decay": "channel", "state": True},
    {"T": 130, "V": 96, "decay": "channel", "state": True},
    {"T": 70, "H": 4, "G": 2, "decay": "channel"},
    {"T": 130, "decay": "channel", "bonus": True, "offsets": (0, 3, 3, 130)},
    {"T": 330, "H": 2, "V": 96, "decay": "channel", "offsets": (0, 3, 3, 200, 330), "state": True},
    {"T": 130, "decay": "channel", "gates": Draw.extremes},
]


def problem(more: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    return Linear("", **{"B": 1, "H": 1, "K": 64, **more}).case.make(torch.bfloat16, CPU, seed)


@pytest.fixture(params=[0, 64, 128])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are walked whole, or in stretches of so many tokens, how few these may be."""
    tokens = request.param
    monkeypatch.setattr(walks, "enough", lambda *_: True)
    monkeypatch.setattr(stretches, "cheapest", lambda N, B, T, packed, *_: stretches.cut_into(tokens, N, T, packed))


@pytest.mark.usefixtures("halves", "cut")
class TestWithinBudget:
    @pytest.mark.parametrize("more", SQUARE + CHANNELS)
    def test_forward_and_every_gradient(self, more: dict[str, Any]) -> None:
        inputs = problem(more)
        with memory.poisoned():
            found = answers(linear_attention, SPEC, there(inputs), "triton")
        truth = answers(linear_attention, SPEC, exact(inputs), "chunked")
        errors = {n: error(found[n].cpu(), truth[n]) for n in truth}
        assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors

    @pytest.mark.parametrize(
        "more",
        [
            {"B": 2, "T": 192, "H": 4, "G": 2},
            {"T": 70, "H": 4, "G": 2, "V": 40},
            {"T": 150, "K": 256, "H": 2, "G": 1, "V": 96, "state": True},
            {"T": 150, "K": 256, "H": 2, "decay": "head", "offsets": (0, 3, 3, 140, 150), "state": True},
            {"T": 150, "K": 256, "gates": Draw.extremes},
            {"T": 150, "K": 256, "H": 2, "G": 1, "V": 40, "decay": "channel", "state": True},
            {"T": 150, "K": 256, "V": 40, "decay": "channel", "bonus": True, "offsets": (0, 3, 3, 150), "state": True},
        ],
    )
    def test_forward_of_heads_that_share_keys_and_of_256_channels(self, more: dict[str, Any]) -> None:
        """Which walk only forward."""
        inputs = problem({"decay": "token"} | more)
        truth = linear_attention(**exact(inputs), return_state=True, backend="chunked")
        with memory.poisoned():
            found = gpu.forward(bind(**there(inputs)))
        errors = [error(x.cpu(), wanted) for x, wanted in zip(found, truth, strict=True)]
        assert all(e <= BUDGET[torch.bfloat16] for e in errors), errors

    def test_a_state_that_nobody_asks_for_is_not_stored(self) -> None:
        for decay in ("token", "channel"):
            unasked(SPEC, gpu.forward, bind(**there(problem({"T": 150, "H": 2, "decay": decay}))))

    def test_only_what_is_needed_comes_and_it_is_the_same(self) -> None:
        for decay in ("token", "head", "channel", ""):
            call = bind(**there(problem({"T": 150, "H": 2, "decay": decay, "state": True})))
            outputs, grads = gpu.forward(call, True), (torch.randn_like(call.v), torch.randn_like(call.state))
            every = [name != "bonus" and getattr(call, name) is not None for name in NAMES]
            expected = gpu.backward(call, outputs, grads, every)
            for place in (place for place, there_is in enumerate(every) if there_is):
                needs = [place == other for other in range(len(NAMES))]
                found = gpu.backward(call, outputs, grads, needs)
                assert [x is not None for x in found] == needs
                assert torch.equal(found[place], expected[place]), NAMES[place]

    def test_a_launch_may_be_told_of_maps_alone(self) -> None:
        """Without gates, and without a gradient of a state, of whole chunks."""
        inputs = there(problem({"B": 2, "T": 128, "H": 2, "decay": ""}))
        call = bind(**inputs)
        outputs, do = gpu.forward(call, True), torch.randn_like(call.v)
        found = gpu.backward(call, outputs, (do, None), [True] * 3 + [False] * 3)[:3]
        wanted = gpu.backward(call, outputs, (do, torch.zeros_like(outputs[1])), [True] * 3 + [False] * 3)[:3]
        assert all(x is not None and torch.equal(x, y) for x, y in zip(found, wanted, strict=True))

    @pytest.mark.parametrize("decay", ["token", "head", "channel"])
    def test_what_comes_later_changes_no_bit_of_what_comes_before(self, decay: str) -> None:
        inputs, at = there(problem({"T": 200, "decay": decay})), 70
        do = torch.randn_like(inputs["v"])
        do[:, at:] = 0

        def answered() -> tuple[Any, ...]:
            call = bind(**inputs)
            outputs = gpu.forward(call, True)
            found = gpu.backward(call, outputs, (do, None), [True] * 4 + [False] * 2)
            return tuple(x[:, :at].clone() for x in (outputs[0], *found) if x is not None and x.shape[1] > at)

        before = answered()
        for name in ("q", "k", "v"):
            inputs[name][:, at:] = 3 * inputs[name][:, at:] - 1
        if decay != "head":
            inputs["log_decay"][:, at:] = -torch.inf
        assert len(before) == (4 if decay == "head" else 5)
        assert all(torch.equal(x, y) for x, y in zip(before, answered(), strict=True))

    def test_what_is_kept_is_the_state_at_each_chunks_start(self) -> None:
        inputs = problem({"T": 200, "decay": "token", "state": True})
        kept = gpu.forward(bind(**there(inputs)), True)[2]
        for slot in range(4):
            part = {n: x if n == "state" else x[:, : 64 * slot] for n, x in exact(inputs).items()}
            state = linear_attention(**part, return_state=True, backend="chunked")[1] if slot else part["state"]
            assert error(kept[slot].cpu(), state[0]) < BUDGET[torch.bfloat16]


@pytest.mark.usefixtures("halves")
@pytest.mark.parametrize("offsets", [(0, 260, 70, 330), (0, 200, 0, 330), (300, 130, 170, 40, 220)])
def test_nobody_waits_for_ever_whatever_offsets_say(offsets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are not read before: each program arrives, also one that has no tokens by them."""
    monkeypatch.setattr(stretches, "cheapest", lambda N, B, T, packed, *_: stretches.cut_into(64, N, T, packed))
    monkeypatch.setattr(gpu, "placed", lambda _, offsets, __: offsets)
    inputs = problem({"T": 330, "H": 2, "decay": "channel"})
    call = bind(**there(inputs))._replace(offsets=there({"o": torch.tensor(offsets, dtype=torch.int32)})["o"])
    outputs = gpu.forward(call, True)
    gpu.backward(call, outputs, (torch.ones_like(call.v), None), [True] * 4 + [False] * 2)


@pytest.mark.usefixtures("halves")
def test_who_cannot_be_read_by_tma_goes_through_the_other_kernels() -> None:
    inputs = problem({"T": 70, "decay": "token"})
    spread = {name: x if name == "log_decay" else torch.stack([x, x], -1)[..., 0] for name, x in inputs.items()}
    call = bind(**there(inputs))
    outputs = gpu.forward(call, True)
    grads = torch.ones_like(call.v), None
    needs = [True] * 4 + [False] * 2
    expanded = grads[0].new_ones(()).expand(grads[0].shape), None
    for x, y in zip(gpu.forward(call), gpu.forward(bind(**there(spread))), strict=True):
        assert error(y, x) < 2 * BUDGET[torch.bfloat16]
    one, other = (gpu.backward(call, outputs, given, needs) for given in (grads, expanded))
    for x, y in zip(one, other, strict=True):
        assert x is y is None or error(y, x) < 2 * BUDGET[torch.bfloat16]


def launched(call: Call, **options: Any) -> tuple[Counter[str], Counter[str]]:
    """Forward and backward on an H200."""
    with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
        outputs = gpu.forward(call, True)
        count = len(launches)
        gpu.backward(call, outputs, (torch.empty_like(call.v), None), [getattr(call, n) is not None for n in NAMES])
    names = [launch.kernel.fn.__name__ for launch in launches]
    return Counter(names[:count]), Counter(names[count:])


def counted(*names: str) -> Counter[str]:
    return Counter(f"{name}_kernel" for name in names)


def test_two_launches_and_three_back_where_sequences_fill_a_gpu_and_where_they_are_cut() -> None:
    """And one for documents, in either direction, where no launch that sums gates or makes pairs clears the rest."""
    meta = torch.device("meta")
    for T, heads, cut in (2048, 128, False), (32768, 16, True):
        q = torch.empty(1, T, heads, 128, dtype=torch.bfloat16, device=meta)
        g = torch.empty(1, T, heads, 128, device=meta)
        forward, back = (("states",), ("dstates",)) if cut else ((), ())
        sums = () if cut else ("sums",)
        assert launched(bind(q, q, q)) == (counted(*forward, "walk"), counted(*back, "sides", "walk"))
        assert launched(bind(q, q, q, log_decay=g[..., 0])) == (
            counted(*forward, *sums, "walk"), counted(*back, *sums, "sides", "walk")
        )  # fmt: skip
        assert launched(bind(q, q, q, log_decay=g)) == (
            counted("pairs", "walk"), counted("pairs", "walk", "keys")
        )  # fmt: skip
        offsets = torch.empty(2, device=meta).int()
        assert launched(bind(q, q, q, offsets=offsets))[0] == counted("rest", *forward, "walk")
        assert launched(bind(q, q, q, log_decay=g, offsets=offsets)) == (
            counted("pairs", "walk"), counted("pairs", "walk", "keys")
        )  # fmt: skip


def test_who_walks_only_forward() -> None:
    q = torch.empty(1, 2048, 64, 128, dtype=torch.bfloat16, device="meta")
    grouped = bind(q[:, :, :1], q[:, :, :1], q, log_decay=torch.empty(1, 2048, 64, device="meta"))
    forward, back = launched(grouped)
    assert forward == counted("sums", "walk") and not back & counted("sides", "walk")
    wide = torch.empty(1, 2048, 64, 96, dtype=torch.bfloat16, device="meta")
    forward, back = launched(bind(q, q, wide))
    assert forward == counted("walk") and not back & counted("sides", "walk")


def test_of_256_channels_no_state_is_kept_that_gates_fade_and_no_stretch_is_short() -> None:
    def inference(call: Call) -> Counter[str]:
        with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
            gpu.forward(call)
        return Counter(launch.kernel.fn.__name__ for launch in launches)

    def fading(T: int, heads: int) -> Call:
        q = torch.empty(1, T, heads, 256, dtype=torch.bfloat16, device="meta")
        return bind(q, q, q, log_decay=torch.empty(1, T, heads, device="meta"))

    many = fading(2048, 64)
    assert launched(many._replace(log_decay=None))[0] == counted("walk")
    assert launched(many)[0] == counted("states", "out")
    assert inference(many) == counted("sums", "walk")
    assert inference(fading(2048, 4)) == counted("states", "out")
    assert inference(fading(16384, 4)) == counted("states", "walk")
    q = fading(2048, 128).q
    forward, back = launched(bind(q, q, q[..., :64].contiguous()))
    assert forward == counted("walk") and not back & counted("sides", "walk")
