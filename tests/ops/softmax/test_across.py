"""Cases that ranks share, and how their tensors are cut."""

from __future__ import annotations

import pytest
import torch

from foci.check.orders import places
from foci.ops.masks import Causal, Dense, Lengths
from foci.ops.softmax import across

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_lengths_and_heads_are_shared_unless_a_feature_says_otherwise(size: int) -> None:
    names = [case.name for case in across.cases(size)]
    assert len(set(names)) == len(names)
    for case in across.cases(size):
        inputs = case.make(torch.float32, CPU, 0)
        q, k = inputs["q"], inputs["k"]
        even = q.shape[1] % (2 * size) == 0 and k.shape[1] % (2 * size) == 0
        assert even or "uneven lengths" in case.features
        assert q.shape[2] % size == 0 or "uneven heads" in case.features
        assert k.shape[2] % size == 0 or {"few key heads", "uneven heads"} & case.features


def test_every_feature_of_attention_is_there() -> None:
    features = frozenset().union(*(case.features for case in across.cases(3)))
    assert features >= {
        "causal", "window", "padding", "packed", "dense", "bias", "softcap", "sink", "gqa", "value width", "cross",
        "dropout", "scale", "uneven lengths", "uneven heads",
    }  # fmt: skip


def test_what_is_cut() -> None:
    split, x = across.split("bthd"), torch.ones(2, 6, 4, 8)
    assert split("q", x) == 1 and across.split("bhtd")("q", x) == 2
    assert split("attn_mask", torch.ones(2, 1, 6, 12)) == 2 and split("bias", torch.ones(4, 6, 6)) == 1
    assert split("mask", torch.ones(2, 1, 1, 12)) is None and split("sink", torch.ones(4)) is None


def test_where_shards_are_joined() -> None:
    joined = across.joined("bthd")
    assert joined(0, torch.ones(2, 6, 4, 8), 6) == 1
    assert joined(1, torch.ones(2, 6, 4), 6) == 1 and joined(1, torch.ones(2, 4, 6), 6) == 2
    assert across.joined("bhtd")(1, torch.ones(2, 6, 6), 6) == 2


def test_rows_of_a_dense_mask_are_shared_and_the_rest_is_of_the_whole() -> None:
    allowed = torch.rand(2, 1, 6, 6) < 0.5
    parts = across.share(Causal() & Dense(allowed), lambda length: places("stripe", length, 2))
    assert parts is not None and len(parts) == 2
    dense = next(part for part in parts[1].parts if isinstance(part, Dense))
    assert torch.equal(dense.allowed, allowed[:, :, 1::2])
    assert across.share(Lengths(torch.tensor([3, 2])), lambda length: []) is None
    assert across.share(Dense(allowed[:, :, :1]), lambda length: []) is None
