"""yunchang's layers: LongContextAttention (Ulysses round a ring), its packed form, and UlyssesAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foci.compat.flash_attn.arguments import unpack
from foci.compat.yunchang.arguments import AttnType, Options, attend, check_kernel
from foci.compat.yunchang.groups import SequenceParallel, current
from foci.compat.yunchang.orders import ORDERS
from foci.compat.yunchang.ring import RING_IMPL_DICT, RING_IMPL_QKVPACKED_DICT
from foci.core.errors import Unsupported
from foci.ops.arguments import switch
from foci.parallel.group import Group
from foci.parallel.ring import ring
from foci.parallel.ulysses import ulysses


class LongContextAttention(nn.Module):
    """Ulysses over one group, a ring over the other: q, k, v [B, T of this rank, H, D] -> out of the same shape.

    ring_impl_type: "basic", "zigzag" or "strip", the order that EXTRACT_FUNC_DICT cuts. The groups are those of the
    `with set_seq_parallel_pg(...)` around, or `groups`. use_pack_qkv and use_sync change nothing that can be seen: q, k
    and v always travel in one message, and have arrived when attention begins. Heads that the ranks do not divide,
    fewer key heads than ranks, any lengths, and gradients through every option.

    Raises ValueError for an unknown order, Unsupported for other dimensions than scatter_idx=2, gather_idx=1 and for
    kernels that approximate.
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
        attn_processor: object | None = None,
        *,
        groups: SequenceParallel | None = None,
    ) -> None:
        super().__init__()
        _check_dimensions(scatter_idx, gather_idx, (2, 1))
        check_kernel(attn_type, attn_processor)
        self.order = _order(ring_impl_type)
        found = current(groups)
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self.use_pack_qkv, self.use_sync = use_pack_qkv, use_sync
        self.attn_type, self.attn_processor = attn_type, attn_processor
        self.ring_attn_fn = RING_IMPL_DICT[ring_impl_type]
        self._groups = Group.of(found.ULYSSES_PG), Group.of(found.RING_PG)

    @property
    def ulysses_pg(self) -> dist.ProcessGroup:
        return self._groups[0].pg

    @property
    def ring_pg(self) -> dist.ProcessGroup:
        return self._groups[1].pg

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        """out; the arguments are those of `ring_flash_attn_func`. alibi_slopes are those of all heads."""
        _refuse_probabilities(return_attn_probs)
        options = Options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
        outer, inner = self._groups
        return _out(lambda op: ulysses(ring(op, inner, self.order), outer), (query, key, value, alibi_slopes), options)


class LongContextAttentionQKVPacked(nn.Module):
    """`LongContextAttention` of qkv [B, T of this rank, 3, H, D]."""

    def __init__(
        self,
        scatter_idx: int = 3,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
        *,
        groups: SequenceParallel | None = None,
    ) -> None:
        super().__init__()
        _check_dimensions(scatter_idx, gather_idx, (3, 1))
        self.inner = LongContextAttention(
            ring_impl_type=ring_impl_type, use_sync=use_sync, attn_type=attn_type, groups=groups
        )
        self.ring_attn_fn = RING_IMPL_QKVPACKED_DICT[ring_impl_type]

    @property
    def ulysses_pg(self) -> dist.ProcessGroup:
        return self.inner.ulysses_pg

    @property
    def ring_pg(self) -> dist.ProcessGroup:
        return self.inner.ring_pg

    def forward(
        self,
        qkv: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        """out [B, T of this rank, H, D]."""
        q, k, v = unpack("qkv", qkv, 2, 3)
        out: Tensor = self.inner(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs,
        )  # fmt: skip
        return out


class UlyssesAttention(nn.Module):
    """Ulysses alone: every rank holds a run of tokens. sequence_process_group: None is all ranks, as in yunchang."""

    def __init__(
        self,
        sequence_process_group: dist.ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
        attn_processor: object | None = None,
    ) -> None:
        super().__init__()
        _check_dimensions(scatter_idx, gather_idx, (2, 1))
        check_kernel(attn_type, attn_processor)
        self.scatter_idx, self.gather_idx, self.use_sync = scatter_idx, gather_idx, use_sync
        self.attn_type = attn_type
        self._group = Group.of(dist.group.WORLD if sequence_process_group is None else sequence_process_group)

    @property
    def spg(self) -> dist.ProcessGroup:
        return self._group.pg

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        """out; the arguments are those of `ring_flash_attn_func`."""
        _refuse_probabilities(return_attn_probs)
        options = Options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
        return _out(lambda op: ulysses(op, self._group), (query, key, value, alibi_slopes), options)


@torch.compiler.disable
def _out(wrap: Callable[[Any], Any], tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], options: Options) -> Tensor:
    return attend(wrap, tensors, options, lse=False)[0]


def _check_dimensions(scatter_idx: int, gather_idx: int, expected: tuple[int, int]) -> None:
    if (scatter_idx, gather_idx) != expected:
        raise Unsupported(
            f"yunchang: scatter_idx={scatter_idx}, gather_idx={gather_idx}",
            [f"heads are dimension {expected[0]} and tokens dimension {expected[1]} of [B, T, ..., H, D]"],
        )


def _order(name: str) -> Any:
    if name not in ORDERS:
        raise ValueError(f"yunchang: ring_impl_type must be one of {', '.join(map(repr, ORDERS))}, got {name!r}")
    return ORDERS[name]


def _refuse_probabilities(asked: bool) -> None:
    if switch("yunchang", "return_attn_probs", asked):
        raise Unsupported(
            "yunchang: return_attn_probs",
            ["the layer returns out alone; yunchang's drops what it was asked for"],
            "ring_flash_attn_func(..., return_attn_probs=True) returns the lse",
        )
