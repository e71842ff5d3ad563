"""xFormers' biases: what each hides, written out by loops, and the foci mask that computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foci.compat.xformers import attn_bias as ab
from foci.compat.xformers.attn_bias import AttentionBias
from foci.core.errors import Unsupported
from foci.ops.masks import Causal, Dense, Lengths, Packed, lower
from tests.compat.dense import band, parameters

Q, K = [3, 0, 2, 4], [5, 2, 2, 4]  # queries and keys of four sequences
SHORT = [3, 1, 2, 3]  # fewer keys than queries in the first and the last
PADDED = [4, 0, 2, 5]
FEW = [1, 0, 2, 3]


def blocks(parts: list[tuple[Tensor, int, int]], T: int, S: int) -> Tensor:
    """[T, S] with each part [t, s] put at its place (row, column)."""
    allowed = torch.zeros(T, S, dtype=torch.bool)
    for part, row, column in parts:
        allowed[row : row + part.shape[0], column : column + part.shape[1]] |= part
    return allowed


def documents(q: list[int], k: list[int], starts: list[int] | None = None, **limits: int | bool) -> Tensor:
    """Sequences end to end, or the keys of sequence n at starts[n]; starts[-1] is the number of places."""
    starts = starts or [sum(k[:n]) for n in range(len(k) + 1)]
    parts = [(band(q[n], k[n], **limits), sum(q[:n]), starts[n]) for n in range(len(q))]  # type: ignore[arg-type]
    return blocks(parts, sum(q), starts[-1])


PLACES = [0, 5, 10, 15, 20]
GAPS = [2, 7, 7, 12, 18]
MIXED = [9, 0, 3, 13, 18]  # starts that do not rise
BLOCK = ab.BlockDiagonalMask.from_seqlens
# name: (bias, T, S, what it allows)
BIASES: dict[str, tuple[AttentionBias, int, int, Tensor]] = {
    "LowerTriangularMask": (ab.LowerTriangularMask(), 4, 6, band(4, 6, right=0, top_left=True)),
    "LowerTriangularMask-tall": (ab.LowerTriangularMask(), 6, 4, band(6, 4, right=0, top_left=True)),
    "LowerTriangularFromBottomRightMask": (ab.LowerTriangularFromBottomRightMask(), 4, 6, band(4, 6, right=0)),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        ab.LowerTriangularFromBottomRightMask().make_local_attention(2), 4, 6, band(4, 6, 1, 0),
    ),
    "LocalAttentionFromBottomRightMask": (ab.LocalAttentionFromBottomRightMask(1, 2), 4, 6, band(4, 6, 1, 2)),
    "BlockDiagonalMask": (BLOCK(Q), 9, 9, documents(Q, Q)),
    "BlockDiagonalMask-keys": (BLOCK(Q, K), 9, 13, documents(Q, K)),
    "BlockDiagonalCausalMask": (BLOCK(Q, K).make_causal(), 9, 13, documents(Q, K, right=0, top_left=True)),
    "BlockDiagonalCausalMask-short": (BLOCK(Q, SHORT).make_causal(), 9, 9, documents(Q, SHORT, right=0, top_left=True)),
    "BlockDiagonalCausalFromBottomRightMask": (
        BLOCK(Q, K).make_causal_from_bottomright(), 9, 13, documents(Q, K, right=0),
    ),
    "BlockDiagonalCausalFromBottomRightMask-short": (
        BLOCK(Q, SHORT).make_causal_from_bottomright(), 9, 9, documents(Q, SHORT, right=0),
    ),
    "BlockDiagonalCausalLocalAttentionMask": (
        BLOCK(Q).make_local_attention(2), 9, 9, documents(Q, Q, left=1, right=0, top_left=True),
    ),
    "BlockDiagonalCausalLocalAttentionMask-keys": (
        BLOCK(Q, K).make_local_attention(2), 9, 13, documents(Q, K, left=1, right=0, top_left=True),
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        BLOCK(Q, K).make_local_attention_from_bottomright(3), 9, 13, documents(Q, K, left=2, right=0),
    ),
    "BlockDiagonalPaddedKeysMask": (
        ab.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 5, PADDED), 9, 20, documents(Q, PADDED, PLACES),
    ),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (
        ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, 5, PADDED), 9, 20,
        documents(Q, PADDED, PLACES, right=0),
    ),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask-short": (
        ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, 5, FEW), 9, 20,
        documents(Q, FEW, PLACES, right=0),
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 5, PADDED, 1, 1), 9, 20,
        documents(Q, PADDED, PLACES, left=1, right=1),
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 5, PADDED, 2), 9, 20,
        documents(Q, PADDED, PLACES, left=1, right=0),
    ),
    "BlockDiagonalGappyKeysMask": (
        ab.BlockDiagonalGappyKeysMask.from_seqlens(Q, GAPS, PADDED), 9, 18, documents(Q, PADDED, GAPS),
    ),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (
        ab.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(Q, GAPS, PADDED), 9, 18,
        documents(Q, PADDED, GAPS, right=0),
    ),
    "BlockDiagonalGappyKeysMask-anywhere": (
        ab.BlockDiagonalGappyKeysMask.from_seqlens(Q, MIXED, PADDED), 9, 18, documents(Q, PADDED, MIXED),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BIASES)
def test_materialize_is_the_definition(name: str) -> None:
    bias, T, S, allowed = BIASES[name]
    assert name.partition("-")[0] == type(bias).__name__
    for dtype in (torch.float32, torch.bfloat16):
        dense = bias.materialize((2, 3, T, S), dtype)
        assert dense.shape == (2, 3, T, S) and dense.dtype == dtype
        assert torch.equal(dense[1, 2] == 0, allowed) and torch.equal(dense[1, 2] == -torch.inf, ~allowed)


@pytest.mark.parametrize("name", BIASES)
def test_the_mask_of_foci_hides_the_same(name: str) -> None:
    bias, T, S, allowed = BIASES[name]
    mask, added = bias.lower(T, S, torch.device("cpu"))
    assert added is None and mask is not None
    assert torch.equal(mask.materialize(T, S).expand(1, 1, T, S)[0, 0], allowed)


def test_what_foci_has_a_mask_for_is_not_dense() -> None:
    cpu = torch.device("cpu")
    masks = {name: lower(bias.lower(T, S, cpu)[0]) for name, (bias, T, S, _) in BIASES.items()}
    dense = {name for name, mask in masks.items() if mask.dense is not None}
    assert dense == {"BlockDiagonalCausalLocalAttentionMask-keys", "BlockDiagonalGappyKeysMask-anywhere"}
    visible = lower(BLOCK(Q).make_causal().lower(9, 9, cpu)[0])
    assert visible.q_offsets is visible.kv_offsets  # aten tells equal lengths by that


def test_a_tensor_bias_is_kept_as_it_is() -> None:
    added = torch.randn(2, 3, 4, 4, requires_grad=True)
    bias = ab.LowerTriangularMask().add_bias(added)
    dense = bias.materialize((2, 3, 4, 4))
    assert torch.equal(dense.isfinite()[0, 0], band(4, 4, right=0)) and torch.equal(dense[:, :, 3], added[:, :, 3])
    mask, tensor = bias.lower(4, 4, torch.device("cpu"))
    assert mask == Causal("top-left") and tensor is added


def test_tensor_lists_round_trip() -> None:
    tensors = [torch.randn(n, t, 5) for n, t in ((1, 3), (2, 2), (1, 4))]
    mask, together = ab.BlockDiagonalMask.from_tensor_list(tensors)
    assert together.shape == (1, 11, 5) and mask.q_seqinfo.seqstart_py == [0, 3, 5, 7, 11]
    for form in (mask, mask.make_causal(), mask.make_local_attention(2)):
        assert all(torch.equal(a, b) for a, b in zip(form.split(together), tensors, strict=True))
    keys = [torch.randn(n, t, 5) for n, t in ((1, 2), (2, 4), (1, 1))]
    mask, q, k, v = ab.BlockDiagonalMask.from_tensor_lists_qkv(tensors, keys)
    assert v is None and torch.equal(q, together)
    assert [x.shape for x in mask.split_kv(k)] == [x.shape for x in keys]
    with pytest.raises(ValueError, match="split_queries"):
        mask.split(q)
    with pytest.raises(ValueError, match="tensors_v"):
        ab.BlockDiagonalMask.from_tensor_lists_qkv(tensors, keys, tensors)


def test_to_moves_what_there_is_to_move() -> None:
    meta = torch.device("meta")
    moved = BLOCK(Q, K).make_local_attention(2).to(meta)
    assert isinstance(moved, ab.BlockDiagonalCausalLocalAttentionMask) and moved._window_size == 2
    assert moved.k_seqinfo.seqstart.is_meta and moved.q_seqinfo.seqlen_py == Q
    assert ab.LowerTriangularMask().add_bias(torch.zeros(1)).to(meta)._bias.is_meta
    assert isinstance(ab.LowerTriangularMask().to(meta), ab.LowerTriangularMask)


PAGED = [name for name in dir(ab) if name.startswith("Paged")]


@pytest.mark.parametrize("name", PAGED)
def test_pages_are_refused_with_the_way_round_them(name: str) -> None:
    plain = ab.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [3])
    table = torch.tensor([[0]])
    calls: list[Callable[[], object]] = [
        lambda: getattr(ab, name)(plain.q_seqinfo, plain.k_seqinfo, table, 4),
        lambda: getattr(ab, name).from_seqlens([1], [3], table, 4),
        lambda: plain.make_paged(table, 4, getattr(ab, name)),
    ]
    for call in calls:
        with pytest.raises(Unsupported, match="pages") as refusal:
            call()
        assert hasattr(ab, refusal.value.hint.split("take ")[1].split(" ")[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BLOCK([1, 2], [3]), "q_seqlen has 2 entries, kv_seqlen has 1"),
        (lambda: BLOCK([1, -2]), "negative"),
        (lambda: BLOCK([2]).make_local_attention(0), "window_size"),
        (lambda: ab.LowerTriangularFromBottomRightLocalAttentionMask(0), "window_size"),
        (lambda: ab.LocalAttentionFromBottomRightMask(-1, 2), "window_left"),
        (lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [5]), "kv_padding=4"),
        (lambda: BLOCK([2]).lower(3, 2, torch.device("cpu")), "end at 2; expected T=3"),
        (lambda: BLOCK([2]).materialize((2, 3)), "end at 2; expected S=3"),
    ],
)
def test_what_does_not_fit_is_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_unused_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="xformers: bias must be a tensor, got None"):  # once no bias at all
        ab.LowerTriangularMask().add_bias(None)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="causal_diagonal"):
        ab.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [3], torch.zeros(1))


def test_masks_are_what_they_are_named() -> None:
    mask, _ = ab.BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], 4, [3, 2]).lower(2, 8, torch.device("cpu"))
    assert {type(part) for part in mask.parts} == {Packed, Lengths}  # type: ignore[union-attr]
    assert isinstance(ab.AttentionBias.dense(ab.LowerTriangularMask(), 2, 2, torch.device("cpu")), Dense)


_PADDED = "(q_seqlen, kv_padding, kv_seqlen, "
# xFormers 0.0.35
RECORDED = {
    "BlockDiagonalMask.from_seqlens": "(q_seqlen, kv_seqlen=None, *, device=None)",
    "BlockDiagonalMask.from_tensor_list": "(tensors)",
    "BlockDiagonalMask.from_tensor_lists_qkv": "(tensors_q, tensors_k, tensors_v=None)",
    "BlockDiagonalMask.split": "(self, tensor)",
    "BlockDiagonalMask.split_kv": "(self, tensor)",
    "BlockDiagonalMask.split_queries": "(self, tensor)",
    "BlockDiagonalMask.make_causal": "(self)",
    "BlockDiagonalMask.make_causal_from_bottomright": "(self)",
    "BlockDiagonalMask.make_local_attention": "(self, window_size)",
    "BlockDiagonalMask.make_local_attention_from_bottomright": "(self, window_size)",
    "BlockDiagonalMask.__init__": "(self, q_seqinfo, k_seqinfo, _batch_sizes=None)",
    "BlockDiagonalCausalLocalAttentionMask.__init__": "(self, q_seqinfo, k_seqinfo, _batch_sizes=None, _window_size=0)",
    "BlockDiagonalPaddedKeysMask.from_seqlens": f"{_PADDED}causal_diagonal=None, *, device=None)",
    "BlockDiagonalPaddedKeysMask.make_paged": "(self, block_tables, page_size, paged_type)",
    "BlockDiagonalPaddedKeysMask.make_local_attention": "(self, window_left, window_right)",
    "BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local": f"{_PADDED}window_left, window_right)",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local": f"{_PADDED}window_size)",
    "BlockDiagonalGappyKeysMask.from_seqlens": "(q_seqlen, kv_seqstarts, kv_seqlen, *, device=None)",
    "BlockDiagonalGappyKeysMask.make_paged": "(self, block_tables, page_size, notional_padding, paged_type)",
    "LowerTriangularMask.__init__": "(self, device=None)",
    "LowerTriangularMask.add_bias": "(self, bias)",
    "LowerTriangularMaskWithTensorBias.__init__": "(self, bias)",
    "LowerTriangularFromBottomRightMask.make_local_attention": "(self, window_size)",
    "LowerTriangularFromBottomRightLocalAttentionMask.__init__": "(self, _window_size)",
    "LocalAttentionFromBottomRightMask.__init__": "(self, window_left, window_right)",
}


@pytest.mark.parametrize("name", RECORDED)
def test_signatures_are_the_peer_s(name: str) -> None:
    owner, method = name.split(".")
    assert parameters(getattr(getattr(ab, owner), method)) == RECORDED[name]


@pytest.mark.parametrize("name", sorted({name.partition("-")[0] for name in BIASES}))
def test_every_bias_materializes_like_the_peer(name: str) -> None:
    signature = parameters(getattr(ab, name).materialize)
    assert signature == "(self, shape, dtype=torch.float32, device='cpu')"
