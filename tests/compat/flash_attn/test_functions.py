"""flash-attn's functions against dense float64 attention: alignment, windows, softcap, ALiBi, lse, dropout, packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.compat import flash_attn
from foci.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from tests.compat.dense import attend, band, parameters, same_gradients

_REST = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
# flash-attn 2.8.3
RECORDED = {
    "flash_attn_func": f"(q, k, v, {_REST})",
    "flash_attn_kvpacked_func": f"(q, kv, {_REST})",
    "flash_attn_qkvpacked_func": f"(qkv, {_REST})",
    "flash_attn_varlen_func": f"(q, k, v, {_VARLEN}, {_REST}, block_table=None)",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {_VARLEN}, {_REST})",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {_REST})",
    "flash_attn_with_kvcache": "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False)",
}


@pytest.mark.parametrize("name", flash_attn.__all__)
def test_signatures_are_the_peer_s(name: str) -> None:
    assert parameters(getattr(flash_attn, name)) == RECORDED[name]


def problem(T: int, S: int, B: int = 2, H: int = 4, G: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((B, T, H, 8), (B, S, G, 8), (B, S, G, 8))
    return tuple(torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes)  # type: ignore[return-value]


def slope_bias(slopes: Tensor, T: int, S: int) -> Tensor:
    """-slope |i + S - T - j|, by loops; slopes [H] or [B, H] -> [1 or B, H, T, S]."""
    bias = torch.zeros(*slopes.view(-1, slopes.shape[-1]).shape, T, S, dtype=torch.float64)
    for i in range(T):
        for j in range(S):
            bias[..., i, j] = -slopes.double() * abs(i + S - T - j)
    return bias


@pytest.mark.parametrize("T, S", [(7, 7), (3, 9), (9, 4), (1, 6)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (2, 1)},
        {"window_size": (-1, 2)},
        {"window_size": (3, 0)},
        {"causal": True, "window_size": (2, 5)},
        {"softcap": 2.0, "softmax_scale": 0.7},
        {"causal": True, "softcap": 2.0, "alibi_slopes": torch.tensor([[0.9, 0.1, 0.4, 0.7], [0.2, 0.6, 0.0, 0.3]])},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.0, 1.0])},
        {"causal": True, "deterministic": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_forward_lse_and_gradients(T: int, S: int, options: dict[str, Any]) -> None:
    q, k, v = problem(T, S)
    left, right = options.get("window_size", (-1, -1))
    allowed = band(T, S, left, 0 if options.get("causal") else right)
    bias = slope_bias(options["alibi_slopes"], T, S) if "alibi_slopes" in options else None
    out, lse = attend(q, k, v, allowed, bias, options.get("softmax_scale"), options.get("softcap", 0.0))
    mine = flash_attn_func(q, k, v, **options)
    assert isinstance(mine, Tensor)
    torch.testing.assert_close(mine, out)
    same_gradients(mine, out, (q, k, v))
    again, my_lse, dropped = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(my_lse, lse)
    assert my_lse.shape == (2, 4, T) and dropped.shape == (0,)
    if torch.isfinite(lse).all():
        same_gradients(my_lse, lse, (q, k))


def test_half_precision_keeps_its_dtype_and_an_exact_lse() -> None:
    q, k, v = (x.detach().bfloat16() for x in problem(33, 40))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    want, want_lse = attend(q, k, v, band(33, 40, right=0))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (lse - want_lse).abs().max() <= 2e-4
    assert (out.double() - want).square().mean().sqrt() <= 5e-3 * want.square().mean().sqrt()


def test_packed_tensors() -> None:
    qkv = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv.unbind(2)
    want, _ = attend(q, k, v, band(6, 6, 2, 0))
    mine = flash_attn_qkvpacked_func(qkv, causal=True, window_size=(2, 0))
    torch.testing.assert_close(mine, want)
    same_gradients(mine, want, (qkv,))
    torch.testing.assert_close(flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True, window_size=(2, 0)), want)


def test_every_argument_of_the_packed_forms_arrives() -> None:
    qkv = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64)
    options: dict[str, Any] = {
        "softmax_scale": 0.3, "causal": True, "window_size": (3, 0), "softcap": 1.5, "alibi_slopes": torch.rand(4),
        "deterministic": True, "return_attn_probs": True,
    }  # fmt: skip
    want = flash_attn_func(*qkv.unbind(2), 0.0, *options.values())
    offsets = torch.tensor([0, 6, 12])
    flat = qkv.flatten(0, 1)
    forms = [
        flash_attn_qkvpacked_func(qkv, 0.0, *options.values()),
        flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], 0.0, *options.values()),
    ]
    for form in forms:
        for got, value in zip(form, want, strict=True):
            torch.testing.assert_close(got, value)
    documents = [
        flash_attn_varlen_qkvpacked_func(flat, offsets, 6, 0.0, *options.values()),
        flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], offsets, offsets, 6, 6, 0.0, *options.values()),
    ]
    for out, lse, _ in documents:
        torch.testing.assert_close(out.unflatten(0, (2, 6)), want[0])
        torch.testing.assert_close(lse.unflatten(1, (2, 6)).transpose(0, 1), want[1])


SEQUENCES = [(3, 5), (0, 2), (4, 4), (5, 2), (2, 0)]


def packed(sequences: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    T, S = (sum(sizes) for sizes in zip(*sequences, strict=True))
    q, k, v = problem(T, S, B=1)
    offsets = [
        torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32) for sizes in zip(*sequences, strict=True)
    ]
    return q, k, v, *offsets


def test_tokens_of_no_sequence_are_0() -> None:
    q, none = torch.randn(6, 2, 4), torch.tensor([0])
    for slopes in (None, torch.rand(2)):
        assert not flash_attn_varlen_func(q, q, q, none, none, 3, 3, alibi_slopes=slopes).any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (1, 1)])
@pytest.mark.parametrize("alibi", [None, 1, 2], ids=["plain", "slopes", "slopes-by-sequence"])
def test_sequences_end_to_end_are_sequences_alone(causal: bool, window: tuple[int, int], alibi: int | None) -> None:
    q, k, v, q_offsets, k_offsets = packed(SEQUENCES)
    slopes = None if alibi is None else torch.rand(4) if alibi == 1 else torch.rand(len(SEQUENCES), 4)
    out, lse, _ = flash_attn_varlen_func(
        q[0], k[0], v[0], q_offsets, k_offsets, 5, 5, causal=causal, window_size=window, alibi_slopes=slopes,
        return_attn_probs=True,
    )  # fmt: skip
    assert out.shape == (14, 4, 8) and lse.shape == (4, 14)
    wanted, wanted_lse = [], []
    for n, (T, S) in enumerate(SEQUENCES):
        rows, columns = slice(q_offsets[n], q_offsets[n + 1]), slice(k_offsets[n], k_offsets[n + 1])
        bias = None if slopes is None else slope_bias(slopes if alibi == 1 else slopes[n], T, S)
        part = attend(q[:, rows], k[:, columns], v[:, columns], band(T, S, window[0], 0 if causal else window[1]), bias)
        wanted.append(part[0][0])
        wanted_lse.append(part[1][0])
    torch.testing.assert_close(out, torch.cat(wanted))
    torch.testing.assert_close(lse, torch.cat(wanted_lse, -1))
    same_gradients(out, torch.cat(wanted), (q, k, v))


def test_pages_are_gathered() -> None:
    q, k, v, q_offsets, k_offsets = packed([(3, 5), (4, 4)])
    table = torch.tensor([[4, 0], [2, 1]], dtype=torch.int32)
    pages = torch.full((2, 5, 3, 2, 8), torch.nan, dtype=torch.float64)  # 5 pages of 3 places
    for n, size in enumerate((5, 4)):
        for s in range(size):
            for kind, x in enumerate((k, v)):
                pages[kind, table[n, s // 3], s % 3] = x[0, int(k_offsets[n]) + s].detach()
    plain = flash_attn_varlen_func(q[0], k[0], v[0], q_offsets, k_offsets, 4, 5, causal=True)
    paged = flash_attn_varlen_func(q[0], pages[0], pages[1], q_offsets, k_offsets, 4, 5, causal=True, block_table=table)
    torch.testing.assert_close(paged, plain)
    with pytest.raises(ValueError, match=r"block_table names 1 pages.*needs 2"):
        flash_attn_varlen_func(q[0], pages[0], pages[1], q_offsets, k_offsets, 4, 5, block_table=table[:, :1])
    spare = torch.cat([table, torch.tensor([[-1], [10**6]]).int()], 1)  # behind the sequences
    padded = flash_attn_varlen_func(q[0], *pages, q_offsets, k_offsets, 4, 5, causal=True, block_table=spare)
    torch.testing.assert_close(padded, plain)
    for wrong, message in (
        (table.double(), "block_table is float64 on cpu; expected int32 or int64"),
        (table[:1], r"block_table has shape \[1, 2\]; expected \[2, pages\]"),
        (table - 1, r"block_table\[0, 1\] is -1; expected 0 to 4, a page that there is"),
        (table + 1, r"block_table\[0, 0\] is 5; expected 0 to 4, a page that there is"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_varlen_func(q[0], *pages, q_offsets, k_offsets, 4, 5, block_table=wrong)


def test_dropped_probabilities_are_those_of_the_output() -> None:
    q, k, v = problem(6, 9)
    out, lse, dropped = flash_attn_func(q, k, v, dropout_p=0.4, causal=True, return_attn_probs=True)
    whole, want_lse = attend(q, k, torch.eye(9).expand(2, 9, 9)[:, :, None].expand(2, 9, 2, 9), band(6, 9, right=0))
    torch.testing.assert_close(dropped.abs(), whole.transpose(1, 2))
    torch.testing.assert_close(lse, want_lse)
    assert 0.2 < (dropped < 0).sum() / (dropped != 0).sum() < 0.6
    kept = whole * (dropped.transpose(1, 2) > 0) / 0.6
    want = torch.einsum("bths,bshv->bthv", kept, v.repeat_interleave(2, dim=2))
    torch.testing.assert_close(out, want)
    same_gradients(out, want, (q, k, v))
    packed_out, _, cut = flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), torch.tensor([0, 6, 12]), torch.tensor([0, 9, 18]), 7, 9,
        dropout_p=0.4, return_attn_probs=True,
    )  # fmt: skip
    assert cut.shape == (2, 4, 7, 9) and not cut[:, :, 6].any()
    kept = cut[:, :, :6].clamp(min=0) / 0.6
    want = torch.einsum("bhts,bshv->bthv", kept, v.repeat_interleave(2, dim=2))
    torch.testing.assert_close(packed_out.unflatten(0, (2, 6)), want)


def test_dropout_follows_torch_s_generator() -> None:
    q, k, v = (x.detach() for x in problem(5, 5))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(flash_attn_func(q, k, v, dropout_p=0.5))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_size": (-2, 0)}, "window_size"),
        ({"window_size": (1,)}, "window_size"),
        ({"window_size": 3}, r"window_size must be \(left, right\), each -1 \(open\) or a non-negative int, got 3"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes has shape \[3\]"),
        ({"dropout_p": 1.5}, r"flash_attn: dropout_p must be a probability in \[0, 1\), got 1.5"),
        ({"softmax_scale": float("nan")}, "flash_attn: softmax_scale must be a finite number, got nan"),
        ({"softcap": 1e35}, r"flash_attn: softcap must be a positive finite number, got 1e\+35; expected 1e-30 to"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attn_func(*problem(4, 4), **change)


@pytest.mark.parametrize("name", ["causal", "deterministic", "return_attn_probs"])
def test_a_word_is_no_flag(name: str) -> None:
    """ "False" meant True."""
    given: dict[str, Any] = {name: "False"}
    with pytest.raises(TypeError, match=f"^flash_attn: {name} must be True or False, got 'False'"):
        flash_attn_func(*problem(4, 4), **given)
    assert isinstance(flash_attn_func(*problem(4, 4), **{name: 0}), Tensor)  # type: ignore[arg-type]


def test_wrong_packing_is_named() -> None:
    q, k, v, q_offsets, k_offsets = packed([(3, 5), (4, 4)])
    with pytest.raises(ValueError, match="max_seqlen_k is 4, but one of the sequences has 5"):
        flash_attn_varlen_func(q[0], k[0], v[0], q_offsets, k_offsets, 4, 4)
    with pytest.raises(ValueError, match=r"qkv has shape .* expected \[batch, tokens, 3, heads, D\]"):
        flash_attn_qkvpacked_func(torch.zeros(2, 5, 2, 4, 8))
    with pytest.raises(ValueError, match=r"kv has shape .* expected \[tokens, 2, heads, D\]"):
        flash_attn_varlen_kvpacked_func(q[0], torch.zeros(9, 3, 2, 8), q_offsets, k_offsets, 4, 5)


@pytest.mark.parametrize("slopes", [None, torch.ones(4)])
@pytest.mark.parametrize("side", ["cu_seqlens_q", "cu_seqlens_k"])
def test_where_sequences_start_is_named(side: str, slopes: Tensor | None) -> None:
    """A list ended in an attribute that it has not, and with slopes what has another shape in torch's words."""
    q, k, v, q_offsets, k_offsets = packed([(4, 4), (4, 4)])
    given: dict[str, Any] = {"cu_seqlens_q": q_offsets, "cu_seqlens_k": k_offsets}
    wrong: list[Any] = [None, [0, 4, 8], q_offsets.float(), q_offsets[None], q_offsets[:0]]
    for starts in wrong:
        with pytest.raises(ValueError, match=f"^flash_attn: {side} (must be a 1-D int32 or int64 tensor|is empty)"):
            flash_attn_varlen_func(
                q[0], k[0], v[0], **given | {side: starts}, max_seqlen_q=8, max_seqlen_k=8, alibi_slopes=slopes
            )
    with pytest.raises(ValueError, match=r"Packed: kv_offsets has . entries, q_offsets has .; expected one more"):
        flash_attn_varlen_func(
            q[0], k[0], v[0], **given | {side: q_offsets[:2]}, max_seqlen_q=8, max_seqlen_k=8, alibi_slopes=slopes
        )


def test_compiles_in_one_graph() -> None:
    q, k, v = problem(5, 7)
    slopes = torch.rand(4)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    options: dict[str, Any] = {"causal": True, "window_size": (3, 0), "alibi_slopes": slopes}
    torch.testing.assert_close(compiled(q, k, v, **options), flash_attn_func(q, k, v, **options))
