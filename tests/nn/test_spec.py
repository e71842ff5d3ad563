"""foci.nn.spec: every planted fault of a layer is caught and named, right ones pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import foci.nn
from foci.check.run import Report, examine
from foci.nn.cache import Cache
from foci.nn.spec import spec_for
from foci.ops.decay.api import linear_attention

NUMBERS = ("forward", "gradients", "causality", "batch slot", "packed = separate")
D, H, W = 24, 3, 4


def report(layer: Any, *laws: str) -> Report:
    spec = spec_for(layer)
    return examine(spec, spec.adapt(layer), dtypes=(torch.float32,), only=laws or NUMBERS, isolated=False)


def faults(layer: Any, *laws: str) -> str:
    return "\n".join(failure.sentence for failure in report(layer, *laws).failures)


class Right(nn.Module):
    """A layer written without foci.nn, with the places where people go wrong as methods."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size = D
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.taps = nn.Parameter(torch.randn(3 * D, 1, W))
        self.decay = nn.Linear(D, H)
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, hidden: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        held = {} if cache is None else cache.layer(0)
        lengths = None
        if mask is not None:
            order, lengths = mask.int().argsort(dim=1, descending=True, stable=True), mask.sum(1)
            hidden = hidden.gather(1, order[..., None].expand_as(hidden))
            mask = torch.arange(hidden.shape[1]) < lengths[:, None]
        mixed = F.silu(self.convolve(self.qkv(hidden), held, lengths))
        q, k, v = (x.unflatten(-1, (H, -1)) for x in mixed.chunk(3, -1))
        k, log_decay = self.hide(k, F.logsigmoid(self.gate(hidden)), mask)
        out, state = linear_attention(q, k, v, log_decay=log_decay, state=self.before(held), return_state=True)
        held["state"] = state
        out = self.merge(out)
        return out if mask is None else out.gather(1, order.argsort(1)[..., None].expand_as(out))

    def convolve(self, x: Tensor, held: dict, lengths: Tensor | None) -> Tensor:
        joined = torch.cat([held.get("tail", x.new_zeros(x.shape[0], W - 1, 3 * D)), x], 1)
        last = torch.full((x.shape[0],), x.shape[1]) if lengths is None else self.last(x, lengths)
        place = last[:, None] + torch.arange(W - 1)
        held["tail"] = joined.gather(1, place[..., None].expand(-1, -1, 3 * D))
        return F.conv1d(joined.transpose(1, 2), self.taps, groups=3 * D).transpose(1, 2)

    def last(self, x: Tensor, lengths: Tensor) -> Tensor:
        return lengths

    def gate(self, hidden: Tensor) -> Tensor:
        return self.decay(hidden)

    def hide(self, k: Tensor, log_decay: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if mask is None:
            return k, log_decay
        return k * mask[..., None, None], log_decay * mask[..., None]

    def before(self, held: dict) -> Tensor | None:
        return held.get("state")

    def merge(self, out: Tensor) -> Tensor:
        return self.out(out.flatten(2))


class Unmerged(Right):
    def merge(self, out):
        return self.out(out)


class MergedOverTokens(Right):
    def merge(self, out):
        return self.out(out.transpose(1, 2).reshape(out.shape[0], out.shape[1], D))


class Ahead(Right):
    def convolve(self, x, held, lengths):
        return F.conv1d(x.transpose(1, 2), self.taps[:, :, 1:], groups=3 * D, padding=1).transpose(1, 2)


class MaskIgnored(Right):
    def forward(self, hidden, mask=None, cache=None):
        return super().forward(hidden, None, cache)


class OnlyStateMasked(Right):
    """Left padding still runs through the convolution."""

    def forward(self, hidden, mask=None, cache=None):
        held = {} if cache is None else cache.layer(0)
        q, k, v = (x.unflatten(-1, (H, -1)) for x in F.silu(self.convolve(self.qkv(hidden), held, None)).chunk(3, -1))
        k, log_decay = self.hide(k, F.logsigmoid(self.gate(hidden)), mask)
        out, held["state"] = linear_attention(q, k, v, log_decay=log_decay, state=held.get("state"), return_state=True)
        return self.merge(out)


class PaddingDecays(Right):
    def hide(self, k, log_decay, mask):
        return super().hide(k, log_decay, mask)[0], log_decay


class TailOfPadding(Right):
    def last(self, x, lengths):
        return torch.full_like(lengths, x.shape[1])


class TailDropped(Right):
    def convolve(self, x, held, lengths):
        return super().convolve(x, {}, lengths)


class StateDropped(Right):
    def before(self, held):
        return None


class StateBehind(Right):
    """The state that is kept lacks the last token."""

    def forward(self, hidden, mask=None, cache=None):
        out, held = super().forward(hidden, mask, cache), {} if cache is None else cache.layer(0)
        if cache is not None and hidden.shape[1] > 1:
            before = Cache()
            super().forward(hidden[:, :-1], None if mask is None else mask[:, :-1], before)
            held["state"] = before.layer(0)["state"]
        return out


class StepScaled(foci.nn.Attention):
    def forward(self, hidden, *, mask=None, cache=None):
        out = super().forward(hidden, mask=mask, cache=cache)
        return out * 1.1 if cache is not None and hidden.shape[1] == 1 else out


class StepTwice(foci.nn.GatedDeltaNet):
    def forward(self, hidden, *, mask=None, cache=None):
        if cache is not None and hidden.shape[1] == 1:
            super().forward(hidden, mask=mask, cache=cache)
        return super().forward(hidden, mask=mask, cache=cache)


class BatchLeak(Right):
    def merge(self, out):
        out = super().merge(out)
        return out if len(out) == 1 else out + 0.01 * out.mean(0)


class CacheIgnored(Right):
    def forward(self, hidden, mask=None, cache=None):
        return super().forward(hidden, mask, None)


class GateDetached(Right):
    def gate(self, hidden):
        return self.decay(hidden).detach()


class ReturnsPair(Right):
    def forward(self, hidden, mask=None, cache=None):
        return super().forward(hidden, mask, cache), None


class Packed(Right):
    """Documents that only the state is reset for would need code; here offsets are taken and not looked at."""

    def forward(self, hidden, mask=None, offsets=None, cache=None):
        return super().forward(hidden, mask, cache)


def test_a_right_layer_passes() -> None:
    found = report(Right)
    assert found.ok, found.failures
    assert any("does not name offsets" in reason for reason in found.not_tested)


OURS = (
    "Attention", "DeltaNet", "GatedDeltaNet", "GatedLinearAttention", "GatedSlotAttention", "HGRN2",
    "KimiDeltaAttention", "LinearAttention", "Mamba2", "MultiScaleRetention", "RWKV6TimeMix",
    "SimpleGatedLinearAttention",
)  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_ours_pass(name: str) -> None:
    found = report(getattr(foci.nn, name), "forward", "bad input")
    assert found.ok and not found.not_tested, (found.failures, found.not_tested)


def test_an_object_is_taken_as_well_as_its_class() -> None:
    assert report(Right(), "forward").ok


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (Unmerged, "heads are not merged before the output projection"),
        (MergedOverTokens, "sees later ones"),
        (Ahead, "sees later ones"),
        (MaskIgnored, "mask is ignored: padding is taken for text"),
        (OnlyStateMasked, "what stands in padding reaches real tokens"),
        (PaddingDecays, "padding reaches what the cache keeps"),
        (TailOfPadding, "padding reaches what the cache keeps"),
        (TailDropped, "the cache lacks what the last tokens leave behind"),
        (StepScaled, "prefill and then steps are not the whole sequence"),
        (StepTwice, "prefill and then steps are not the whole sequence"),
        (StateBehind, "prefill and then steps are not the whole sequence"),
        (BatchLeak, "a row depends on the other rows of its batch"),
        (StateDropped, "prefill and then steps are not the whole sequence"),
        (CacheIgnored, "cache is accepted and ignored"),
        (ReturnsPair, "it returns a tuple for hidden"),
        (Packed, "offsets are ignored"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_named(layer: type[nn.Module], sentence: str) -> None:
    told = faults(layer, "forward")
    assert sentence in told and "is wrong" not in told  # whatever fails is named


def test_no_convolution_is_accused_of_a_fault_in_a_step() -> None:
    assert not any("convolution" in faults(layer, "forward") for layer in (StepScaled, StepTwice))


def test_what_a_layer_returns_in_a_buffer_is_told_as_that_alone() -> None:
    buffers: dict[torch.Size, torch.Tensor] = {}

    class InBuffer(Right):
        def merge(self, out):
            out = super().merge(out)
            if torch.is_grad_enabled():
                return out
            return buffers.setdefault(out.shape, torch.empty_like(out)).copy_(out)

    assert report(InBuffer, "forward").ok
    assert faults(InBuffer, "inputs untouched").startswith("hidden lies in memory that the next call writes to")


def test_padding_is_not_accused_where_there_is_none() -> None:
    assert "padding" not in faults(BatchLeak, "forward")


def test_a_parameter_without_a_gradient_is_named() -> None:
    told = faults(GateDetached, "gradients")
    assert "dlayer.decay.weight is None when layer.decay.weight.requires_grad" in told
    assert "dlayer.decay.bias is None" in told and "taps" not in told


@pytest.mark.parametrize("layer", [MergedOverTokens, Ahead])
def test_the_future_is_told_by_the_law_of_causality(layer: type[nn.Module]) -> None:
    assert "future tokens leak into hidden" in faults(layer, "causality")


def test_a_layer_that_starts_at_zero_hides_nothing() -> None:
    class Zero(TailDropped):
        def __init__(self) -> None:
            super().__init__()
            nn.init.zeros_(self.out.weight)

    assert "the cache lacks what the last tokens leave behind" in faults(Zero, "forward")


def test_the_width_that_a_class_was_given_is_known() -> None:
    class Memory(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.cells = nn.GRU(dim, dim, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cells(x)[0]

    assert not faults(Memory, "forward")


def test_what_cannot_be_made_is_told() -> None:
    with pytest.raises(ValueError, match="no value is known for its argument 'nheads'"):
        spec_for(lambda hidden_size, nheads: None)
    with pytest.raises(ValueError, match="layer is an int"):
        spec_for(3)


def test_what_is_no_module_is_told() -> None:
    class Plain: ...

    with pytest.raises(
        ValueError, match=r"my:Plain\(\) is a Plain; expected an nn.Module with forward\(hidden, \.\.\.\)"
    ):
        spec_for(Plain).adapt(Plain, name="my:Plain")
