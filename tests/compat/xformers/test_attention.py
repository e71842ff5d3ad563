"""xFormers' functions against dense float64 attention: biases, layouts, lse, merging, gradients, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foci.compat import xformers as xops
from foci.core.errors import Unsupported
from tests.compat.dense import attend, band, parameters, same_gradients
from tests.compat.xformers.test_attn_bias import BIASES

_FORWARD = "(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None)"
# xFormers 0.0.35
RECORDED = {
    "memory_efficient_attention": _FORWARD,
    "memory_efficient_attention_forward": _FORWARD,
    "memory_efficient_attention_forward_requires_grad": _FORWARD,
    "memory_efficient_attention_partial": _FORWARD,
    "memory_efficient_attention_backward": "(grad, output, lse, query, key, value, attn_bias=None, p=0.0, scale=None, "
    "*, op=None)",
    "merge_attentions": "(attn_split, lse_split, write_lse=True, output_dtype=None)",
}


@pytest.mark.parametrize("name", RECORDED)
def test_signatures_are_the_peer_s(name: str) -> None:
    assert parameters(getattr(xops, name)) == RECORDED[name]


def problem(T: int, S: int, B: int = 1, H: int = 2, K: int = 8, V: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((B, T, H, K), (B, S, H, K), (B, S, H, V))
    return tuple(torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes)  # type: ignore[return-value]


@pytest.mark.parametrize("name", BIASES)
def test_every_bias_forward_lse_and_gradients(name: str) -> None:
    bias, T, S, allowed = BIASES[name]
    q, k, v = problem(T, S, B=1 if name.startswith("Block") else 2)
    want, want_lse = attend(q, k, v, allowed)
    out = xops.memory_efficient_attention(q, k, v, bias)
    torch.testing.assert_close(out, want)
    same_gradients(out, want, (q, k, v))
    again, lse = xops.memory_efficient_attention_forward_requires_grad(q, k, v, attn_bias=bias)
    torch.testing.assert_close(again, want)
    torch.testing.assert_close(lse, want_lse)
    pull = torch.randn_like(out)
    found = xops.memory_efficient_attention_backward(pull, again, lse, q, k, v, bias)
    wanted = torch.autograd.grad(want, (q, k, v), pull)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected)


def test_padded_keys_are_never_read() -> None:
    bias, T, S, allowed = BIASES["BlockDiagonalCausalWithOffsetPaddedKeysMask"]
    q, k, v = (x.detach() for x in problem(T, S))
    want = xops.memory_efficient_attention(q, k, v, bias)
    hidden = torch.tensor([s % 5 >= (4, 0, 2, 5)[s // 5] for s in range(S)])
    k[:, hidden], v[:, hidden] = torch.nan, torch.nan
    assert torch.equal(xops.memory_efficient_attention(q, k, v, bias), want) and allowed.any()


def test_the_way_round_pages_that_the_refusal_names() -> None:
    q, k, v = (x.detach() for x in problem(3, 24, H=2))
    table, page_size, lengths = torch.tensor([[5, 0], [2, 3]]), 4, [6, 5]
    row = table.shape[1] * page_size
    gathered = [x.unflatten(1, (-1, page_size))[0, table].flatten(0, 2)[None] for x in (k, v)]
    bias = xops.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 2], row, lengths)
    out = xops.memory_efficient_attention(q, *gathered, bias)
    for n, (rows, pages) in enumerate(((slice(0, 1), (5, 0)), (slice(1, 3), (2, 3)))):
        keys, values = (torch.cat([x[:, p * 4 : p * 4 + 4] for p in pages], 1)[:, : lengths[n]] for x in (k, v))
        want, _ = attend(q[:, rows], keys, values, band(rows.stop - rows.start, lengths[n], right=0))
        torch.testing.assert_close(out[:, rows], want)


def test_tensor_biases_in_each_layout_with_their_gradient() -> None:
    q, k, v = problem(4, 5, B=2, H=6)
    for shape in ((2, 6, 4, 5), (1, 6, 4, 5), (2, 1, 1, 5)):
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        want, _ = attend(q, k, v, bias=bias, scale=0.4)
        out = xops.memory_efficient_attention(q, k, v, attn_bias=bias, scale=0.4)
        torch.testing.assert_close(out, want)
        same_gradients(out, want, (q, k, v, bias))
    grouped = tuple(x.unflatten(2, (3, 2)) for x in (q, k, v))
    bias = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    five = xops.memory_efficient_attention(*grouped, attn_bias=bias.unflatten(1, (3, 2)))
    torch.testing.assert_close(five.flatten(2, 3), attend(q, k, v, bias=bias)[0])
    flat = tuple(x[:, :, 0] for x in (q, k, v))
    three = xops.memory_efficient_attention(*flat, attn_bias=bias[:, 0])
    torch.testing.assert_close(three, attend(*(x[:, :, None] for x in flat), bias=bias[:, :1])[0][:, :, 0])


LAYOUTS = {3: (2, 5, 5), 4: (2, 3, 5, 5), 5: (2, 3, 2, 5, 5)}  # [B, heads, M, S], M == S


@pytest.mark.parametrize(
    ("rank", "shape"),
    [
        (rank, tuple(1 if place in ones else n for place, n in enumerate(full))[start:])
        for rank, full in LAYOUTS.items()
        for start in range(rank + 1)
        for ones in ((), (1,), (2,), (0, rank - 2), (1, 2))
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_broadcasts_as_torch_does(rank: int, shape: tuple[int, ...], causal: bool) -> None:
    """A bias [S] of a self-attention without heads once landed on the queries."""
    B, *middle, T, S = LAYOUTS[rank]
    q, k, v = (torch.randn(B, n, *middle, 8, dtype=torch.float64, requires_grad=True) for n in (T, S, S))
    flat = [x.reshape(B, x.shape[1], -1, 8) for x in (q, k, v)]
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    whole = bias.expand(LAYOUTS[rank]).reshape(B, -1, T, S)
    want, _ = attend(*flat, band(T, S, right=0) if causal else None, whole)
    out = xops.memory_efficient_attention(q, k, v, xops.LowerTriangularMask().add_bias(bias) if causal else bias)
    torch.testing.assert_close(out.reshape_as(want), want)
    same_gradients(out.reshape_as(want), want, (q, k, v, bias))


@pytest.mark.parametrize(
    ("rank", "shape"),
    [(3, (1, 2, 5, 5)), (3, (3, 5, 5)), (3, (4,)), (4, (2, 5, 5)), (4, (1, 2, 3, 5, 5)), (5, (3, 5, 5)), (5, (5, 6))],
)
def test_a_bias_that_does_not_broadcast_is_named(rank: int, shape: tuple[int, ...]) -> None:
    B, *middle, T, _ = LAYOUTS[rank]
    q = torch.randn(B, T, *middle, 8)
    with pytest.raises(ValueError) as caught:
        xops.memory_efficient_attention(q, q, q, torch.zeros(shape))
    letters = {3: "[B,M,S]", 4: "[B,H,M,S]", 5: "[B,G,H,M,S]"}[rank]
    assert str(caught.value) == (
        f"xformers: attn_bias has shape {list(shape)}; expected one that broadcasts to {letters} = "
        f"{list(LAYOUTS[rank])}"
    )


def test_a_grouped_bias_compiles_in_one_graph() -> None:
    q, bias = torch.randn(2, 5, 3, 2, 8), torch.randn(3, 1, 5, 5)
    compiled = torch.compile(xops.memory_efficient_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(q, q, q, bias), xops.memory_efficient_attention(q, q, q, bias))


def test_a_causal_mask_with_a_tensor_bias() -> None:
    q, k, v = problem(4, 4, B=2)
    bias = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    want, _ = attend(q, k, v, band(4, 4, right=0), bias)
    out = xops.memory_efficient_attention(q, k, v, xops.LowerTriangularMask().add_bias(bias))
    torch.testing.assert_close(out, want)
    same_gradients(out, want, (q, k, v, bias))


def test_one_head_without_its_dimension() -> None:
    q, k, v = (x[:, :, 0].detach().requires_grad_() for x in problem(5, 7, B=3))
    want, want_lse = attend(*(x[:, :, None] for x in (q, k, v)), band(5, 7, right=0, top_left=True))
    out, lse = xops.memory_efficient_attention_forward_requires_grad(q, k, v, xops.LowerTriangularMask())
    torch.testing.assert_close(out, want[:, :, 0])
    torch.testing.assert_close(lse, want_lse)
    assert out.shape == (3, 5, 6) and lse.shape == (3, 1, 5)
    same_gradients(out, want[:, :, 0], (q, k, v))


@pytest.mark.parametrize("gradients", [False, True])
def test_groups_of_heads(gradients: bool) -> None:
    q = torch.randn(2, 4, 3, 2, 8, dtype=torch.float64, requires_grad=gradients)
    k, v = (torch.randn(2, 7, 3, 1, 8, dtype=torch.float64, requires_grad=gradients) for _ in range(2))
    wide = tuple(x.expand(2, 7, 3, 2, 8) for x in (k, v))
    want, want_lse = attend(q.flatten(2, 3), *(x.flatten(2, 3) for x in wide))
    out, lse = xops.memory_efficient_attention_forward_requires_grad(q, *wide)
    assert out.shape == (2, 4, 3, 2, 8) and lse.shape == (2, 3, 2, 4)
    torch.testing.assert_close(out.flatten(2, 3), want)
    torch.testing.assert_close(lse.flatten(1, 2), want_lse)
    if gradients:
        same_gradients(out.flatten(2, 3), want, (q, k, v))
        pull = torch.randn_like(want)
        found = xops.memory_efficient_attention_backward(pull.view_as(out), out, lse, q, *wide)
        wanted = torch.autograd.grad(want, (q, *wide), pull)
        for got, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("heads", [(), (3,), (3, 2)])
def test_no_queries_have_no_gradients_to_give(heads: tuple[int, ...]) -> None:
    q, k = torch.randn(2, 0, *heads, 8), torch.randn(2, 4, *heads, 8)
    v = torch.randn(2, 4, *heads, 6)
    out, lse = xops.memory_efficient_attention_forward_requires_grad(q, k, v)
    dq, dk, dv = xops.memory_efficient_attention_backward(torch.ones_like(out), out, lse, q, k, v)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape) and not dk.any() and not dv.any()


def test_gradients_of_expanded_keys_are_spread_over_the_heads() -> None:
    q = torch.randn(1, 4, 1, 2, 8, dtype=torch.float64)
    k = torch.randn(1, 5, 1, 1, 8, dtype=torch.float64).expand(1, 5, 1, 2, 8).requires_grad_()
    v = torch.randn(1, 5, 1, 1, 8, dtype=torch.float64).expand(1, 5, 1, 2, 8)
    out = xops.memory_efficient_attention(q, k, v)
    want, _ = attend(*(x.flatten(2, 3) for x in (q, k, v)))
    same_gradients(out.flatten(2, 3), want, (k,))


def test_parts_merge_into_the_whole_and_so_do_their_gradients() -> None:
    q, k, v = problem(5, 9, B=2)
    want, want_lse = attend(q, k, v)
    cuts = [slice(0, 4), slice(4, 4), slice(4, 9)]
    parts = [xops.memory_efficient_attention_partial(q, k[:, cut], v[:, cut]) for cut in cuts]
    out, lse = xops.merge_attentions([out for out, _ in parts], [lse for _, lse in parts])
    torch.testing.assert_close(out, want)
    assert lse is not None
    torch.testing.assert_close(lse, want_lse)
    same_gradients(out, want, (q, k, v))
    stacked, none = xops.merge_attentions(*(torch.stack(x) for x in zip(*parts, strict=True)), write_lse=False)
    assert none is None and torch.equal(stacked, out)
    five = [(out[:, :, None], lse[:, None]) for out, lse in parts]
    grouped, grouped_lse = xops.merge_attentions(*zip(*five, strict=True), output_dtype=torch.float32)
    assert grouped.dtype == torch.float32 and grouped_lse is not None and grouped_lse.shape == (2, 1, 2, 5)
    torch.testing.assert_close(grouped[:, :, 0], want.float())


def test_there_is_nothing_to_merge_in_no_parts() -> None:
    with pytest.raises(ValueError, match="has 0 parts, lse_split has 0; expected as many, 1 or more"):
        xops.merge_attentions([], [])


def test_a_word_is_no_flag() -> None:
    out, lse = xops.memory_efficient_attention_partial(*problem(4, 4))
    with pytest.raises(TypeError, match=r"^xformers: write_lse must be True or False, got 'False'"):
        xops.merge_attentions([out], [lse], write_lse="False")  # type: ignore[arg-type]


def test_a_partial_of_half_precision_is_not_rounded() -> None:
    q, k, v = (x.detach().bfloat16() for x in problem(40, 60, H=4, K=32, V=32))
    want, want_lse = attend(q, k, v)
    out, lse = xops.memory_efficient_attention_partial(q, k, v)
    assert out.dtype == torch.float32 and (out - want).abs().max() < 1e-5 and (lse - want_lse).abs().max() < 1e-5
    narrow = xops.memory_efficient_attention(q.float(), k.float(), v.float(), output_dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert xops.memory_efficient_attention(q, k, v).dtype == torch.bfloat16


def test_the_forward_alone_has_no_graph() -> None:
    q, k, v = problem(4, 4)
    assert not xops.memory_efficient_attention_forward(q, k, v).requires_grad
    assert xops.memory_efficient_attention(q, k, v).requires_grad


def test_dropout() -> None:
    q, k, v = (x.detach() for x in problem(50, 60, H=4))
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(xops.memory_efficient_attention(q, k, v, p=0.3))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    mean = torch.stack([xops.memory_efficient_attention(q, k, v, None, 0.3) for _ in range(60)]).mean(0)
    assert (mean - attend(q, k, v)[0]).abs().mean() < 0.05
    for form in (xops.memory_efficient_attention_partial, xops.memory_efficient_attention_forward_requires_grad):
        with pytest.raises(Unsupported, match=r"p is 0\.3"):
            form(q, k, v, p=0.3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"op": ("a", "b")}, Unsupported, "names a kernel of xFormers"),
        ({"attn_bias": torch.ones(1, 2, 4, 5, dtype=torch.bool)}, ValueError, "attn_bias is torch.bool"),
        ({"attn_bias": "causal"}, TypeError, "attn_bias"),
        ({"attn_bias": torch.zeros(1, 2, 4, 6)}, ValueError, "bias"),
        ({"key": torch.zeros(1, 5, 8)}, ValueError, "4, 3, 4 dimensions"),
        ({"attn_bias": xops.BlockDiagonalMask.from_seqlens([3], [5])}, ValueError, "end at 3; expected T=4"),
        ({"p": 2.0}, ValueError, "dropout"),
        ({"output_dtype": torch.int32}, ValueError, "output_dtype is torch.int32; expected float64, float32,"),
        (
            {"query": torch.zeros(1, 4, 2, 8).half(), "output_dtype": torch.float32},  # and no key of float64 narrowed
            ValueError,
            "dtypes float16, float64",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = problem(4, 5)
    with pytest.raises(error, match=message):
        xops.memory_efficient_attention(**{"query": q, "key": k, "value": v, **change})


def test_a_packed_mask_compiles_in_one_graph() -> None:
    bias, T, S, allowed = BIASES["BlockDiagonalCausalWithOffsetPaddedKeysMask"]
    q, k, v = (x.detach() for x in problem(T, S))
    compiled = torch.compile(xops.memory_efficient_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, bias), attend(q, k, v, allowed)[0])


def test_shapes_of_parts_and_gradients_are_checked() -> None:
    q, k, v = problem(4, 5)
    out, lse = xops.memory_efficient_attention_partial(q, k, v)
    with pytest.raises(ValueError, match="2 parts, lse_split has 1"):
        xops.merge_attentions([out, out], [lse])
    with pytest.raises(ValueError, match="part 1 has"):
        xops.merge_attentions([out, out], [lse, lse.transpose(1, 2)])
    with pytest.raises(ValueError, match="output_dtype is"):
        xops.merge_attentions([out], [lse], output_dtype=torch.int64)
    for other in (lse[..., :3], lse.transpose(0, 1), lse.sum()):
        with pytest.raises(ValueError, match="lse is"):
            xops.memory_efficient_attention_backward(out, out, other, q, k, v)
    with pytest.raises(ValueError, match="grad is"):
        xops.memory_efficient_attention_backward(out[:, :3], out, lse, q, k, v)
    with pytest.raises(ValueError, match="one G and one H"):
        xops.memory_efficient_attention(*(x[:, :, :, None] for x in (q, k[:, :, :1], v)))
