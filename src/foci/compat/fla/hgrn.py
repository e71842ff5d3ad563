"""fla.ops.hgrn on the elementwise scan."""

from __future__ import annotations

from torch import Tensor

from foci.compat.fla.arguments import Run
from foci.core.errors import ShapeError
from foci.core.shapes import dense
from foci.ops.scan.api import scan


def chunk_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """HGRN: h_t = exp(g_t) h_{t-1} + x_t, elementwise.

    x and g [B,T,D], g in natural log; initial_state [B,D] -> (h [B,T,D], final state or None).
    Paper: Qin et al. 2023 (arXiv 2311.04823).
    """
    return fused_recurrent_hgrn(x, g, initial_state, output_final_state)


def fused_recurrent_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_hgrn`, for packed documents too."""
    if dense("fla", "x", x).dim() == 3:  # scan says what is wrong with another
        Run(None, initial_state, output_final_state, cu_seqlens).check(x)
        if initial_state is not None and initial_state.shape[1:] != x.shape[2:]:
            expected = f"[N, D] = {[len(initial_state), x.shape[2]]}"
            raise ShapeError(f"fla: initial_state has shape {list(initial_state.shape)}; expected {expected}")
    return scan(x, g, state=initial_state, offsets=cu_seqlens, return_state=bool(output_final_state))
