"""yunchang's layers equal one process: orders, degrees, heads that do not divide, and every option."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from foci.compat.yunchang import (
    LongContextAttention,
    LongContextAttentionQKVPacked,
    UlyssesAttention,
    set_seq_parallel_pg,
)
from foci.compat.yunchang.arguments import AttnType
from foci.core.errors import Unsupported
from foci.core.world import World
from tests.compat.dense import parameters
from tests.compat.yunchang.proof import DROPS, OPTIONS, compare, draw, mine

Worlds = Callable[[int], World]
FORWARD = (
    "(self, query, key, value, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False)"
)


def test_signatures_are_the_peer_s_and_groups_are_beside_them() -> None:
    assert parameters(LongContextAttention.forward) == parameters(UlyssesAttention.forward) == FORWARD
    assert parameters(LongContextAttention) == (
        "(scatter_idx=2, gather_idx=1, ring_impl_type='basic', use_pack_qkv=False, use_sync=False, "
        "attn_type=<AttnType.FA: 'fa'>, attn_processor=None, *, groups=None)"
    )
    assert parameters(UlyssesAttention).startswith(
        "(sequence_process_group=None, scatter_idx=2, gather_idx=1, use_sync="
    )


def on_rank(degrees: tuple[int, int], order: str, inputs: dict[str, Tensor], options: dict[str, Any]) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    ulysses, ring = degrees
    with set_seq_parallel_pg(ulysses, ring, rank, size):
        layer = LongContextAttention(ring_impl_type=order, use_pack_qkv=True, use_sync=True)
    leaves = mine(inputs, order, rank, size, ring, ulysses)
    q, k, v, *rest = leaves.values()
    torch.manual_seed(DROPS)
    out = layer(q, k, v, alibi_slopes=rest[0] if rest else None, **options)
    out.sin().sum().backward()
    return out.detach(), {name: x.grad for name, x in leaves.items()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("degrees", "order"), [((2, 2), "zigzag"), ((2, 2), "strip"), ((4, 1), "basic"), ((1, 4), "basic")]
)
def test_equal_to_one_process(worlds: Worlds, degrees: tuple[int, int], order: str, options: dict[str, Any]) -> None:
    inputs = draw(T=11, H=3, G=1)
    ulysses, ring = degrees
    compare(worlds(4).run(on_rank, degrees, order, inputs, options), inputs, options, order, ring, ulysses)


def others(inputs: dict[str, Tensor]) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    leaves = mine(inputs, "basic", rank, size, 1, size)
    out = UlyssesAttention()(*leaves.values(), causal=True)
    out.sin().sum().backward()
    groups = set_seq_parallel_pg(size, 1, rank, size)
    packed = LongContextAttentionQKVPacked(groups=groups)(
        torch.stack([x.detach() for x in leaves.values()], 2), causal=True
    )
    assert torch.allclose(packed, out)
    return out.detach(), {name: x.grad for name, x in leaves.items()}


def test_ulysses_alone_and_the_packed_layer(worlds: Worlds) -> None:
    inputs = draw(H=5, G=5, alibi=False)
    compare(worlds(2).run(others, inputs), inputs, {"causal": True}, "basic", 1, 2)


def copies() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = set_seq_parallel_pg(size, 1, rank, size)
    x = torch.randn(1, 2, 2, 4)
    for layer in (LongContextAttention(groups=groups), UlyssesAttention()):
        assert torch.equal(copy.deepcopy(layer)(x, x, x), layer(x, x, x))
    packed = copy.deepcopy(LongContextAttentionQKVPacked(groups=groups))
    assert packed.ulysses_pg is groups.ULYSSES_PG and packed.ring_pg is groups.RING_PG


def test_a_copy_of_a_layer_talks_to_the_same_ranks(worlds: Worlds) -> None:
    worlds(2).run(copies)


def refusals() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = set_seq_parallel_pg(size, 1, rank, size)
    x = torch.zeros(1, 2, 2, 4)
    attempts: list[tuple[type[Exception], Callable[[], Any]]] = [
        (RuntimeError, lambda: LongContextAttention()),
        (Unsupported, lambda: LongContextAttention(1, 2, groups=groups)),
        (ValueError, lambda: LongContextAttention(ring_impl_type="stripe", groups=groups)),
        (Unsupported, lambda: LongContextAttention(attn_type=AttnType.SPARSE_SAGE, groups=groups)),
        (Unsupported, lambda: LongContextAttention(groups=groups)(x, x, x, return_attn_probs=True)),
        (Unsupported, lambda: UlyssesAttention()(x, x, x, return_attn_probs=True)),
    ]
    said = []
    for kind, attempt in attempts:
        try:
            attempt()
        except kind as error:
            said.append(str(error))
    return said


def test_what_cannot_be_honoured_raises(worlds: Worlds) -> None:
    for said in worlds(2).run(refusals):
        groups, dimensions, order, kernel, first, second = said
        assert "no groups" in groups and "scatter_idx=1" in dimensions and "'basic', 'zigzag', 'strip'" in order
        assert "SPARSE_SAGE" in kernel and first == second and "return_attn_probs" in first
