"""flash-attn's arguments in foci's terms."""

from __future__ import annotations

import pytest
import torch

from foci.compat.flash_attn.arguments import alibi, check_inside, indices, join, longest, mask_of, unpack
from foci.ops.masks import Causal, Window
from tests.compat.dense import band


@pytest.mark.parametrize("T, S", [(4, 4), (2, 5), (5, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (2, 1), (-1, 1), (1, -1), (9, 9)])
def test_windows_and_causality(T: int, S: int, causal: bool, window: tuple[int, int]) -> None:
    mask = mask_of(causal, window)
    wanted = band(T, S, window[0], 0 if causal else window[1])
    assert bool(wanted.all()) if mask is None else torch.equal(mask.materialize(T, S)[0, 0], wanted)


def test_causal_stays_causal_so_that_fused_kernels_take_it() -> None:
    assert mask_of(True, (-1, -1)) == Causal() == mask_of(False, (-1, 0))


def test_join() -> None:
    assert join(None, None) is None and join(Causal(), None) == Causal() == join(None, Causal())
    joined = join(Causal(), Window(1, None))
    assert joined is not None and torch.equal(joined.materialize(4, 4)[0, 0], band(4, 4, 1, 0))


def test_alibi() -> None:
    bias = alibi(torch.tensor([[1.0, 2.0]]), torch.tensor([[3, 4]]), torch.tensor([[0, 1, 5]]))
    assert bias.tolist() == [[[[-3.0, -2.0, -2.0], [-4.0, -3.0, -1.0]], [[-6.0, -4.0, -4.0], [-8.0, -6.0, -2.0]]]]


def test_longest_takes_ints_and_tensors_and_no_sequences_at_all() -> None:
    longest("max_seqlen_q", 3, torch.tensor([0]))
    longest("max_seqlen_q", torch.tensor(3), torch.tensor([0, 3, 5]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_seqlen_q is 2"):
        longest("max_seqlen_q", 2, torch.tensor([0, 3, 5]))
    for wrong in (None, "3", 3.0, True, torch.tensor([3, 3])):
        with pytest.raises(TypeError, match=r"^flash_attn: max_seqlen_q must be an int, got"):
            longest("max_seqlen_q", wrong, torch.tensor([0, 3]))  # type: ignore[arg-type]


def test_unpack_gives_views() -> None:
    qkv = torch.zeros(2, 5, 3, 4, 8)
    parts = unpack("qkv", qkv, 2, 3)
    assert all(part._base is qkv for part in parts) and parts[0].shape == (2, 5, 4, 8)


def test_indices_are_whole_numbers_of_the_shape_that_is_wanted() -> None:
    cpu = torch.device("cpu")
    assert indices("rows", torch.tensor([1, 2]).int(), 2, cpu).dtype == torch.int64
    assert indices("table", torch.zeros(2, 3).int(), 2, cpu, "pages").shape == (2, 3)
    with pytest.raises(ValueError, match=r"flash_attn: table has shape \[2\]; expected \[2, pages\]"):
        indices("table", torch.zeros(2).int(), 2, cpu, "pages")
    with pytest.raises(ValueError, match="flash_attn: rows is int32 on meta; expected int32 or int64 on cpu"):
        indices("rows", torch.zeros(2, device="meta").int(), 2, cpu)


def test_only_entries_that_are_needed_must_be_inside() -> None:
    table = torch.tensor([[0, -1], [5, 2]])
    check_inside("table", table, 3, "a page", torch.tensor([[True, False], [False, True]]))
    with pytest.raises(ValueError, match=r"flash_attn: table\[0, 1\] is -1; expected 0 to 2, a page that there is"):
        check_inside("table", table, 3, "a page")
