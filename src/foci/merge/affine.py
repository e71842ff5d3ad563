"""Affine(transition, offset): S -> A S + B, diagonal or dense transition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Affine(NamedTuple):
    """The affine map of a recurrent state S [..., K, V] over a run of tokens: S -> A S + B.

    transition: [..., K] or [..., 1], the diagonal of A (linear attention, scan), or [..., K, K], A itself (delta rule);
    its number of dimensions, next to offset [..., K, V], says which. Consecutive runs combine exactly: (A, B) then
    (A', B') is (A' A, A' B + B'). Differentiable; sums are kept in the dtype of the offset. Offsets of different shapes
    raise ValueError, as does a state of another shape than the offset; what is no Affine raises TypeError.
    Paper: Martin and Cundy 2018 (arXiv 1709.04057).
    """

    transition: Tensor
    offset: Tensor

    @property
    def dense(self) -> bool:
        return self.transition.dim() == self.offset.dim()

    def apply(self, state: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The state after these tokens; written to `out` if given, as in torch's functions."""
        if state.shape != self.offset.shape:
            raise ValueError(
                f"Affine: state has shape {list(state.shape)}; expected {list(self.offset.shape)}, the offset's"
            )
        if self.dense:
            return torch.add(self.transition @ state, self.offset, out=out)
        return torch.addcmul(self.offset, self.transition[..., None], state, out=out)

    def combine(self, later: Affine) -> Affine:
        if not isinstance(later, Affine):
            raise TypeError(f"Affine: a part is of type {type(later).__name__}; expected a foci.Affine, as before it")
        if later.offset.shape != self.offset.shape:
            raise ValueError(
                f"Affine: a part has offset {list(later.offset.shape)}; expected {list(self.offset.shape)}, "
                "the shape of the part before"
            )
        if self.dense and later.dense:
            transition = later.transition @ self.transition
        elif self.dense:
            transition = later.transition[..., None] * self.transition
        elif later.dense:
            transition = later.transition * self.transition[..., None, :]
        else:
            transition = later.transition * self.transition
        return Affine(transition, later.apply(self.offset))

    def neutral(self) -> Affine:
        if self.dense:
            one = torch.eye(self.transition.shape[-1], dtype=self.transition.dtype, device=self.transition.device)
            return Affine(one.expand_as(self.transition), torch.zeros_like(self.offset))
        return Affine(torch.ones_like(self.transition), torch.zeros_like(self.offset))
