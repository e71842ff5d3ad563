"""HGRN against FLA's naive form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foci.compat import fla as ours
from tests.compat.fla.compare import Problem, State, check, forms


@forms("chunk_hgrn", "fused_recurrent_hgrn")
def test_hgrn(fla: Any, name: str, dtype: torch.dtype) -> None:
    naive = fla.naive("hgrn/naive.py", "naive_recurrent_hgrn")

    def theirs(state: State, x: Tensor, g: Tensor) -> tuple[Tensor, State]:
        return naive(x, g, initial_state=state, output_final_state=True)  # type: ignore[no-any-return]

    packed = name == "fused_recurrent_hgrn"  # FLA's chunk_hgrn takes no packed documents
    check(getattr(ours, name), theirs, Problem({"x": (7,), "g": (7,)}, ((7,),)), dtype, packed=packed)
