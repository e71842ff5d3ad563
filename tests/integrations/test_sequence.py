"""Layers and models over ranks are one process: outputs, gradients, caches; and they are put back as they were."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from foci import Unsupported, nn
from foci.core.errors import Disagreement
from foci.core.world import World
from foci.integrations.sequence import split_sequence
from foci.nn.operators import ALONE
from foci.parallel.balance import shard
from foci.parallel.group import Group
from tests.parallel.recurrent import lengths_of

Worlds = Callable[[int], World]
D, T = 16, 11
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "softmax": lambda: nn.Attention(D, 4, num_kv_heads=2, qk_norm=True, dtype=torch.float64),
    "window and sink": lambda: nn.Attention(D, 2, window=3, sink=True, dtype=torch.float64),
    "window of one": lambda: nn.Attention(D, 2, window=1, dtype=torch.float64),
    "long window": lambda: nn.Attention(D, 2, window=9, dtype=torch.float64),
    "gated delta net": lambda: nn.GatedDeltaNet(D, 4, num_key_heads=2, dtype=torch.float64),
    "delta net": lambda: nn.DeltaNet(D, 2, dtype=torch.float64),
    "kimi": lambda: nn.KimiDeltaAttention(D, 2, dtype=torch.float64),
    "mamba": lambda: nn.Mamba2(D, 2, head_dim=4, value_dim=8, dtype=torch.float64),
    "rwkv": lambda: nn.RWKV6TimeMix(D, 2, mix_rank=4, decay_rank=4, dtype=torch.float64),
    "retention": lambda: nn.MultiScaleRetention(D, 2, dtype=torch.float64),
    "gla": lambda: nn.GatedLinearAttention(D, 2, dtype=torch.float64),
    "slots": lambda: nn.GatedSlotAttention(D, 2, num_slots=4, dtype=torch.float64),
    "linear": lambda: nn.LinearAttention(D, 2, dtype=torch.float64),
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], World]]:
    living: dict[int, World] = {}

    def world(size: int) -> World:
        return living.setdefault(size, World(size, timeout=60.0, limit=240.0))

    yield world
    for each in living.values():
        each.close()


def here() -> Group:
    return Group.of(dist.group.WORLD)


def gradients(model: torch.nn.Module) -> list[Tensor | None]:
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def trained(name: str, seed: int, offsets: tuple[int, ...] | None) -> None:
    """One layer, its output and all gradients; then it is as before."""
    group, layer = here(), LAYERS[name]()
    for parameter in layer.parameters():  # sinks, bonus, norms: nothing may be left at zero or one
        torch.nn.init.normal_(parameter, std=0.5)
    lengths = lengths_of(T, group.size, seed)
    mine = slice(sum(lengths[: group.rank]), sum(lengths[: group.rank + 1]))
    x = torch.randn(2 if offsets is None else 1, T, D, dtype=torch.float64, requires_grad=True)
    places = {} if offsets is None else {"offsets": torch.tensor(offsets)}
    y = layer(x, **places)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    expected = gradients(layer)

    part = x.detach()[:, mine].requires_grad_()
    with split_sequence(layer, group) as split:
        out = layer(part, **places)
        (out * weight[:, mine]).sum().backward()
        split.reduce_gradients()
    torch.testing.assert_close(out, y[:, mine])
    torch.testing.assert_close(part.grad, x.grad[:, mine])
    for (label, _), got, right in zip(layer.named_parameters(), gradients(layer), expected, strict=True):
        torch.testing.assert_close(got, right, msg=lambda text, label=label: f"{label}: {text}")
    assert "operators" not in vars(layer) and layer.operators is ALONE
    torch.testing.assert_close(layer(x, **places), y)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_over_ranks_is_one_process(worlds: Worlds, name: str) -> None:
    """Three ranks: even runs, runs anywhere (one of them empty), packed documents over ranks."""
    for seed, offsets in [(0, None), (13, None), (0, (0, 0, 1, 6, 6, 11))]:
        worlds(3).run(trained, name, seed, offsets)


def test_the_runs_of_these_tests_have_an_empty_one() -> None:
    assert 0 in lengths_of(T, 3, 13)


def decoded(name: str) -> None:
    """A prefill over ranks in two pieces, then steps in one process, from the cache that every rank has."""
    group, layer = here(), LAYERS[name]()
    x = torch.randn(2, 2 * T + 3, D, dtype=torch.float64)
    alone, together = nn.Cache(), nn.Cache()
    with torch.no_grad():
        expected = [layer(x[:, :T], cache=alone), layer(x[:, T : 2 * T], cache=alone)]
        for piece, whole in enumerate(expected):
            lengths = lengths_of(T, group.size, 13 * piece)
            mine = slice(sum(lengths[: group.rank]), sum(lengths[: group.rank + 1]))
            with split_sequence(layer, group):
                out = layer(x[:, piece * T : (piece + 1) * T][:, mine], cache=together)
            torch.testing.assert_close(out, whole[:, mine])
        assert alone.seen == together.seen == 2 * T
        for key, held in alone.layer(0).items():
            torch.testing.assert_close(together.layer(0)[key], held, msg=lambda text, key=key: f"{key}: {text}")
        for t in range(2 * T, 2 * T + 3):
            step = x[:, t : t + 1]
            torch.testing.assert_close(layer(step, cache=together), layer(step, cache=alone))


@pytest.mark.parametrize("name", LAYERS)
def test_a_prefill_over_ranks_goes_on_in_one_process(worlds: Worlds, name: str) -> None:
    worlds(3).run(decoded, name)


def refused() -> None:
    group = here()
    layer = LAYERS["gated delta net"]()
    x = torch.randn(1, 4, D, dtype=torch.float64)
    with split_sequence(layer, group):
        with pytest.raises(Unsupported, match="mask, where the sequence is split"):
            layer(x, mask=torch.ones(1, 4, dtype=torch.bool))
        with pytest.raises(ValueError, match="GatedDeltaNet is split already"):
            split_sequence(layer, group)
        assert layer.operators is not ALONE
    with pytest.raises(ValueError, match=r"model has no layer of foci\.nn"):
        split_sequence(torch.nn.Linear(2, 2), group)
    with pytest.raises(Unsupported, match="1 is a Conv1d"):
        split_sequence(torch.nn.Sequential(layer, torch.nn.Conv1d(2, 2, 3)), group)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        split_sequence(None, group)  # type: ignore[arg-type]
    assert layer.operators is ALONE


def test_what_cannot_be_split_is_refused(worlds: Worlds) -> None:
    worlds(1).run(refused)


def optimizers(model: Any, recipe: str) -> list[torch.optim.Optimizer]:
    """AdamW for all; or Muon for the matrices of the blocks, as examples/bytes_lm/train.py has it."""
    inner = [p for p in model.blocks.parameters() if p.dim() == 2 and min(p.shape) >= 16] if recipe == "muon" else []
    known = {id(p) for p in inner}
    others = [p for p in model.parameters() if id(p) not in known]
    muon = [torch.optim.Muon(inner, lr=4e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")] if inner else []
    return [*muon, torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)]


def learns(recipe: str, dtype: torch.dtype, steps: int) -> tuple[list[float], list[float]]:
    """bytes-lm (three GatedDeltaNet layers to one of softmax, twice) in one process and over ranks, step by step."""
    from foci.accelerate import bytes_lm

    group, (B, length) = here(), (2, 70)
    alone = bytes_lm.untrained(bytes_lm.HYBRID, seed=0).train().to(dtype)
    together = copy.deepcopy(alone)
    makers = [optimizers(model, recipe) for model in (alone, together)]
    curves: tuple[list[float], list[float]] = ([], [])
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        rows = torch.randint(32, 127, (B, length + 1), generator=draw)
        rows[:, 1::2] = rows[:, :-1:2]  # something to learn
        reads, wanted = rows[:, :-1], rows[:, 1:]
        loss = F.cross_entropy(alone(reads, use_cache=False).logits.flatten(0, 1), wanted.flatten())
        loss.backward()
        curves[0].append(loss.item())
        with split_sequence(together, group) as split:
            logits = together(shard(reads, group, "plain"), use_cache=False).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, shard(wanted, group, "plain").flatten(), reduction="sum") / wanted.numel()
            loss.backward()
            split.reduce_gradients()
        loss = loss.detach()
        dist.all_reduce(loss)
        curves[1].append(loss.item())
        for model, own in zip((alone, together), makers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in own:
                optimizer.step()
                optimizer.zero_grad()
    return curves


@pytest.mark.parametrize(
    ("recipe", "dtype", "steps", "most"),
    [
        ("adam", torch.float32, 4, 1e-4),
        # Muon rounds to bfloat16 inside: in float32 a last digit of a gradient would be seen in the loss.
        pytest.param("muon", torch.float64, 3, 1e-10, marks=pytest.mark.slow),
    ],
)
def test_bytes_lm_learns_over_ranks_as_in_one_process(
    worlds: Worlds, recipe: str, dtype: torch.dtype, steps: int, most: float
) -> None:
    pytest.importorskip("transformers", reason="bytes-lm is a model of transformers")
    for alone, together in worlds(4).run(learns, recipe, dtype, steps):
        assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) <= most
        assert alone[-1] < alone[0] - 0.1 and all(map(math.isfinite, together))


def writes(context: int, pieces: int) -> None:
    """The trained bytes-lm reads a context over ranks in pieces, and writes on as one process does."""
    from foci.accelerate import bytes_lm

    group, model = here(), bytes_lm.load()
    text = bytes_lm.text_of(bytes_lm.library_files("validation")[:40])[None, :context].long()
    alone, together = bytes_lm.BytesCache(), bytes_lm.BytesCache()
    with torch.no_grad():
        for piece in text.split(context // pieces, 1):
            expected = model(piece, past_key_values=alone).logits
            with split_sequence(model, group):
                got = model(shard(piece, group, "plain"), past_key_values=together).logits
            torch.testing.assert_close(got, shard(expected, group, "plain"), rtol=1e-3, atol=1e-3)
        first = expected[:, -1:].argmax(-1)
        for memory in (alone, together):
            assert memory.seen == context
        ids = [first, first]
        for _ in range(12):
            logits = [model(i, past_key_values=m).logits for i, m in zip(ids, (alone, together), strict=True)]
            torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)
            ids = [each[:, -1:].argmax(-1) for each in logits]
            assert torch.equal(*ids)


def test_bytes_lm_reads_a_long_context_over_ranks_and_writes_on(worlds: Worlds) -> None:
    pytest.importorskip("transformers", reason="bytes-lm is a model of transformers")
    worlds(4).run(writes, 1200, 2)


def tailless() -> None:
    convolution = nn.ShortConvolution(3, 2)
    with split_sequence(torch.nn.ModuleList([nn.GatedDeltaNet(8, 2), convolution]), here()):
        x = torch.randn(1, 4, 3)
        assert convolution(x, return_tail=False)[1] is None and convolution(x)[1] is not None


def test_a_tail_that_is_not_asked_for_is_not_given(worlds: Worlds) -> None:
    worlds(2).run(tailless)


def unlike() -> None:
    """Ranks with as many parameters, of other sizes."""
    layer = nn.Attention(D * (1 + dist.get_rank()), 2)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with split_sequence(layer, here()) as split:
        split.reduce_gradients()


def test_ranks_with_other_parameters_are_told_so(worlds: Worlds) -> None:
    """Not ended by gloo, which takes no message of another size."""
    for outcome in worlds(2).outcomes(unlike):
        assert isinstance(outcome.error, Disagreement) and f"parameters: [([{D}, {D}], " in str(outcome.error)
