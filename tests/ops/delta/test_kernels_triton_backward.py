"""The backward's kernels on what a forward in float64 leaves: every gradient against the equation's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from foci.check.memory import poisoned
from foci.core import tune
from foci.ops.arguments import documents
from foci.ops.delta import gpu
from foci.ops.delta.api import delta_rule
from foci.ops.delta.call import Call
from foci.ops.delta.cases import Delta
from foci.ops.delta.pieces import way
from foci.ops.delta.spec import SPEC
from foci.ops.delta.triangle import inverse
from foci.ops.draw import Draw
from foci.ops.gates import Gates
from tests.ops.delta.in_pieces import in_pieces  # noqa: F401  a fixture
from tests.ops.in_triton import DEVICE, DTYPES, there
from tests.ops.recurrences import BUDGET, error, exact

from foci.ops.delta import kernels_triton_backward as kernels  # isort: skip  after Triton's presence is known
from foci.ops.delta import kernels_triton_channels as channels  # isort: skip
from foci.ops.delta import kernels_triton_tokens as tokens  # isort: skip
from foci.ops.delta import kernels_triton_token_joins as joins  # isort: skip
from foci.ops.delta import kernels_triton_token_walks as token_walks  # isort: skip
from foci.ops.delta import kernels_triton_channel_walks as channel_walks  # isort: skip
from foci.ops.kernels_triton_packed import rooms  # isort: skip

C = kernels.CHUNK
CPU = torch.device("cpu")


def chunk(x: Tensor, start: int, stop: int, H: int) -> Tensor:
    """Tokens start:stop of [B,T,G,D] as [B*H,C,D], zeros behind them."""
    tokens = x[:, start:stop].repeat_interleave(H // x.shape[2], 2).movedim(2, 1).flatten(0, 1)
    return torch.nn.functional.pad(tokens, (0, 0, 0, C - tokens.shape[1]))


def left_by_forward(call: Call) -> tuple[Tensor | None, ...]:
    """What the forward would keep (gpu.py: Parts), computed in float64; NaN where no chunk is."""
    B, T, _, H, K, V, N = call.sizes
    packed = documents("delta_rule", call.offsets, T)
    slots = B * -(-T // C) if packed is None else T // C + N
    half = torch.bfloat16 if call.q.dtype == torch.bfloat16 else torch.float32
    states = torch.full((slots, H, K, V), torch.nan, dtype=half)
    d, X, A = (torch.empty(B, T, H, n) for n in (V, C, C))
    rise, fall = torch.ones(2, B, T, H, 1)
    total = torch.full((slots, H, 1), torch.nan)
    per_token = call.log_decay is not None and call.log_decay.shape[3] == 1
    q, k, v, beta, g, e, state, _, scale, _ = exact(call._asdict()).values()
    e = k if e is None else e
    g = q.new_zeros(B, T, H, 1) if g is None else g.expand(B, T, H, -1)
    state = q.new_zeros(N, H, K, V) if state is None else state
    runs = [(0, T, slice(0, B), 0, -(-T // C))] if packed is None else []
    runs += [] if packed is None else [(*p, slice(n, n + 1), p[0] // C + n, 1) for n, p in enumerate(packed)]
    for start, stop, rows, slot, step in runs:
        S = state[rows].flatten(0, 1)
        for i, t0 in enumerate(range(start, stop, C)):
            t1 = min(t0 + C, stop)
            gates = Gates(chunk(g, t0, t1, H))
            reads = torch.stack([chunk(q, t0, t1, H) * scale, chunk(e, t0, t1, H)], 2)
            write = chunk(k, t0, t1, H) * chunk(beta[..., None], t0, t1, H)
            products = gates.pairs(reads, write)
            inverted = inverse(products[:, :, 1].contiguous())
            errors = inverted @ (chunk(v, t0, t1, H) - gates.risen(reads[:, :, 1]) @ S)
            for b in range(B):
                states[slot + i + b * step] = S.view(B, H, K, V)[b]
                if per_token:
                    total[slot + i + b * step] = gates.total.view(B, H, 1)[b]
            parts = [(d, errors), (X, inverted), (A, products[:, :, 0])]
            if per_token:
                one = torch.ones_like(write[:, :, :1])
                parts += [(rise, gates.risen(one)), (fall, gates.fallen(one))]
            for into, found in parts:
                into[:, t0:t1] = found.view(B, H, C, -1)[:, :, : t1 - t0].movedim(1, 2)
            S = S * gates.total[:, :, None] + gates.fallen(write).transpose(1, 2) @ errors
    n = torch.arange(C)
    seen = torch.cat([(n < stop - t0)[None].expand(min(C, stop - t0), C) for t0, stop in starts(packed, T)])
    X, A = (torch.where(seen[None, :, None], x, 0) for x in (X, A))
    if half == torch.bfloat16 and g.shape[3] == 1:
        d = torch.stack([d.bfloat16(), (d - d.bfloat16()).bfloat16()])
    if half == torch.bfloat16:
        X, A = (torch.cat([x.bfloat16(), (x - x.bfloat16()).bfloat16()], 3) for x in (X, A))
    rows = (
        left_for_tma(packed, slots, rise, fall * beta[..., None])
        if half == torch.bfloat16 and g.shape[3] == 1
        else None
    )
    if not per_token:
        return states, d, X, A, None, None, None, rows, None
    reach = total[..., 0].log2().clamp(min=-9600.0) if half == torch.bfloat16 else None  # its keys are of length 1
    return states, d, X, A, rise[..., 0], (fall[..., 0] * beta).float(), total[..., 0], rows, reach


def left_for_tma(packed: list[tuple[int, int]] | None, slots: int, rise: Tensor, write: Tensor) -> Tensor:
    """rise and write once more, chunk by chunk: [slots,H,2,C]; NaN where no chunk is, and 0 behind its end."""
    B, T, H, _ = rise.shape
    rows = torch.full((slots, H, 2, C), torch.nan)
    for n, (start, stop) in enumerate([(0, T)] * B if packed is None else packed):
        for i, t0 in enumerate(range(start, stop, C)):
            slot, row = (n * -(-T // C) + i, n) if packed is None else (start // C + n + i, 0)
            found = torch.cat([rise, write], 3)[row, t0 : min(t0 + C, stop)]
            rows[slot] = torch.nn.functional.pad(found.permute(1, 2, 0), (0, C - found.shape[0]))
    return rows


def starts(packed: list[tuple[int, int]] | None, T: int) -> list[tuple[int, int]]:
    """The first token of each chunk, and its sequence's end."""
    return [(t0, stop) for start, stop in packed or [(0, T)] for t0 in range(start, stop, C)]


def draws(call: Call) -> tuple[Tensor, Tensor]:
    """The gradients that come in."""
    B, T, _, H, K, V, N = call.sizes
    draw = torch.Generator().manual_seed(1)
    return torch.randn(B, T, H, V, generator=draw).to(call.v.dtype), torch.randn(N, H, K, V, generator=draw)


def truth(inputs: dict[str, Any], grads: tuple[Tensor | None, Tensor | None]) -> dict[str, Tensor]:
    leaves = {n: x.requires_grad_() for n, x in exact(inputs).items() if n in SPEC.differentiable}
    outputs = delta_rule(**exact(inputs) | leaves, return_state=True, backend="chunked")
    given = [(o, g.double()) for o, g in zip(outputs, grads, strict=True) if g is not None]
    found = torch.autograd.grad([o for o, _ in given], list(leaves.values()), [g for _, g in given])
    return dict(zip(leaves, found, strict=True))


def found(
    inputs: dict[str, Any], grads: tuple[Tensor | None, Tensor | None], needs: tuple[str, ...] | None = None
) -> dict[str, Tensor | None]:
    """By name, in the shapes of the inputs."""
    call = SPEC.bind(**inputs)
    wanted = [n in inputs and (needs is None or n in needs) for n in SPEC.differentiable]
    kept = [None if x is None else x.to(DEVICE) for x in left_by_forward(call)]
    with poisoned():
        moved = Call(**there(call._asdict()))
        moved_grads = [None if g is None else g.to(DEVICE) for g in grads]
        cut = partial(way, moved, True, token_walks, joins)
        back, rest = rooms(moved, moved[: len(wanted)], wanted)
        room = back, rest
        kernels.backward(
            moved, kept, moved_grads, room, cut, channels, (tokens, None), (token_walks, None), joins, channel_walks
        )
    for x, name in zip(back, SPEC.differentiable, strict=True):
        assert x is None or (x.dtype == inputs[name].dtype and x.is_contiguous()), name
    return {
        n: None if x is None else x.cpu().view(inputs[n].shape)
        for n, x in zip(SPEC.differentiable, back, strict=True)
        if n in inputs
    }


def apart(inputs: dict[str, Any], grads: tuple[Tensor | None, Tensor | None] | None = None) -> dict[str, float]:
    grads = draws(SPEC.bind(**inputs)) if grads is None else grads
    got, wanted = found(inputs, grads), truth(inputs, grads)
    return {n: error(got[n], wanted[n]) for n in wanted if wanted[n].numel()}


def problem(T: int, decay: str = "token", *, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
    """K=20, V=12, four heads on two of keys, with a state."""
    made = Delta("", B=1, T=T, H=4, G=2, K=20, V=12, decay=decay, state=True, **more).case.make(dtype, CPU, 0)
    return made


@pytest.mark.parametrize("T", [1, 16, 17, 64, 65, 129])
def test_any_length(T: int) -> None:
    errors = apart(problem(T))
    assert all(e <= BUDGET[torch.float32] for e in errors.values()), errors


def test_any_length_per_channel() -> None:
    for T in (1, 65):
        errors = apart(problem(T, "channel", erase=True))
        assert all(e <= BUDGET[torch.float32] for e in errors.values()), errors


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_half_with_gates_from_nothing_to_all(decay: str, dtype: torch.dtype) -> None:
    errors = apart(problem(70, decay, dtype=dtype, gates=Draw.extremes))
    assert all(e <= BUDGET[dtype] for e in errors.values()), errors


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
def test_documents_some_empty(decay: str) -> None:
    """Slots that no chunk has are NaN in what is kept; a document without tokens hands its state's gradient on."""
    errors = apart(problem(100, decay, offsets=(0, 0, 65, 66, 66, 100)))
    assert all(e <= BUDGET[torch.float32] for e in errors.values()), errors


@pytest.mark.parametrize(
    ("T", "full"),
    [
        (129, False),
        pytest.param(
            129, True, marks=pytest.mark.xfail(
                strict=True,
                reason="log_decay is 1.5e-5 from the truth, budget 1e-5: float32 in chunks misses where every key is "
                "the same and every beta 2 (chunked 3.5e-5, native 1.1e-5); a float32 loop over tokens gives 9e-7",
            ),
        ),
    ],
)  # fmt: skip
def test_constant_gates_with_alike_keys(T: int, full: bool) -> None:
    """Their gradient is a sum over all tokens, of which nothing may cancel."""
    errors = apart(problem(T, "head", alike="identical", beta=2.0, full=full))
    assert all(e <= BUDGET[torch.float32] for e in errors.values()), errors


def test_incoming_gradients_may_be_absent_or_of_stride_0() -> None:
    inputs = problem(70)
    out, final = draws(SPEC.bind(**inputs))
    for grads in ((torch.ones(()).expand_as(out), None), (None, final.transpose(2, 3).contiguous().transpose(2, 3))):
        errors = apart(inputs, grads)
        assert all(e <= BUDGET[torch.float32] for e in errors.values()), errors


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_what_is_not_needed_is_not_made(decay: str) -> None:
    inputs = problem(17, decay, erase=True)
    grads = draws(SPEC.bind(**inputs))
    whole = found(inputs, grads)
    for needs in (("q",), ("v", "state"), ("beta",), ("k", "log_decay"), ("erase",)):
        some = found(inputs, grads, needs)
        for name, x in some.items():
            assert (x is None) == (name not in needs)
            assert x is None or torch.equal(x, whole[name]), (name, needs)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_gradients_of_a_prefix_do_not_know_what_follows(decay: str) -> None:
    prefix_alone(decay, 70, 41)


def prefix_alone(decay: str, T: int, stop: int) -> None:
    """The gradients of outputs before `stop` are the same bits whatever follows, gates of -inf too."""
    inputs = problem(T, decay)
    out, _ = draws(SPEC.bind(**inputs))
    out[:, stop:] = 0
    later = {n: x.clone() for n, x in inputs.items()}
    for name in ("q", "k", "v", "beta"):
        later[name][:, stop:] *= -0.5
    later["log_decay"][:, stop:] = -torch.inf
    one, other = found(inputs, (out, None)), found(later, (out, None))
    for name, x in one.items():
        before = slice(None) if name == "state" else (slice(None), slice(0, stop))
        assert torch.equal(x[before], other[name][before]), name
        assert bool(other[name].isfinite().all()), name


@pytest.mark.parametrize(("decay", "count"), [("", 4), ("head", 5), ("token", 4), ("channel", 3)])
def test_launches(decay: str, count: int) -> None:
    call = SPEC.bind(**problem(65, decay))
    kept, grads = left_by_forward(call), draws(call)
    wanted = [getattr(call, n) is not None for n in SPEC.differentiable]
    with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
        back, walks = rooms(call, call[: len(wanted)], wanted), ((token_walks, None), joins, channel_walks)
        by = partial(way, call, True, token_walks, joins)
        kernels.backward(call, kept, grads, back, by, channels, (tokens, None), *walks)
    assert len(launches) == count


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_every_size_that_may_be_tuned_is_right(decay: str) -> None:
    inputs = Delta("", B=1, T=70, H=2, G=1, K=20, V=36, decay=decay, state=True).case.make(torch.float32, CPU, 0)
    with tune.override_configs({}) as asked:
        found(inputs, draws(SPEC.bind(**inputs)))
    for pick in (min, max):
        chosen = {
            key: replace(each.rule, blocks={**each.rule.blocks, **{name: pick(n) for name, n in each.vary.items()}})
            for key, each in asked.items()
        }
        with tune.override_configs(chosen):
            errors = apart(inputs)
        assert all(e <= BUDGET[torch.float32] for e in errors.values()), errors


def test_few_heads_of_many_tokens_take_one_launch_more() -> None:
    call = SPEC.bind(**there(Delta("", B=1, T=4096, H=1, K=8, V=5, decay="token").case.make(torch.float32, CPU, 0)))
    kept = gpu._parts(call, gpu.kept(call).empty(call.v))
    with tune.record_launches(tune.TARGETS["sm_90"]) as launches:
        back, cut = rooms(call, call[:7], [True] * 7), partial(way, call, True, token_walks, joins)
        kernels.backward(
            call, kept, (call.v, None), back, cut, channels, (tokens, None), (token_walks, None), joins, channel_walks
        )
    names = [launch.kernel.fn.__name__ for launch in launches]
    assert names == ["walk_kernel", "walk_kernel", "side_kernel", "pairs_kernel", "gates_kernel"]


@pytest.mark.usefixtures("in_pieces")
class TestInPieces:
    """What few heads of long sequences are: each chunk a piece of its own."""

    @pytest.mark.parametrize(("T", "decay"), [(65, "token"), (150, "channel"), (200, ""), (129, "head")])
    def test_any_length(self, T: int, decay: str) -> None:
        errors = apart(problem(T, decay, erase=T == 150))
        assert all(e <= BUDGET[torch.float32] for e in errors.values()), errors

    @pytest.mark.parametrize("alike", ["identical", "correlated"])
    def test_alike_keys_through_three_pieces(self, alike: str) -> None:
        errors = apart(problem(140, alike=alike, beta=2.0, full=True))
        assert all(e <= BUDGET[torch.float32] for e in errors.values()), errors

    def test_half_precision(self) -> None:
        errors = apart(problem(129, dtype=torch.float16))
        assert all(e <= BUDGET[torch.float16] for e in errors.values()), errors

    @pytest.mark.parametrize("decay", ["token", "channel"])
    def test_documents_with_and_without_tokens(self, decay: str) -> None:
        packed = Delta("", B=1, T=200, H=2, G=1, K=8, decay=decay, offsets=(0, 0, 3, 140, 140, 200, 200), state=True)
        errors = apart(packed.case.make(torch.float32, CPU, 0))
        assert all(e <= BUDGET[torch.float32] for e in errors.values()), errors

    def test_gradients_of_a_prefix_do_not_know_what_follows(self) -> None:
        prefix_alone("token", 140, 100)
