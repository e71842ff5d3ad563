"""What programs have summed is added up, of no columns but those there are."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foci.core.tune import interpreting
from foci.tiles.sums import total

if not interpreting() and not torch.cuda.is_available():
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1, which `make test` sets for these", allow_module_level=True)

DEVICE = torch.device("cpu" if interpreting() else "cuda")


@triton.jit
def _totals(sums_ptr, out_ptr, S, M):  # type: ignore[no-untyped-def]
    m = tl.arange(0, 16)
    tl.store(out_ptr + m, total(sums_ptr, m, S, M, 4))


@pytest.mark.parametrize("rows", [0, 1, 4, 11])
def test_sums_of_rows(rows: int) -> None:
    kept = torch.randn(rows * 9 + 16, device=DEVICE)  # what lies behind is nobody's
    sums, out = kept[: rows * 9].view(rows, 9), torch.empty(16, device=DEVICE)
    _totals[(1,)](kept, out, rows, 9)
    torch.testing.assert_close(out, torch.cat([sums.sum(0), torch.zeros(7, device=DEVICE)]))
