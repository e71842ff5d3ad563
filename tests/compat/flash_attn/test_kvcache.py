"""flash_attn_with_kvcache against a dense float64 computation on caches written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.compat.flash_attn import flash_attn_with_kvcache
from foci.core.errors import Unsupported
from tests.compat.dense import attend, band
from tests.compat.flash_attn.test_functions import slope_bias

LENGTHS = [5, 0, 3]


def caches(C: int = 3, S: int = 12, G: int = 2, D: int = 8) -> tuple[Tensor, Tensor]:
    """What is not written is NaN, and must never be read."""
    k, v = (torch.full((C, S, G, D), torch.nan, dtype=torch.float64) for _ in range(2))
    for row, n in enumerate(LENGTHS):
        k[row, :n], v[row, :n] = torch.randn(n, G, D), torch.randn(n, G, D)
    return k, v


def new(T: int, H: int = 4, G: int = 2, D: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(3, T, heads, D, dtype=torch.float64) for heads in (H, G, G))
    return q, k, v


def by_row(
    q: Tensor, keys: list[Tensor], values: list[Tensor], left: int, right: int, slopes: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each row alone, its last query at its last key."""
    T, rows = q.shape[1], []
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        bias = None if slopes is None else slope_bias(slopes, T, k.shape[0])
        rows.append(attend(q[b : b + 1], k[None], v[None], band(T, k.shape[0], left, right), bias, None, softcap))
    return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize(
    ("options", "left", "right"),
    [
        ({}, -1, -1),
        ({"causal": True}, -1, 0),
        ({"causal": True, "window_size": (2, 0)}, 2, 0),
        ({"window_size": (1, 1), "softcap": 3.0}, 1, 1),
        ({"causal": True, "alibi_slopes": torch.tensor([1.0, 0.5, 0.25, 0.0])}, -1, 0),
    ],
)
@pytest.mark.parametrize("append", [False, True])
def test_rows_of_any_length(T: int, options: dict[str, Any], left: int, right: int, append: bool) -> None:
    k_cache, v_cache = caches()
    q, k, v = new(T)
    keys = [torch.cat([k_cache[b, :n], k[b]]) if append else k_cache[b, :n] for b, n in enumerate(LENGTHS)]
    values = [torch.cat([v_cache[b, :n], v[b]]) if append else v_cache[b, :n] for b, n in enumerate(LENGTHS)]
    want, want_lse = by_row(q, keys, values, left, right, options.get("alibi_slopes"), options.get("softcap", 0.0))
    fresh = {"k": k, "v": v} if append else {}
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, **fresh, cache_seqlens=lengths, return_softmax_lse=True, **options
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert lengths.tolist() == LENGTHS
    for b, (row_k, row_v) in enumerate(zip(keys, values, strict=True)):
        n = len(row_k)
        assert torch.equal(k_cache[b, :n], row_k) and torch.equal(v_cache[b, :n], row_v)
        assert k_cache[b, n:].isnan().all() and v_cache[b, n:].isnan().all()


def test_an_int_is_every_row_s_length_and_none_is_the_whole_cache() -> None:
    q, _, _ = new(2)
    k, v = (torch.randn(3, 7, 2, 8, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v), attend(q, k, v)[0])
    some = flash_attn_with_kvcache(q, k, v, cache_seqlens=5, causal=True)
    torch.testing.assert_close(some, attend(q, k[:, :5], v[:, :5], band(2, 5, right=0))[0])


def test_rows_of_a_larger_cache() -> None:
    k_cache, v_cache = caches()
    q, k, v = (x[:2] for x in new(2))
    rows = torch.tensor([2, 0], dtype=torch.int32)
    keys = [torch.cat([k_cache[c, : LENGTHS[c]], k[b]]) for b, c in enumerate((2, 0))]
    values = [torch.cat([v_cache[c, : LENGTHS[c]], v[b]]) for b, c in enumerate((2, 0))]
    lengths = torch.tensor([LENGTHS[2], LENGTHS[0]])
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_batch_idx=rows, causal=True)
    torch.testing.assert_close(out, by_row(q, keys, values, -1, 0)[0])
    assert torch.equal(k_cache[2, 3:5], k[0]) and torch.equal(v_cache[0, 5:7], v[1]) and k_cache[1].isnan().all()


def test_left_padding_is_not_seen() -> None:
    k_cache, v_cache = caches()
    q, k, v = new(2)
    starts = torch.tensor([2, 0, 3], dtype=torch.int32)
    keys = [torch.cat([k_cache[b, s:n], k[b]]) for b, (s, n) in enumerate(zip(starts.tolist(), LENGTHS, strict=True))]
    values = [torch.cat([v_cache[b, s:n], v[b]]) for b, (s, n) in enumerate(zip(starts.tolist(), LENGTHS, strict=True))]
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(LENGTHS), cache_leftpad=starts, causal=True,
        window_size=(3, 0),
    )  # fmt: skip
    torch.testing.assert_close(out, by_row(q, keys, values, 3, 0)[0])


def test_pages_are_written_and_read() -> None:
    k_cache, v_cache = caches()
    table = torch.tensor([[7, 2, 5], [0, 4, 8], [1, 6, 3]], dtype=torch.int32)
    pages = torch.full((2, 9, 4, 2, 8), torch.nan, dtype=torch.float64)
    for kind, cache in enumerate((k_cache, v_cache)):
        for b in range(3):
            for s in range(12):
                pages[kind, table[b, s // 4], s % 4] = cache[b, s]
    q, k, v = new(3)
    lengths = torch.tensor(LENGTHS)
    want = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    out = flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=lengths, block_table=table, causal=True)
    torch.testing.assert_close(out, want)
    for kind, cache in enumerate((k_cache, v_cache)):
        unpaged = pages[kind][table.long()].flatten(1, 2)
        torch.testing.assert_close(unpaged, cache, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (2, 0)}], ids=["all", "window"])
@pytest.mark.parametrize("leftpad", [None, [4, 0, 2], [4, 0, 3]])
def test_what_a_table_holds_for_no_key_may_be_anything(
    append: bool, options: dict[str, Any], leftpad: list[int] | None
) -> None:
    """As of `attention_paged`: behind a row's end, before what its window reaches, before its first key."""
    k_cache, v_cache = caches()
    q, k, v = new(1)
    lengths, starts = torch.tensor([11, 0, 3]), None if leftpad is None else torch.tensor(leftpad)
    k_cache[0, :11], v_cache[0, :11] = torch.randn(2, 11, 2, 8)
    table = torch.arange(1, 10).view(3, 3)
    pages = [torch.cat([x[:1, :4], x.unflatten(1, (3, 4)).flatten(0, 1)]) for x in (k_cache, v_cache)]
    given = {"k": k, "v": v} if append else {}
    rest = {"cache_seqlens": lengths, "cache_leftpad": starts, **given, **options}
    want = flash_attn_with_kvcache(q, k_cache, v_cache, **rest)
    for row, n in enumerate(lengths.tolist()):
        first = max(leftpad[row] if leftpad else 0, min(n + append - 3, n) if options else 0)
        end = n + append if n + append > first else 0
        table[row, : first // 4], table[row, -(-end // 4) :] = -1, 10**6
    assert (table < 0).sum() == (2 if options else 1 if leftpad else 0) and (table > 9).sum() >= 4
    torch.testing.assert_close(flash_attn_with_kvcache(q, *pages, block_table=table, **rest), want)


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize(
    ("place", "number", "message"),
    [
        ((0, 1), -1, r"block_table\[0, 1\] is -1; expected 0 to 8, a page that there is"),
        ((2, 0), 9, r"block_table\[2, 0\] is 9; expected 0 to 8"),
    ],
)
def test_a_page_that_there_is_not_leaves_the_pages_alone(
    append: bool, place: tuple[int, int], number: int, message: str
) -> None:
    q, k, v = new(2)
    pages = torch.randn(2, 9, 4, 2, 8, dtype=torch.float64)
    before, table = pages.clone(), torch.arange(9).view(3, 3)
    rest = {"cache_seqlens": torch.tensor(LENGTHS), **({"k": k, "v": v} if append else {})}
    with pytest.raises(ValueError, match="block_table is float64 on cpu; expected int32 or int64"):
        flash_attn_with_kvcache(q, *pages, block_table=table.double(), **rest)
    with pytest.raises(ValueError, match=r"block_table has shape \[9\]; expected \[3, pages\]"):
        flash_attn_with_kvcache(q, *pages, block_table=table.flatten(), **rest)
    table[place] = number
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(q, *pages, block_table=table, **rest)
    assert torch.equal(pages, before)


@pytest.mark.parametrize(
    ("shared", "lengths", "message"),
    [
        ([(0, 1), (2, 0)], [5, 0, 3], r"block_table\[0, 1\] and block_table\[2, 0\] are both 1; .* own for row 0"),
        ([(1, 0), (0, 0)], [5, 0, 3], r"block_table\[1, 0\] and block_table\[0, 0\] are both 3; .* own for row 1"),
        ([(2, 1), (2, 0)], [5, 0, 3], r"block_table\[2, 0\] and block_table\[2, 1\] are both 7; .* own for row 2"),
        ([(0, 0), (1, 0)], [5, 5, 5], None),  # a prefix of whole pages
        ([(0, 2), (1, 1)], [5, 0, 3], None),  # behind what is read and written
    ],
)
def test_a_page_that_is_written_is_one_row_s_alone(
    shared: list[tuple[int, int]], lengths: list[int], message: str | None
) -> None:
    """Another row would lose its own key there, or read this one's; where nothing is written, rows may share."""
    q, k, v = new(2)
    pages = torch.randn(2, 9, 4, 2, 8, dtype=torch.float64)
    before, table, held = pages.clone(), torch.arange(9).view(3, 3), torch.tensor(lengths)
    table[shared[1]] = table[shared[0]]
    flash_attn_with_kvcache(q, *pages, cache_seqlens=held, block_table=table)
    flash_attn_with_kvcache(q, *pages, k[:, :0], v[:, :0], cache_seqlens=held, block_table=table)
    if message is None:
        flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=held, block_table=table)
        return
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=held, block_table=table)
    assert torch.equal(pages, before)


def test_rows_that_are_not_written_may_be_one() -> None:
    k_cache, v_cache = caches()
    q, k, v = new(2)
    own = flash_attn_with_kvcache(q, k_cache[[0, 2, 0]], v_cache[[0, 2, 0]], cache_seqlens=torch.tensor([5, 3, 4]))
    rest = {"cache_seqlens": torch.tensor([5, 3, 4]), "cache_batch_idx": torch.tensor([0, 2, 0])}
    torch.testing.assert_close(flash_attn_with_kvcache(q, k_cache, v_cache, **rest), own)
    torch.testing.assert_close(flash_attn_with_kvcache(q, k_cache, v_cache, k[:, :0], v[:, :0], **rest), own)


def test_no_rows_at_all() -> None:
    k_cache, v_cache = caches()
    q, k, v = (x[:0] for x in new(2))
    held = torch.zeros(0, dtype=torch.int32)
    assert flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=held).shape == (0, 2, 4, 8)


def turned(x: Tensor, angle: Tensor, pairs: bool) -> Tensor:
    """One head vector [D] turned in the planes of its first 2n numbers, by loops."""
    n, y = angle.shape[0], x.clone()
    for i in range(n):
        a, b = (2 * i, 2 * i + 1) if pairs else (i, i + n)
        y[a] = x[a] * torch.cos(angle[i]) - x[b] * torch.sin(angle[i])
        y[b] = x[a] * torch.sin(angle[i]) + x[b] * torch.cos(angle[i])
    return y


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (4, 2)}], ids=lambda options: "-".join(options)
)
def test_rotary_positions(pairs: bool, options: dict[str, Any]) -> None:
    k_cache, v_cache = caches()
    q, k, v = new(3)
    angles = torch.rand(12, 3, dtype=torch.float64)  # 6 of the 8 numbers turn
    my_q, my_k = torch.empty_like(q), torch.empty_like(k)
    for b, n in enumerate(LENGTHS):
        for t in range(3):
            for h in range(4):
                my_q[b, t, h] = turned(q[b, t, h], angles[n + t if options else n], pairs)
            for g in range(2):
                my_k[b, t, g] = turned(k[b, t, g], angles[n + t], pairs)
    lengths = torch.tensor(LENGTHS)
    caches_for_it = k_cache.clone(), v_cache.clone()
    want = flash_attn_with_kvcache(my_q, *caches_for_it, my_k, v, cache_seqlens=lengths, **options)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), lengths, rotary_interleaved=pairs, **options
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(k_cache, caches_for_it[0], equal_nan=True)


def test_half_precision_is_rounded_once() -> None:
    k_cache, v_cache = (x.bfloat16() for x in caches())
    q, k, v = (x.bfloat16() for x in new(1))
    angles = torch.rand(12, 4)
    flash_attn_with_kvcache(q, k_cache, v_cache, k, v, angles.cos(), angles.sin(), torch.tensor(LENGTHS))
    want = turned(k[0, 0, 0].double(), angles[5].double(), True).bfloat16()
    assert torch.equal(k_cache[0, 5, 0], want)


def test_decoding_equals_attending_at_once() -> None:
    k_cache, v_cache = (torch.full((3, 9, 2, 8), torch.nan, dtype=torch.float64) for _ in range(2))
    q, k, v = new(9)
    held = torch.zeros(3, dtype=torch.int32)
    steps = []
    for t in range(9):
        token = slice(t, t + 1)
        steps.append(
            flash_attn_with_kvcache(
                q[:, token], k_cache, v_cache, k[:, token], v[:, token], cache_seqlens=held, causal=True
            )
        )
        held += 1
    torch.testing.assert_close(torch.cat(steps, 1), attend(q, k, v, band(9, 9, right=0))[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache_seqlens": 13}, ValueError, "cache_seqlens"),
        ({"cache_seqlens": 11}, ValueError, "need 13 places; there are 12"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens is None"),
        ({"cache_seqlens": torch.tensor([1, 2])}, ValueError, r"cache_seqlens has shape \[2\]"),
        ({"v": None}, ValueError, "v is None"),
        ({"num_splits": 4}, Unsupported, "num_splits is 4"),
        ({"cache_leftpad": torch.tensor([6, 0, 0])}, ValueError, "cache_leftpad"),
        ({"rotary_cos": torch.ones(12, 4)}, ValueError, "rotary"),
        ({"rotary_cos": torch.ones(6, 4), "rotary_sin": torch.ones(6, 4)}, ValueError, "position 6 is needed"),
        ({"rotary_cos": torch.ones(9, 5), "rotary_sin": torch.ones(9, 5)}, ValueError, "at most 4"),
        ({"alibi_slopes": torch.ones(2)}, ValueError, "alibi_slopes"),
        ({"cache_batch_idx": torch.tensor([0])}, ValueError, r"cache_batch_idx has shape \[1\]; expected \[3\]"),
        ({"cache_batch_idx": torch.tensor([[0], [1], [2]])}, ValueError, r"cache_batch_idx has shape \[3, 1\]"),
        (
            {"cache_batch_idx": torch.tensor([0, 1, 3])},
            ValueError,
            r"cache_batch_idx\[2\] is 3; expected 0 to 2, a row",
        ),
        ({"cache_batch_idx": torch.tensor([-1, 1, 2])}, ValueError, r"cache_batch_idx\[0\] is -1; expected 0 to 2"),
        (
            {"cache_batch_idx": torch.tensor([2, 1, 2])},
            ValueError,
            r"cache_batch_idx\[0\] and cache_batch_idx\[2\] are both 2; expected a row of its own for row 0",
        ),
        ({"cache_batch_idx": torch.ones(3)}, ValueError, "cache_batch_idx is float32 on cpu; expected int32 or int64"),
        ({"cache_batch_idx": [0, 1, 2]}, TypeError, "cache_batch_idx must be a tensor"),
        ({"cache_seqlens": torch.tensor([5.5, 0.0, 3.0])}, ValueError, "cache_seqlens is float32 on cpu"),
        ({"cache_seqlens": torch.tensor([True, False, True])}, ValueError, "cache_seqlens is bool on cpu"),
        ({"cache_seqlens": 5.0}, TypeError, "cache_seqlens must be an int, or an int32 or int64 tensor .*, got 5.0"),
        ({"cache_seqlens": True}, TypeError, "cache_seqlens must be an int, .* got True"),
        (
            {"cache_seqlens": torch.zeros(3, device="meta").int()},
            ValueError,
            "cache_seqlens is int32 on meta; expected",
        ),
        ({"cache_leftpad": torch.tensor([0.5, 0, 0])}, ValueError, "cache_leftpad is float32 on cpu"),
        ({"window_size": 3}, ValueError, r"window_size must be \(left, right\), .* got 3"),
        ({"v": torch.zeros(3, 2, 2, 8, device="meta").double()}, ValueError, "v is torch.float64 on meta; expected"),
        ({"k": torch.zeros(3, 2, 3, 8).double()}, ValueError, "k is"),
        ({"k": None}, ValueError, "k is None"),
        ({"softmax_scale": float("inf")}, ValueError, "flash_attn: softmax_scale must be a finite number"),
        ({"softcap": "30"}, TypeError, "flash_attn: softcap must be a number, got '30'"),
    ],
)
def test_a_refused_call_leaves_the_cache_alone(change: dict[str, Any], error: type[Exception], message: str) -> None:
    k_cache, v_cache = caches()
    before = k_cache.clone(), v_cache.clone()
    q, k, v = new(2)
    arguments = {"k": k, "v": v, "cache_seqlens": torch.tensor(LENGTHS), **change}
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    torch.testing.assert_close((k_cache, v_cache), before, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["causal", "rotary_interleaved", "return_softmax_lse"])
def test_a_word_is_no_flag(name: str) -> None:
    given: dict[str, Any] = {name: "False"}
    with pytest.raises(TypeError, match=f"^flash_attn: {name} must be True or False, got 'False'"):
        flash_attn_with_kvcache(new(1)[0], *caches(), cache_seqlens=torch.tensor(LENGTHS), **given)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_rows_that_share_memory_are_read_but_not_written(name: str) -> None:
    """Of a prefix that all rows have, expanded: each row's new key would be every row's."""
    given = dict(zip(("k_cache", "v_cache"), caches(), strict=True))
    given[name] = given[name][:1].expand(3, -1, -1, -1)
    before, (q, k, v) = given[name].clone(), new(1)
    with pytest.raises(ValueError, match=rf"{name} has strides \[0, .*several of its numbers are one in memory"):
        flash_attn_with_kvcache(q, **given, k=k, v=v, cache_seqlens=torch.tensor([3, 0, 3]))
    torch.testing.assert_close(given[name], before, equal_nan=True, rtol=0, atol=0)
    out = flash_attn_with_kvcache(q, **given, cache_seqlens=torch.tensor([3, 0, 3]))
    own = flash_attn_with_kvcache(q, **given | {name: before}, cache_seqlens=torch.tensor([3, 0, 3]))
    assert isinstance(out, Tensor) and isinstance(own, Tensor) and out.equal(own)


def test_gradients_are_refused_not_lost() -> None:
    k_cache, v_cache = caches()
    q, k, v = new(1)
    q.requires_grad_()
    with pytest.raises(Unsupported, match="no backward"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(LENGTHS))
    with torch.no_grad():
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(LENGTHS))


def test_a_cache_of_no_pages_is_read_where_no_key_is_held() -> None:
    q, cache = torch.randn(1, 1, 2, 8), torch.zeros(0, 4, 2, 8)
    none = {"cache_seqlens": torch.tensor([0]), "block_table": torch.tensor([[0]])}
    assert not flash_attn_with_kvcache(q, cache, cache, **none).any()
    empty = torch.zeros(1, 0, 2, 8)
    assert not flash_attn_with_kvcache(q, cache, cache, empty, empty, **none).any()
