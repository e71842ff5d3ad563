"""Slabs: every token once, whatever T; there and back; states at borders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import foci
from foci.ops.gates import Gates
from foci.ops.slabs import Decays, Slab, borders, ends, kept, load, slabs, store


@pytest.mark.parametrize("P", [1, 7, 32, 100])
@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 1000, 4096])
def test_every_token_once(T: int, P: int) -> None:
    at = 5
    for slab in slabs(5, 5 + T, P):
        assert slab.start == at
        assert slab.stop > slab.start
        assert slab.n * slab.C >= slab.stop - slab.start
        assert slab.C & (slab.C - 1) == 0
        assert slab.n == 1 or slab.n * slab.C == slab.stop - slab.start
        at = slab.stop
    assert at == 5 + T


@pytest.mark.parametrize("slab", [Slab(2, 10, 2, 4), Slab(10, 13, 1, 4)])
def test_there_and_back(slab: Slab) -> None:
    x = torch.randn(2, 13, 3, 5)
    there = load(x, slab, 6, torch.float64)
    assert there.shape == (slab.n * 2 * 6, slab.C, 5)
    filled = slab.n * slab.C - (slab.stop - slab.start)
    assert filled == 0 or there[:, -filled:].abs().sum() == 0
    back = torch.zeros_like(x)
    store(there, slab, back)
    torch.testing.assert_close(back[:, slab.start : slab.stop], 2 * x[:, slab.start : slab.stop])  # two heads read one
    assert back[:, slab.stop :].abs().sum() == 0


def test_head_h_reads_head_h_over_group() -> None:
    x = torch.arange(2.0).view(1, 1, 2, 1)
    assert load(x, Slab(0, 1, 1, 1), 6, torch.float32).flatten().tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("D", [1, 3])
def test_borders_and_ends_are_the_loop(D: int) -> None:
    n, P, C, K, V = 3, 2, 4, 3, 5
    gates = Gates(-torch.rand(n * P, C, D, dtype=torch.float64))
    k, v = torch.randn(n * P, C, K, dtype=torch.float64), torch.randn(n * P, C, V, dtype=torch.float64)
    state = torch.randn(P, K, V, dtype=torch.float64)
    total, written = gates.total.view(n, P, D, 1), (k.mT @ v).view(n, P, K, V)
    S, starts = state.clone(), []
    for i in range(n):
        starts.append(S)
        S = total[i] * S + written[i]
    carried = state.clone()
    torch.testing.assert_close(borders(gates, k, v, carried), torch.cat(starts))
    torch.testing.assert_close(carried, S)
    d, behind = state, []
    for i in reversed(range(n)):
        behind.insert(0, d)
        d = total[i] * d + written[i]
    carried = state.clone()
    torch.testing.assert_close(ends(gates, k.mT @ v, carried), torch.cat(behind))
    torch.testing.assert_close(carried, d)


def test_constant_gates_are_made_once_and_end_with_their_tokens() -> None:
    v = torch.zeros(1, 70, 2, 3)
    decays = Decays(torch.tensor([-1.0, -2.0]).view(1, 1, 2, 1), v, torch.float64)
    whole, tail = Slab(0, 64, 1, 64), Slab(64, 70, 1, 8)
    assert decays(whole) is decays(whole._replace(start=0, stop=64))
    torch.testing.assert_close(decays(tail).total[:, 0], torch.tensor([-6.0, -12.0], dtype=torch.float64).exp())


@pytest.mark.parametrize("P", [0, 1, 3, 16, 32, 33])
def test_kept_has_room_for_every_slab_and_two_more(P: int) -> None:
    """Two more, since the compiler tells sizes of 0 and 1 from others."""
    for T in (0, 1, 63, 64, 65, 128, 700, 2048, 2049):
        call = SimpleNamespace(sizes=(P, T, 1, 1, 4, 5, P), offsets=None, causal=True, accumulator=torch.float32)
        assert kept(call).shape == (len(list(slabs(0, T, P))) + 2, P, 4, 5)
        call.offsets = torch.tensor([0, T])
        assert kept(call).shape[0] == 0


@pytest.mark.parametrize(
    ("B", "T", "G", "H", "K", "V"),
    [(0, 5, 1, 2, 3, 4), (2, 0, 1, 2, 3, 4), (2, 5, 1, 0, 3, 4), (2, 5, 1, 2, 0, 4), (2, 5, 1, 2, 3, 0)],
)
def test_a_size_of_0_gives_zeros(B: int, T: int, G: int, H: int, K: int, V: int) -> None:
    def leaf(*shape: int) -> torch.Tensor:
        return torch.ones(shape, requires_grad=True)

    q, k, v, beta, state = leaf(B, T, G, K), leaf(B, T, G, K), leaf(B, T, H, V), leaf(B, T, H), leaf(B, H, K, V)
    for g in (leaf(H), leaf(B, T, H), leaf(B, T, H, K)):
        for out, final in (
            foci.linear_attention(q, k, v, log_decay=g, state=state, return_state=True),
            foci.linear_attention(q, k, v, causal=False, state=state, return_state=True),
            foci.delta_rule(q, k, v, beta, log_decay=g, state=state, return_state=True),
        ):
            assert out.shape == v.shape
            assert not out.any()
            assert final is not None
            assert torch.equal(final, state)
            found = torch.autograd.grad(out.sum() + final.sum(), (q, k, v, beta, g), allow_unused=True)
            assert not any(x is not None and x.any() for x in found)


def test_kept_has_as_many_places_as_the_compiler_thinks() -> None:
    """It keeps sizes open (here up to 16 rows), and makes one floor of two: where one divisor was negative, wrongly."""

    def places(B: int, T: int) -> int:
        call = SimpleNamespace(sizes=(B, T, 2, 2, 4, 5, B), offsets=None, causal=True, accumulator=x.dtype)
        return kept(call).shape[0]

    x, open_sizes = torch.empty(5, 333), StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
    B, T = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(x, symbolic_context=open_sizes).shape
    found = places(B, T).node.expr
    for rows, tokens in [(2, 7), (1, 64), (3, 70), (5, 333), (1, 2050), (16, 129)]:
        assert found.subs({B.node.expr: rows, T.node.expr: tokens}) == places(rows, tokens)
