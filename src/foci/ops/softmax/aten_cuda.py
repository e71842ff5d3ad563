"""torch's fused CUDA kernels behind the contract of aten.py. Written against their schemas; not yet run on a GPU."""

from __future__ import annotations

CUDA_KERNELS: tuple = ()
