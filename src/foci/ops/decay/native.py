"""C++ in chunks: the CPU backend where a compiler is, O(T) memory, its own backward (ops/native.py)."""

from __future__ import annotations

from foci.ops.native import backward, forward, kept, reasons

__all__ = ["backward", "forward", "kept", "reasons"]
