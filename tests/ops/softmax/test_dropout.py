"""Dropout: one mask for a seed, in every backend; each probability its own fair coin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import foci
from foci.ops.softmax.dropout import keep, placed, positions
from tests.ops.softmax.problems import CPU, OPAQUE, assert_close, evaluate, inputs_of, refused

SEED = torch.tensor(1234567890123456789)


def kept(p: float, B: int = 2, H: int = 3, T: int = 64, S: int = 64, seed: Tensor = SEED) -> Tensor:
    return keep(seed, p, *positions(B, H, T, S, CPU))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_the_rate_is_kept(p: float) -> None:
    n = 2 * 3 * 64 * 64
    assert abs(kept(p).double().mean() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5


def test_every_row_key_head_and_batch_has_the_rate() -> None:
    mask = kept(0.5).double()
    for dims in ((0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)):
        others = mask.numel() // mask.mean(dims).numel()
        assert float((mask.mean(dims) - 0.5).abs().max()) < 5 * 0.5 / others**0.5


def test_rows_are_independent_of_each_other() -> None:
    """Rows that differ in b, h, t or seed agree on half of the keys; so do neighbouring keys along a row."""
    mask = kept(0.5, B=2, H=2, T=32, S=512).flatten(0, 2)
    other = kept(0.5, B=2, H=2, T=32, S=512, seed=SEED + 1).flatten(0, 2)
    signs = mask.double() * 2 - 1
    correlation = signs @ signs.T / 512
    correlation.fill_diagonal_(0)
    bound = 6 / 512**0.5
    assert float(correlation.abs().max()) < bound
    assert float((signs * (other.double() * 2 - 1)).mean(-1).abs().max()) < bound
    for shift in (1, 2, 8, 64):
        assert float((signs[:, shift:] * signs[:, :-shift]).mean(-1).abs().max()) < bound


def test_a_part_of_the_positions_gives_a_part_of_the_mask() -> None:
    whole, index = kept(0.3), [torch.arange(*bounds) for bounds in ((1, 2), (0, 3), (5, 20), (40, 64))]
    part = keep(SEED, 0.3, *(x.view([-1 if i == d else 1 for i in range(4)]) for d, x in enumerate(index)))
    assert torch.equal(part, whole[1:2, 0:3, 5:20, 40:64])


def test_a_placed_seed_gives_its_part_of_the_mask() -> None:
    """Also one that strides, and one that was placed twice: heads by one exchange, tokens by another."""
    whole = kept(0.3)
    seed = placed(placed(SEED, h=(1, 1)), t=(3, 2), s=(40, 8))
    part = keep(seed, 0.3, *positions(2, 2, 20, 3, CPU))
    assert torch.equal(part, whole[:, 1:3, 3:43:2, 40:64:8])
    assert torch.equal(keep(placed(SEED), 0.3, *positions(2, 3, 64, 64, CPU)), whole)
    assert torch.equal(keep(placed(SEED, b=(1, 1)), 0.3, *positions(1, 3, 64, 64, CPU)), whole[1:])


@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1])
def test_any_seed_will_do(seed: int) -> None:
    assert abs(kept(0.5, seed=torch.tensor(seed)).double().mean() - 0.5) < 0.02


@pytest.mark.parametrize("backend", OPAQUE)
@pytest.mark.parametrize(
    "extra", [{}, {"mask": foci.Causal()}, {"softcap": 1.5, "mask": foci.Lengths(torch.tensor([19, 4]))}]
)
def test_every_backend_drops_the_same(backend: str, extra: dict) -> None:
    inputs = inputs_of("dropout") | extra
    if refused(inputs, backend):
        with pytest.raises(foci.Unsupported, match="dropout"):
            evaluate(inputs, backend)
        return
    assert_close(evaluate(inputs, backend), evaluate(inputs))


def test_the_generator_decides_and_lse_does_not_know() -> None:
    inputs = inputs_of("dropout") | {"dropout": 0.5}
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(foci.attention_with_lse(**inputs, backend="chunked"))
    assert torch.equal(outs[0][0], outs[1][0])
    assert not torch.equal(outs[0][0], outs[2][0])
    undropped = foci.attention_with_lse(**inputs | {"dropout": 0.0}, backend="chunked")
    assert torch.equal(outs[0][1], undropped[1])


def test_no_dropout_draws_nothing() -> None:
    before = torch.get_rng_state()
    foci.attention(**inputs_of("plain"), dropout=0.0)
    assert torch.equal(before, torch.get_rng_state())


def test_the_mean_over_many_draws_is_attention() -> None:
    inputs = inputs_of("plain", torch.float32)
    inputs = {name: x[:1, :8, :1] for name, x in inputs.items()}
    mean = torch.stack([foci.attention(**inputs, dropout=0.3, backend="reference") for _ in range(200)])
    error = (mean.mean(0) - foci.attention(**inputs)).abs()
    assert float((error / (mean.std(0) / 200**0.5)).max()) < 5


def test_gradcheck_with_a_fixed_seed() -> None:
    small = {name: x[:1, :4, :1, :2].clone() for name, x in inputs_of("plain").items()}

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return foci.attention_with_lse(q, k, v, dropout=0.4, backend="chunked")

    assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in small.values()))
