"""Keywords that transformers models pass down to their layers: packed documents, ones without effect, unknown ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foci.core.errors import Unsupported

# Keywords passed through to layers that no layer computes with: their information is in masks and tensors already.
WITHOUT_EFFECT = frozenset(
    {
        *("input_ids", "position_ids", "position_embeddings", "cache_position", "token_type_ids", "layer_idx"),
        *("past_key_values", "past_key_value", "use_cache", "max_length_q", "max_length_k", "num_items_in_batch"),
        *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep", "deterministic"),
    }
)
DOCUMENTS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def asked(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that are set."""
    return {name: given for name, given in keywords.items() if given is not None and given is not False}


def refuse(keywords: Mapping[str, Any], where: str) -> None:
    """Raise Unsupported for keywords that are set and that may change the result in a way foci does not know."""
    unknown = sorted(name for name in keywords if name not in WITHOUT_EFFECT)  # as torch 2.11 can trace it
    reasons = [f"{name}=... may change the result, and foci does not know it" for name in unknown]
    if "output_attentions" in keywords:
        reasons = ["output_attentions=True asks for the attention weights, which foci never forms"]
    if reasons:
        raise Unsupported(f"attention of {where} cannot run this call", reasons)


def documents(keywords: Mapping[str, Any]) -> Tensor | None:
    """Where packed documents begin and end, [N + 1]: cu_seqlens or cu_seq_lens_q as given, else from seq_idx [1, T]."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        offsets = keywords.get(name)
        if isinstance(offsets, Tensor):
            return offsets
    numbers = keywords.get("seq_idx")
    if not isinstance(numbers, Tensor):
        return None
    if numbers.dim() != 2 or numbers.shape[0] != 1:
        raise Unsupported(
            "packed documents cannot be kept apart here",
            [f"seq_idx has shape {list(numbers.shape)}; documents are told apart in a batch of 1, [1, T]"],
        )
    counts = torch.unique_consecutive(numbers[0], return_counts=True)[1]
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))
