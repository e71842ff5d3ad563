"""yunchang 0.6's layers and ring functions over foci: `from foci.compat.yunchang import LongContextAttention`."""

from __future__ import annotations

from foci.compat.yunchang.arguments import AttnType
from foci.compat.yunchang.groups import SequenceParallel, set_seq_parallel_pg
from foci.compat.yunchang.layers import LongContextAttention, LongContextAttentionQKVPacked, UlyssesAttention
from foci.compat.yunchang.orders import (
    EXTRACT_FUNC_DICT,
    basic_extract_local,
    stripe_extract_local,
    zigzag_extract_local,
)
from foci.compat.yunchang.ring import (
    RING_IMPL_DICT,
    RING_IMPL_QKVPACKED_DICT,
    RingFlashAttnFunc,
    StripeFlashAttnFunc,
    ZigZagRingFlashAttnFunc,
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
)

__all__ = [
    "EXTRACT_FUNC_DICT", "RING_IMPL_DICT", "RING_IMPL_QKVPACKED_DICT", "AttnType", "LongContextAttention",
    "LongContextAttentionQKVPacked", "RingFlashAttnFunc", "SequenceParallel", "StripeFlashAttnFunc", "UlyssesAttention",
    "ZigZagRingFlashAttnFunc", "basic_extract_local", "ring_flash_attn_func", "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func", "set_seq_parallel_pg", "stripe_extract_local", "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func", "stripe_flash_attn_qkvpacked_func", "zigzag_extract_local",
    "zigzag_ring_flash_attn_func", "zigzag_ring_flash_attn_kvpacked_func", "zigzag_ring_flash_attn_qkvpacked_func",
]  # fmt: skip
