"""Problems of the selective scan for the tests of its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softplus

from foci.ops.draw import Draw
from tests.ops.recurrences import CPU


def problem(T: int, D: int = 5, B: int = 1, N: int | None = None, K: int = 3) -> dict[str, Any]:
    draw = Draw(torch.float32, CPU, T)
    tokens = {"x": draw.normal(B, T, D), "dt": softplus(draw.normal(B, T, D) - 2)}
    tokens |= {"A": -2 * draw.uniform(D, K), "B": draw.normal(B, T, K), "C": draw.normal(B, T, K)}
    return tokens | {"skip": draw.normal(D), "state": draw.state(N or B, D, K)}
