"""Keywords that models hand down: documents are read, what has no effect passes, the unknown is refused."""

from __future__ import annotations

import pytest
import torch

from foci.core.errors import Unsupported
from foci.integrations.transformers_keywords import asked, documents, refuse


def test_only_what_says_something_is_asked_for() -> None:
    assert asked({"a": None, "b": False, "c": 0, "d": "x"}) == {"c": 0, "d": "x"}


def test_what_may_change_the_result_is_refused_by_name() -> None:
    refuse({"position_ids": torch.arange(3), "use_cache": True}, "layer 3")
    with pytest.raises(Unsupported, match=r"attention of layer 3 (.|\n)*head_mask=\.\.\. may change"):
        refuse({"head_mask": torch.ones(2)}, "layer 3")
    with pytest.raises(Unsupported, match="never forms"):
        refuse({"output_attentions": True}, "layer 3")


def test_documents_are_read_from_offsets_or_numbers() -> None:
    offsets = torch.tensor([0, 2, 5])
    assert documents({}) is None
    assert documents({"cu_seq_lens_q": offsets}) is offsets
    assert documents({"cu_seqlens": offsets, "seq_idx": torch.zeros(1, 5)}) is offsets
    found = documents({"seq_idx": torch.tensor([[4, 4, 0, 0, 0, 4]])})
    assert found is not None
    assert found.tolist() == [0, 2, 5, 6]
    with pytest.raises(Unsupported, match=r"seq_idx has shape \[2, 5\]"):
        documents({"seq_idx": torch.zeros(2, 5)})
