"""Layers compute with the operators they are given, and refuse padding where these do not have every token."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from foci import ShapeError, Unsupported, nn
from foci.nn.operators import ALONE


@pytest.mark.parametrize("make", [nn.GatedDeltaNet, nn.Attention, nn.MultiScaleRetention])
def test_a_layer_has_those_of_one_process_until_it_is_given_others(make) -> None:
    layer, other = make(16, 2), make(16, 2)
    assert layer.operators is ALONE
    calls = []

    def counted(name: str):
        def run(*args, **options):
            calls.append(name)
            return getattr(ALONE, name)(*args, **options)

        return run

    names = ("attention", "linear_attention", "delta_rule")
    layer.operators = replace(ALONE, **{name: counted(name) for name in names})
    x = torch.randn(1, 5, 16)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), other(x))
    assert len(calls) == 1 and other.operators is ALONE


@pytest.mark.parametrize("make", [nn.GatedDeltaNet, nn.Attention])
def test_padding_is_refused_where_a_row_is_on_several_ranks(make) -> None:
    layer = make(16, 2)
    layer.operators = replace(ALONE, whole=False)
    with pytest.raises(Unsupported, match="mask, where the sequence is split over ranks"):
        layer(torch.randn(1, 5, 16), mask=torch.ones(1, 5, dtype=torch.bool))


def test_positions_count_from_the_first_token_of_all() -> None:
    layer = nn.Attention(16, 2)
    x = torch.randn(1, 5, 16)
    seen = []
    layer.operators = replace(
        ALONE, span=lambda T: (3, 3 + T), attention=lambda q, k, v, **rest: seen.append(q) or torch.zeros_like(v)
    )
    layer(torch.cat([x[:, 3:]], 1))
    layer.operators = replace(ALONE, attention=layer.operators.attention)
    layer(x)
    torch.testing.assert_close(seen[0], seen[1][:, 3:])


class _Watched(TorchFunctionMode):
    """Under it nobody looks at the values of a tensor before an operator does, as on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


LAYERS = [layer for name in nn.__all__ if hasattr(layer := getattr(nn, name), "operators")]


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("values", [[0, 3], [0, 9], [1, 7], [0, 5, 3, 7], [0]])
def test_every_layer_refuses_documents_that_are_not_all_of_the_tokens(make, values) -> None:
    layer, hidden = make(16, 2), torch.randn(1, 7, 16)
    with pytest.raises(
        ValueError, match=rf"{make.__name__}: offsets must rise from 0 to T=7, got {re.escape(str(values))}"
    ):
        layer(hidden, offsets=torch.tensor(values))


@pytest.mark.parametrize("make", LAYERS)
def test_no_document_is_refused_where_values_are_not_seen(make) -> None:
    """On a GPU an index of none would end the process's CUDA context."""
    layer, hidden = make(16, 2).to("meta"), torch.empty(1, 7, 16, device="meta")
    with pytest.raises(ValueError, match=rf"{make.__name__}: offsets has 1 entry, no document; expected some of 7 tok"):
        layer(hidden, offsets=torch.zeros(1, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("make", [make for make in LAYERS if make is not nn.Attention])
@pytest.mark.parametrize("values", [[0, 3], [0, 9]])
def test_before_their_values_are_seen_documents_are_moved_inside(make, values) -> None:
    layer, hidden, offsets = make(16, 2), torch.randn(1, 7, 16), torch.tensor(values)
    with _Watched(), pytest.raises(ValueError, match="offsets must rise from 0 to T=7"):
        layer(hidden, offsets=offsets)


@pytest.mark.parametrize("make", LAYERS)
def test_a_call_that_is_refused_leaves_the_cache_as_it_was(make) -> None:
    layer, cache, hidden = make(16, 2), nn.Cache(), torch.randn(2, 6, 16)
    with torch.no_grad():
        whole = layer(hidden)
        layer(hidden[:, :3], cache=cache)
        before = {name: held.clone() for name, held in cache.layer(0).items()}
        for rows in (1, 3):
            with pytest.raises(ShapeError, match=rf"{make.__name__}: cache holds \w+ of 2 rows; expected {rows}"):
                layer(torch.randn(rows, 1, 16), cache=cache)
        layer.backend = "none of that name"
        for piece in (hidden[:, 3:4], hidden[:, 3:]):
            with pytest.raises(ValueError, match="none of that name"):
                layer(piece, cache=cache)
        layer.backend = None
        assert cache.seen == 3 and before.keys() == cache.layer(0).keys()
        assert all(torch.equal(before[name], held) for name, held in cache.layer(0).items())
        rest = [layer(hidden[:, t : t + 1], cache=cache) for t in (3, 4, 5)]
    torch.testing.assert_close(torch.cat(rest, 1), whole[:, 3:])


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("later", [torch.no_grad, torch.enable_grad])
def test_a_prompt_in_inference_mode_goes_on_outside(make, later) -> None:
    layer, cache, hidden = make(16, 2), nn.Cache(), torch.randn(2, 6, 16)
    with torch.inference_mode():
        out = [layer(hidden[:, :3], cache=cache)]
    with later():
        out += [layer(hidden[:, t : t + 1], cache=cache) for t in (3, 4, 5)]
        torch.testing.assert_close(torch.cat(out, 1), layer(hidden))
    if later is torch.enable_grad:
        out[-1].sum().backward()


@pytest.mark.parametrize("make", LAYERS)
def test_whoever_wraps_a_layer_may_change_its_class_and_no_tokens_own_nothing(make) -> None:
    layer, other, hidden, cache = make(16, 2), make(16, 2), torch.randn(2, 4, 16), nn.Cache()
    with torch.no_grad():
        other(hidden[:, :0], cache=cache)
        whole, start = layer(hidden), layer(hidden[:, :3], cache=cache)
        layer.__class__ = type(f"FSDP{make.__name__}", (make,), {})
        torch.testing.assert_close(
            torch.cat([start, layer(hidden[:, 3:], cache=cache)], 1), whole, atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("make", LAYERS)
def test_a_second_layer_left_at_the_default_layer_index_is_refused_and_changes_nothing(make) -> None:
    first, second, hidden, cache = make(16, 2), make(16, 2), torch.randn(2, 4, 16), nn.Cache()
    second.load_state_dict(first.state_dict())
    told = (
        rf"{make.__name__}: layer_index is 0, where cache holds what another layer wrote \({make.__name__}\); expected"
    )
    with torch.no_grad():
        whole = first(hidden)
        first(hidden[:, :3], cache=cache)
        for other in (second, make(16, 2, layer_index=0)):
            with pytest.raises(ValueError, match=told):
                other(hidden[:, :3], cache=cache)
        forks = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]  # of which nobody knows whose they are
        same = [first, copy.deepcopy(first), *[second] * len(forks)]
        for layer, held in zip(same, [copy.deepcopy(cache), cache, *forks], strict=True):
            torch.testing.assert_close(layer(hidden[:, 3:], cache=held), whole[:, 3:])
        cache.layer(0).clear()
        torch.testing.assert_close(second(hidden[:, :1], cache=cache), whole[:, :1])


@pytest.mark.parametrize("make", LAYERS)
def test_a_layer_index_that_is_no_entry_is_refused(make) -> None:
    with pytest.raises(ValueError, match=f"{make.__name__}: layer_index is True; expected an integer of at least 0"):
        make(16, 2, layer_index=True)


@pytest.mark.parametrize("make", LAYERS)
def test_layers_told_their_index_go_on_for_one_another_where_they_are_of_one_class(make) -> None:
    first, second, cache, hidden = (
        make(16, 2, layer_index=3),
        make(16, 2, layer_index=3),
        nn.Cache(),
        torch.randn(2, 4, 16),
    )
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        out = torch.cat([first(hidden[:, :3], cache=cache), second(hidden[:, 3:], cache=cache)], 1)
        torch.testing.assert_close(out, first(hidden))
        other = nn.DeltaNet if make is not nn.DeltaNet else nn.LinearAttention
        with pytest.raises(ValueError, match=rf"{other.__name__}: layer_index is 3, .* wrote \({make.__name__}\); exp"):
            other(16, 2, layer_index=3)(hidden, cache=cache)


@pytest.mark.parametrize("make", LAYERS)
def test_what_is_no_tensor_or_no_integers_is_refused_by_its_name(make) -> None:
    layer, hidden = make(16, 2), torch.randn(1, 4, 16)
    with pytest.raises(TypeError, match=rf"{make.__name__}: mask is a list; expected a tensor of torch\.bool \[1, 4\]"):
        layer(hidden, mask=[[True] * 4])
    with pytest.raises(TypeError, match=rf"{make.__name__}: hidden is a list; expected a tensor \[B, T, 16\]"):
        layer([hidden])
    with pytest.raises(
        ValueError, match=rf"{make.__name__}: offsets is torch\.float32; expected torch\.int32 or torch\."
    ):
        layer(hidden, offsets=torch.tensor([0.0, 4.0]))
