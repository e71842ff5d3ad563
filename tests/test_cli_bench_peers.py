"""Peers behind our argument names: those that run here are right, and refuse by feature what they cannot do."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from foci import cli_bench_peers
from foci.bench.sweep import Trial
from foci.cli_bench_peers import peers, repeatable, unguarded
from foci.cli_bench_truth import Truth
from foci.core.spec import Candidate
from foci.ops import SPECS

CPU = torch.device("cpu")
HERE = [
    pytest.param(name, peer, id=f"{name}, {peer.name}")
    for name in ("softmax", "delta")
    for peer in peers(name, CPU)
]  # fmt: skip


def test_there_are_peers_here() -> None:
    assert [peer.name for peer in peers("softmax", CPU)] == ["torch SDPA"]
    assert [peer.name for peer in peers("delta", CPU)] == ["transformers' torch code"]
    assert peers("linear", CPU) == peers("scan", CPU) == []


@pytest.mark.parametrize(("name", "peer"), HERE)
def test_a_peer_is_right_where_it_does_not_refuse(name: str, peer: Candidate) -> None:
    spec, ran = SPECS[name], 0
    for case in spec.shapes:
        if "small" not in case.features and not case.name.startswith("small"):
            continue
        if not peer.refuses(case):
            inputs = case.make(torch.float32, CPU, 0)
            trial = Trial(spec, peer, case, inputs)
            share = Truth(spec)(inputs, trial.found(), trial.weights)
            assert share is not None and share <= 1, case.name
            ran += 1
    assert ran


def test_what_a_peer_cannot_do_is_said() -> None:
    (sdpa,) = peers("softmax", CPU)
    shapes = {case.name: case for case in SPECS["softmax"].shapes}
    assert sdpa.refuses(shapes["softcap 2x4096x16:8x256"]) == ["softcap is not supported"]
    assert sdpa.refuses(shapes["dlse 2x4096x16x128"]) == ["dlse is not supported"]
    assert sdpa.refuses(shapes["small 1x128x8x64"]) == []
    (fallback,) = peers("delta", CPU)
    kda = next(case for case in SPECS["delta"].shapes if case.name.startswith("KDA"))
    assert fallback.refuses(kda) == ["it is for decay per token", "decay per channel is not supported"]


def test_a_guard_that_judging_makes_needless_is_lifted_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(TRITON_ABOVE_3_7_1=False)
    monkeypatch.setattr(cli_bench_peers, "find_spec", lambda name: True)
    monkeypatch.setattr(cli_bench_peers, "_theirs", lambda name: module)
    said: list[str] = []
    with unguarded(said.append):
        assert module.TRITON_ABOVE_3_7_1 is True
    assert module.TRITON_ABOVE_3_7_1 is False and len(said) == 1
    monkeypatch.setattr(cli_bench_peers, "find_spec", lambda name: None)
    with unguarded(said.append):
        assert len(said) == 1


@pytest.mark.parametrize(("operator", "decay"), [("linear", "token"), ("delta", "token"), ("delta", "channel")])
def test_fla_is_timed_by_its_own_code(operator: str, decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hands Gated DeltaNet to FlashQLA, and Kimi Delta Attention to FlashKDA, where these are installed."""

    def own(q, k, v, **options):
        return v + 1, None

    @functools.wraps(own)
    def handed_on(*args, **options):
        raise AssertionError("another package's kernels, told as FLA's")

    names = ("chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule", "chunk_kda", "chunk_delta_rule")
    monkeypatch.setattr(cli_bench_peers, "find_spec", lambda name: name == "fla" or None)
    monkeypatch.setattr(cli_bench_peers, "_theirs", lambda name: SimpleNamespace(**dict.fromkeys(names, handed_on)))
    case = next(case for case in SPECS[operator].cases if case.name == f"decay per {decay}")
    given, ran = case.make(torch.float32, CPU, 0), 0
    for peer in peers(operator, torch.device("cuda")):
        if not peer.refuses(case):
            assert torch.equal(peer.call(given)[0], given["v"] + 1)
            ran += 1
    assert ran == 1


def test_xformers_has_its_bias_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with its gradient, where the problem's is one for all rows."""

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_bias: torch.Tensor) -> torch.Tensor:
        assert attn_bias.shape == (3, 4, 5, 7)
        return (q.transpose(1, 2) @ k.permute(0, 2, 3, 1) + attn_bias) @ v.transpose(1, 2)

    monkeypatch.setattr(cli_bench_peers, "_theirs", lambda name: SimpleNamespace(memory_efficient_attention=theirs))
    q, k = torch.randn(3, 5, 4, 8), torch.randn(3, 7, 4, 8)
    bias = torch.randn(1, 4, 5, 7, requires_grad=True)
    out = cli_bench_peers._xformers({"q": q, "k": k, "v": k, "bias": bias})
    assert torch.autograd.grad(out.sum(), bias)[0].shape == bias.shape


def test_what_torch_compiles_can_be_differentiated_twice() -> None:
    import torch._functorch.config as config

    before = config.donated_buffer
    with repeatable():
        assert config.donated_buffer is False
    assert config.donated_buffer == before
