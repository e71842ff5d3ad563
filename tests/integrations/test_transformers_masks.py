"""The mask function: structure for transformers' own functions, their own evaluation for others, never wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils as theirs

from foci.core.errors import Unsupported
from foci.integrations.transformers import attend
from foci.integrations.transformers_masks import ModelMask, make_boolean_mask, make_mask
from foci.ops.masks import All, Causal, Dense, Lengths, Mask, Window

CAUSAL, BOTH = theirs.causal_mask_function, theirs.bidirectional_mask_function
WINDOW = theirs.sliding_window_causal_mask_function(4)
NOTHING = theirs.sliding_window_causal_mask_function(0)
CHUNKS = theirs.chunked_causal_mask_function(4, torch.tensor([0, 2]))
PLACES = [(9, 9, 0, 0), (1, 9, 8, 0), (3, 9, 6, 0), (3, 9, 2, 0), (5, 12, 0, 0), (4, 7, 10, 7), (1, 5, 20, 16)]


def kinds(mask: Mask | None) -> set[type]:
    return set() if mask is None else {type(part) for part in getattr(mask, "parts", (mask,))}


def padded(kv_length: int, kv_offset: int) -> dict[str, Tensor | None]:
    real = torch.ones(2, kv_offset + kv_length, dtype=torch.bool)
    right, left, short = real.clone(), real.clone(), real[:, : kv_offset + kv_length - 1].clone()
    right[1, -2:], left[1, : kv_offset + 1] = False, False
    return {"none": None, "all real": real, "right": right, "left": left, "shorter than the cache": short}


@pytest.mark.parametrize("padding", padded(9, 0))
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(
    "function", [CAUSAL, BOTH, WINDOW, NOTHING, CHUNKS], ids=["causal", "both", "window", "nothing", "chunks"]
)
@pytest.mark.parametrize("counted_in", [int, torch.tensor])
def test_a_mask_shows_what_transformers_own_mask_shows(
    function: Callable, place: tuple[int, ...], padding: str, counted_in: Callable
) -> None:
    T, S, q_offset, kv_offset = place
    real = padded(S, kv_offset)[padding]
    given = (2, T, S, counted_in(q_offset), kv_offset, function, real)
    expected = theirs.sdpa_mask(*given[:5], mask_function=function, attention_mask=real, allow_is_causal_skip=False)
    made = make_mask(*given, allow_is_causal_skip=True, allow_is_bidirectional_skip=True, device="cpu")
    assert made.shape == expected.shape
    assert made.ndim == 4
    assert made.contiguous() is made
    seen = torch.ones(T, S, dtype=torch.bool) if made.mask is None else made.mask.materialize(T, S)
    # A cache's unwritten slots are hidden by length; transformers hides them by causality.
    assert torch.equal(seen.expand(2, 1, T, S), expected)
    added = theirs.eager_mask(*given[:5], mask_function=function, attention_mask=real)
    assert torch.equal(made.tensor, added)
    if function is not CHUNKS and kv_offset == 0 and 0 <= q_offset <= S - T:
        assert all(part.allowed.shape[2] == 1 for part in getattr(made.mask, "parts", ()) if isinstance(part, Dense))


def test_the_usual_masks_stay_structure() -> None:
    assert make_mask(2, 9, 9, mask_function=CAUSAL).mask == Causal()
    assert make_mask(2, 9, 9, mask_function=BOTH).mask is None
    assert make_mask(2, 1, 9, 8, mask_function=CAUSAL).mask is None
    assert make_mask(2, 4, 4, mask_function=WINDOW).mask == Causal()
    assert kinds(make_mask(2, 5, 5, mask_function=WINDOW).mask) == {Causal, Window}
    assert kinds(make_mask(2, 1, 9, torch.tensor(2), mask_function=CAUSAL, device="cpu").mask) == {Lengths}
    assert kinds(make_mask(2, 3, 9, 2, mask_function=CAUSAL, device="cpu").mask) == {Causal, Lengths}
    assert kinds(make_mask(2, 3, 9, torch.tensor(2), mask_function=CAUSAL, device="cpu").mask) == {Causal, Lengths}
    assert kinds(make_mask(2, 9, 9, mask_function=CHUNKS, device="cpu").mask) == {Dense}


def test_a_prepared_mask_goes_through() -> None:
    prepared = make_mask(2, 9, 9, mask_function=CAUSAL)
    assert make_mask(2, 9, 9, attention_mask=prepared) is prepared
    assert isinstance(prepared, ModelMask)


def test_a_function_of_the_users_own_is_evaluated() -> None:
    def own(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key + query + row) % 2 == 0

    mask = make_mask(2, 4, 6, mask_function=theirs.and_masks(own, CAUSAL), use_vmap=True, device="cpu").mask
    row, query, key = torch.meshgrid(torch.arange(2), torch.arange(4), torch.arange(6), indexing="ij")
    assert torch.equal(mask.allowed[:, 0], ((key + query + row) % 2 == 0) & (key <= query))


def test_to_who_computes_with_it_a_mask_is_eagers_tensor() -> None:
    real = torch.ones(2, 5, dtype=torch.bool)
    real[1, 3:] = False
    given = {"mask_function": CAUSAL, "attention_mask": real, "dtype": torch.float64}
    made, eager = make_mask(2, 5, 5, **given, device="cpu"), theirs.eager_mask(2, 5, 5, **given)
    bias = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    assert (made.dtype, made.device, made.size(-1), made.dim()) == (torch.float64, "cpu", 5, 4)
    assert torch.equal(bias + made, bias + eager)
    assert torch.equal(made + bias, eager + bias)
    assert torch.equal(made + made, eager + eager)
    assert torch.equal(made[:, :, :, :3] != 0, eager[:, :, :, :3] != 0)
    assert torch.equal(torch.cat([made, made], dim=-1), torch.cat([eager, eager], dim=-1))
    assert torch.equal(bias.masked_fill(made < 0, 1.0), bias.masked_fill(eager < 0, 1.0))
    assert torch.equal(torch.nn.functional.pad(made, (0, 2)), torch.nn.functional.pad(eager, (0, 2)))
    assert copy.deepcopy(made).mask.materialize(5, 5).equal(made.mask.materialize(5, 5))
    with pytest.raises(AttributeError, match="no attribute 'dtyp'"):
        _ = made.dtyp


def test_to_who_had_booleans_it_is_sdpas_tensor_but_for_what_is_added() -> None:
    real = torch.ones(2, 5, dtype=torch.bool)
    real[1, 3:] = False
    given = {"mask_function": CAUSAL, "attention_mask": real}
    made, sdpa = make_boolean_mask(2, 5, 5, **given, device="cpu"), theirs.sdpa_mask(2, 5, 5, **given)
    assert made.dtype == torch.bool
    assert torch.equal(made.tensor, sdpa)
    assert torch.equal(made.logical_not(), ~sdpa)
    assert torch.equal(torch.all(~made, dim=-1), torch.all(~sdpa, dim=-1))
    bias = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    added = bias + theirs.eager_mask(2, 5, 5, **given, dtype=torch.float64)
    for sum_ in (bias + made, made + bias, torch.add(bias, made), bias.add(made), bias.clone().add_(made)):
        assert torch.equal(sum_, added)
    assert torch.equal(bias * made, bias * sdpa)


def test_a_change_in_place_is_refused_as_the_attention_would_not_see_it() -> None:
    made, hidden = make_mask(2, 5, 5, mask_function=CAUSAL), torch.ones(2, 1, 5, 5, dtype=torch.bool)
    reason = r"masked_fill_ cannot change a mask that foci made:\n.*the attention would not see the change"
    with pytest.raises(Unsupported, match=reason):
        made.masked_fill_(hidden, -1.0)
    with pytest.raises(Unsupported, match="relu_ cannot change a mask"):
        torch.relu_(made)
    bias = torch.randn(2, 1, 5, 5)
    assert torch.equal(bias.clone().add_(made), bias + made.tensor)  # that changes the bias
    q, kept = torch.randn(2, 1, 5, 8), made
    made += 1.0
    assert torch.equal(made, kept.tensor + 1.0)
    attend(nn.Module(), q, q, q, kept)
    kept[:, :, :, :3].masked_fill_(hidden[..., :3], -1.0)
    with pytest.raises(Unsupported, match="an in-place operation on a view cannot change"):
        attend(nn.Module(), q, q, q, kept)


def test_its_tensor_is_made_once_and_not_kept_where_it_is_fake() -> None:
    made = make_mask(2, 5, 5, mask_function=WINDOW)
    with FakeTensorMode():
        assert made.tensor.shape == (2, 1, 5, 5)
    assert type(made.tensor) is Tensor
    assert made.tensor is made.tensor
    assert torch.equal(torch.compile(lambda mask: mask * 1, backend="eager", fullgraph=True)(made), made.tensor)


def test_moved_to_a_device_it_is_still_structure() -> None:
    """accelerate's send_to_device moves whatever has `to`."""
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, -2:] = False
    made = make_mask(2, 3, 9, 2, mask_function=WINDOW, attention_mask=real, device="cpu")
    assert made.to("cpu") is made.to(torch.ones(1)) is made.to(made) is made.to(dtype=torch.float32) is made
    moved = made.to("meta", non_blocking=True)
    assert moved.device.type == "meta"
    assert kinds(moved.mask) == kinds(made.mask) == {Causal, Window, Lengths, Dense}
    tensors = [given for part in moved.mask.parts for given in vars(part).values() if isinstance(given, Tensor)]
    assert isinstance(moved.mask, All)
    assert [given.device.type for given in tensors] == ["meta"] * len(tensors)
    assert len(tensors) == 2
    assert make_mask(2, 9, 9, mask_function=BOTH).to("meta").mask is None
    assert torch.equal(made.to(torch.float64), made.tensor.to(torch.float64))
