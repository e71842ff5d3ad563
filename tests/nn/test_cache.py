"""Caches: growth without quadratic copying, windows, gradients, forks and reordering."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from foci.core.errors import ShapeError
from foci.nn.cache import BLOCK, Cache, LayerCache, entry


def _steps(count: int, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 1, 3, generator=generator) for _ in range(count)]


def test_appending_token_by_token_equals_concatenation():
    layer, parts = LayerCache(), _steps(200)
    for place, part in enumerate(parts):
        held = layer.append("k", part)
        assert torch.equal(held, torch.cat(parts[: place + 1], 1))


def test_growing_copies_a_linear_number_of_tokens():
    layer, moves, place = LayerCache(), [], 0
    for count, part in enumerate(_steps(1000)):
        held = layer.append("k", part)
        if held.data_ptr() != place:
            moves.append(count)
            place = held.data_ptr()
    assert sum(moves) < 5 * 1000, f"copied {sum(moves)} tokens to append 1000: {moves}"
    assert layer.nbytes <= (1000 * 1.3 + BLOCK) * 2 * 3 * 4


def test_a_window_keeps_the_last_tokens_and_no_more_memory():
    layer, parts = LayerCache(), _steps(500)
    for place, part in enumerate(parts):
        held = layer.append("k", part, last=20)
        assert torch.equal(held, torch.cat(parts[max(place - 20, 0) : place + 1], 1))
        assert layer["k"].shape[1] == min(place + 1, 20)
        assert layer.nbytes <= (21 + BLOCK) * 2 * 3 * 4
    long = torch.randn(2, 500, 3)
    held = layer.append("k", long, last=20)
    assert torch.equal(held, torch.cat([*parts[-20:], long], 1))
    assert torch.equal(layer["k"], long[:, -20:])
    assert layer.nbytes <= (21 + BLOCK) * 2 * 3 * 4


def test_gradients_flow_through_what_was_appended_before():
    layer = LayerCache()
    first, second = (torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True) for n in (2, 1))
    early = layer.append("k", first).square().sum()
    late = layer.append("k", second).square().sum()
    (early + late).backward()
    torch.testing.assert_close(first.grad, 4 * first.detach())
    torch.testing.assert_close(second.grad, 2 * second.detach())


@pytest.mark.parametrize("which", ["earlier", "new", "saved"])
def test_what_a_backward_needs_is_never_written_again(which: str):
    """By whichever of the two gradients flow, or by neither, where something else saved what came back."""
    layer = LayerCache()
    first, second = (torch.ones(1, 2, 1, requires_grad=which == name) for name in ("earlier", "new"))
    layer.append("k", first)
    held = layer.append("k", second, saved=which == "saved")
    weight = torch.ones(1, requires_grad=True)
    found = (held * weight).square().sum()
    layer.append("k", torch.ones(1, 1, 1))
    found.backward()
    assert weight.grad.item() == 8


def test_what_inference_mode_made_is_copied_once_outside_and_goes_on():
    layer, (first, second, third, *_) = LayerCache(), _steps(9)
    with torch.inference_mode():
        layer.append("k", first)
        layer["state"] = torch.zeros(2)
        assert layer["state"] is layer["state"]
    with torch.no_grad():
        layer.append("k", second)
        layer["state"] += 1
        place = layer["k"].data_ptr()
        held = layer.append("k", third)
    assert torch.equal(held, torch.cat([first, second, third], 1)) and held.data_ptr() == place
    assert layer["state"].tolist() == [1, 1]


def test_a_buffer_keeps_its_dtype_as_it_grows():
    layer = LayerCache()
    layer.append("k", torch.full((1, 1, 1), 1 + 2**-20))
    held = layer.append("k", torch.zeros(1, 2 * BLOCK, 1, dtype=torch.bfloat16))
    assert held.dtype == torch.float32 and held[0, 0, 0].item() == 1 + 2**-20


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_fork_does_not_feel_the_other(copied):
    cache = Cache()
    cache.layer(0).append("k", torch.zeros(1, 2, 1))
    cache.layer(0).seen = 2
    fork = copied(cache)
    assert fork.seen == 2
    fork.layer(0).append("k", torch.ones(1, 1, 1))
    held = cache.layer(0).append("k", torch.full((1, 1, 1), 7.0))
    assert held.flatten().tolist() == [0, 0, 7]


def test_a_draft_that_is_not_taken_changes_nothing_whether_it_grows_or_not():
    for count in (1, 3 * BLOCK):
        layer = LayerCache()
        layer.append("k", torch.tensor([[[1.0], [2.0]]]))
        draft = layer.draft("Layer", 1, None, 0)
        draft.append("k", torch.full((1, count, 1), 7.0))
        draft.append("v", torch.full((1, count, 1), 7.0))
        assert list(layer) == ["k"] and layer["k"].flatten().tolist() == [1, 2]
        # Where the draft needed a larger buffer, there is no second one.
        assert layer["k"].data_ptr() == draft["k"].data_ptr()
        held = layer.append("k", torch.tensor([[[3.0]]]))
        assert held.flatten().tolist() == [1, 2, 3]


def test_a_cache_is_its_layers_until_it_is_forked_or_empty():
    layer = LayerCache()
    layer.append("k", torch.zeros(1, 2, 1))
    layer.seen = 2
    for owner in (("One", None, 0), ("Other", None, 0)):  # that nobody is said to have written
        layer.draft(owner[0], 1, *owner[1:])
    layer.take(layer.draft("One", 1, None, 0))
    with pytest.raises(
        ValueError, match=r"Other: layer_index is 0, where cache holds what another layer wrote \(One\)"
    ):
        layer.draft("Other", 1, None, 0)
    with pytest.raises(ValueError, match="One: layer_index is 0"):
        layer.draft("One", 1, None, 1)
    copy.deepcopy(layer).draft("Other", 1, None, 0)
    del layer["k"]
    layer.draft("Other", 1, None, 0)


def test_a_layers_entry_is_an_integer_or_none():
    assert (entry("One", None), entry("One", 0), entry("One", 7)) == (None, 0, 7)
    for wrong in (True, False, -1, 1.0, "1"):
        with pytest.raises(
            ValueError, match=f"One: layer_index is {wrong!r}; expected an integer of at least 0, or None"
        ):
            entry("One", wrong)


def test_names_are_found_listed_and_removed():
    layer = LayerCache()
    assert "k" not in layer and len(layer) == 0 and layer.get("k") is None
    layer.append("k", torch.zeros(1, 2, 1))
    layer["state"] = torch.zeros(1)
    assert "k" in layer and list(layer) == ["k", "state"] and layer["k"].shape == (1, 2, 1)
    del layer["k"]
    assert list(layer) == ["state"] and layer.append("k", torch.ones(1, 1, 1)).flatten().tolist() == [1]
    layer["k"] = torch.full((1, 1, 1), 5.0)
    assert layer.append("k", torch.ones(1, 1, 1)).flatten().tolist() == [5, 1]


def test_reorder_moves_rows_of_every_layer_and_appending_goes_on():
    cache = Cache()
    for index in range(2):
        cache.layer(index).append("k", torch.tensor([[[1.0]], [[2.0]]]))
        cache.layer(index)["state"] = torch.tensor([[10.0], [20.0]])
        cache.layer(index).seen = 1
    cache.reorder(torch.tensor([1, 1]))
    for index in range(2):
        held = cache.layer(index).append("k", torch.tensor([[[3.0]], [[4.0]]]))
        assert held[..., 0].tolist() == [[2, 3], [2, 4]]
        assert cache.layer(index)["state"].flatten().tolist() == [20, 20]


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        (torch.tensor([0, 2]), ValueError, "rows holds 2; expected 0 to 1, of 2 rows"),
        (torch.tensor([-1]), ValueError, "rows holds -1"),
        (torch.tensor([True, False]), ValueError, "rows is torch.bool; expected torch.int32 or torch.int64"),
        (torch.tensor([[0, 1]]), ShapeError, r"rows has shape \[1, 2\]; expected one dimension"),
        ([0, 1], TypeError, r"rows is \[0, 1\]; expected a tensor"),
    ],
)
def test_reorder_names_rows_that_are_none_and_changes_no_layer(rows, error, said):
    cache = Cache()
    cache.layer(0)["state"], cache.layer(1)["state"] = torch.arange(3.0), torch.arange(2.0)
    with pytest.raises(error, match=f"Cache.reorder: {said}"):
        cache.reorder(rows)
    assert cache.layer(0)["state"].tolist() == [0, 1, 2] and cache.layer(1)["state"].tolist() == [0, 1]
    cache.reorder(torch.tensor([], dtype=torch.int32))
    assert cache.layer(0)["state"].shape == cache.layer(1)["state"].shape == (0,)


def test_seen_and_bytes_are_those_of_all_layers():
    cache = Cache()
    assert cache.seen == 0 and cache.nbytes == 0
    cache.layer(3)["state"] = torch.zeros(2, 4)
    cache.layer(3).seen = 9
    assert cache.seen == 9
    assert cache.nbytes == 32
    assert cache.layer(3) is cache.layer(3)


def test_a_layer_s_own_rows_move_and_are_looked_at_before():
    layer = LayerCache()
    layer.reorder(torch.tensor([7]))  # which holds nothing
    layer["state"] = torch.arange(3.0)[:, None]
    layer.append("k", torch.arange(3.0)[:, None, None])
    layer.reorder(torch.tensor([2, 0]))
    assert layer["state"].flatten().tolist() == layer["k"].flatten().tolist() == [2.0, 0.0]
    for wrong in (2, -1):
        with pytest.raises(ValueError, match=f"rows holds {wrong}; expected 0 to 1, of 2 rows"):
            layer.reorder(torch.tensor([0, wrong]))
    assert layer["state"].flatten().tolist() == [2.0, 0.0]


def test_a_draft_is_of_as_many_rows_and_no_tokens_are_nobody_s():
    layer = LayerCache()
    empty = layer.draft("One", 2, None, 0)
    empty.append("k", torch.ones(2, 0, 1))
    layer.take(empty)
    assert len(layer) == 1 and layer.draft("Other", 2, None, 1)["k"].shape == (2, 0, 1)
    with pytest.raises(ShapeError, match="One: cache holds k of 2 rows; expected 3"):
        layer.draft("One", 3, None, 0)


def test_a_call_that_is_trained_leaves_no_graph_in_a_buffer_that_others_hold():
    layer = LayerCache()
    with torch.no_grad():
        layer.append("k", torch.ones(1, 2, 1))
    draft = layer.draft("Layer", 1, None, 0)
    draft.append("k", torch.ones(1, 1, 1, requires_grad=True))
    assert draft["k"].requires_grad and not layer["k"].requires_grad
