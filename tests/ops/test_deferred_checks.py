"""Values that the compiler or vmap hides are checked when a call runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foci.ops.deferred_checks import check_ends, raise_unless, unreadable


def twice(x: Tensor) -> Tensor:
    raise_unless((x < 5).all(), "x must be below 5")
    return x * 2


def test_seen_and_unseen() -> None:
    x = torch.arange(3)
    assert not unreadable(x)
    torch.func.vmap(lambda row: [pytest.fail("seen") for _ in range(not unreadable(x, row))] or row)(x)
    assert torch.equal(twice(x), x * 2)
    with pytest.raises(ValueError, match="x must be below 5"):
        twice(x + 5)


def test_any_row_of_a_vmap() -> None:
    rows = torch.arange(6).view(2, 3)
    with pytest.raises(ValueError, match="x must be below 5"):
        torch.func.vmap(twice)(rows)
    with pytest.raises(ValueError, match="x must be below 5"):
        torch.func.vmap(torch.func.vmap(twice))(rows[None])
    assert torch.equal(torch.func.vmap(twice)(rows.clamp(max=4)), rows.clamp(max=4) * 2)


def test_rows_of_a_vmap_that_are_differentiated() -> None:
    """The flag is wrapped by the gradient's level, and that by vmap's."""

    def slope(x: Tensor, n: Tensor) -> Tensor:
        return torch.func.grad(lambda x: twice(n * torch.ones_like(x, dtype=n.dtype)).sum() + x.sum())(x)

    x, n = torch.randn(2, 3), torch.arange(6).view(2, 3)
    assert torch.equal(torch.func.vmap(slope)(x, n.clamp(max=4)), torch.ones(2, 3))
    with pytest.raises(ValueError, match="x must be below 5"):
        torch.func.vmap(slope)(x, n)


def test_compiled_it_raises_when_it_runs() -> None:
    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.arange(3)), torch.arange(3) * 2)
    with pytest.raises(RuntimeError, match="x must be below 5"):
        compiled(torch.arange(3) + 5)


def test_what_cannot_be_traced_is_left_out() -> None:
    compiled = torch.compile(torch.func.vmap(twice), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.arange(6).view(2, 3)), torch.arange(6).view(2, 3) * 2)
    assert raise_unless(torch.zeros((), dtype=torch.bool, device="meta"), "a GPU is not waited for") is None


def ends(*values: Tensor | None) -> Tensor:
    """check_ends of 5 queries and 7 keys, in something to compute."""
    check_ends(*values, 5, 7)
    return sum((x.sum() for x in values if x is not None), torch.zeros(()))


NAMES = ("q_offsets", "kv_offsets", "kv_lengths", "q_lengths")
STARTS, EACH = "must start at 0, never decrease and end at {} or before", "must each be 0 to the tokens of its row"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q_offsets": [0, 0, 3, 3, 5, 5]}, None),  # documents of nothing: first, between, last
        ({"kv_offsets": [0, 0, 4, 4, 7, 7]}, None),
        ({"q_offsets": [0]}, None),
        ({"q_offsets": [0, 2, 4], "kv_offsets": [0, 3, 6]}, None),  # tokens of no document behind them
        ({"kv_lengths": [0, 7], "q_lengths": [0, 5]}, None),
        ({"q_offsets": [0, 2, 2, 5], "q_lengths": [2, 0, 3], "kv_lengths": [7, 0, 0]}, None),
        ({"q_offsets": [1, 3, 5]}, f"Packed: q_offsets {STARTS.format(5)}"),
        ({"q_offsets": [0, 3, 2, 5]}, f"Packed: q_offsets {STARTS.format(5)}"),
        ({"q_offsets": [0, 6]}, f"Packed: q_offsets {STARTS.format(5)}"),
        ({"kv_offsets": [-1, 7]}, f"Packed: kv_offsets {STARTS.format(7)}"),
        ({"kv_offsets": [0, 1, 0, 7]}, f"Packed: kv_offsets {STARTS.format(7)}"),
        ({"kv_offsets": [0, 8]}, f"Packed: kv_offsets {STARTS.format(7)}"),
        ({"kv_lengths": [0, -1]}, f"Lengths: kv_lengths {EACH}"),
        ({"kv_lengths": [8, 0]}, f"Lengths: kv_lengths {EACH}"),
        ({"q_lengths": [-1]}, f"Lengths: q_lengths {EACH}"),
        ({"q_lengths": [6]}, f"Lengths: q_lengths {EACH}"),
        ({"q_offsets": [0, 2, 2, 5], "q_lengths": [2, 1, 3]}, f"Lengths: q_lengths {EACH}"),
        ({"kv_offsets": [0, 0, 7], "kv_lengths": [1, 7]}, f"Lengths: kv_lengths {EACH}"),
    ],
    ids=str,
)
def test_where_documents_and_rows_may_end(given: dict[str, list[int]], message: str | None) -> None:
    """Mapped by vmap, whose every row is looked at, and compiled."""
    values = [None if name not in given else torch.tensor(given[name]) for name in NAMES]
    rows = [x if x is None else x[None] for x in values]
    torch.compiler.reset()  # which keeps count of how often it compiled this function
    compiled = torch.compile(ends, fullgraph=True, backend="aot_eager")
    if message is None:
        assert torch.vmap(ends, tuple(x if x is None else 0 for x in rows))(*rows)[0] == compiled(*values)
        return
    with pytest.raises(ValueError, match=f"^{message}$"):
        torch.vmap(ends, tuple(x if x is None else 0 for x in rows))(*rows)
    with pytest.raises(RuntimeError, match=message):
        compiled(*values)
