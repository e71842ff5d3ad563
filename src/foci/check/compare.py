"""The error budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RELATIVE = 1e-5  # relative RMS error in float32
LOGARITHM = 2e-4  # absolute error of a log-sum-exp: it shows a scale wrong by 0.1 %, which outputs hide
RECURRENT = 5e-3  # relative RMS error of recurrent operators in half precision
HALF = (torch.bfloat16, torch.float16)
CAUSAL = 1e-6  # relative change of the past when the future changes, where the Spec does not declare equal bits

# A gradient this much smaller than the others is a cancellation to about 0: its error is relative to theirs.
VANISHED = 1e-6


@dataclass(frozen=True)
class Error:
    """How far a tensor is from the truth and how far it may be, relative to the truth (absolute for a logarithm)."""

    size: float
    budget: float

    @property
    def ok(self) -> bool:
        return self.size <= self.budget

    @property
    def share(self) -> float:
        """The part of the budget that is used up; above 1 is wrong."""
        if self.size == 0:
            return 0.0
        return self.size / self.budget if self.budget else math.inf


NONE = Error(0.0, RELATIVE)


def compare(
    got: Tensor,
    truth: Tensor,
    yardstick: Tensor,
    dtype: torch.dtype,
    *,
    log: bool = False,
    recurrent: bool = False,
    siblings: float = 0.0,
) -> Error:
    """The error of a tensor that uses up the most of its budget.

    float32 and float64: relative RMS error <= 1e-5. Half precision: max error <= 2 x and relative RMS error <= 1 x that
    of the `yardstick`, the |error| of a plain computation in the same dtype, but never stricter than for float32;
    recurrent operators: relative RMS error <= 5e-3. A logarithm: absolute error <= 2e-4, and in float32 RMS <= 1e-5,
    relative to at least 1. Elements that are not finite in the plain computation are left out. `siblings`: the largest
    RMS, over nonzero elements, of the gradients of the same loss.
    """
    if truth.numel() == 0:
        return NONE
    error, half = difference(got, truth), dtype in HALF
    if half and not log and not recurrent and yardstick.shape == error.shape:
        error, truth, yardstick = (each.masked_fill(yardstick == torch.inf, 0.0) for each in (error, truth, yardstick))
    scale = extent(truth)
    if scale <= VANISHED * siblings:
        scale = siblings
    if log:
        found = [Error(float(error.max()), LOGARITHM)]
        if not half:
            found.append(_relative(rms(error), RELATIVE * max(scale, 1.0), max(scale, 1.0)))
    elif not half:
        found = [_relative(rms(error), RELATIVE * scale, scale)]
    elif recurrent:
        found = [_relative(rms(error), RECURRENT * scale, scale)]
    elif rms(error) <= RELATIVE * scale:  # never held to more than float32 is
        found = [_relative(rms(error), RELATIVE * scale, scale)]
    else:
        found = [
            _relative(rms(error), rms(yardstick), scale),
            _relative(float(error.max()), 2 * float(yardstick.max()), scale),
        ]
    return max(found, key=lambda each: each.share)


def twice(got: Tensor, plain: Tensor, truth: Tensor) -> Error:
    """The maximum error, with twice the maximum error of a plain computation as its budget."""
    if truth.numel() == 0:
        return NONE
    scale = extent(truth)
    return _relative(float(difference(got, truth).max()), 2 * float(difference(plain, truth).max()), scale)


def changed(got: Tensor, before: Tensor, bitwise: bool) -> Error:
    """How much a tensor changed that must not change: not a bit, or each element by 1e-6 of itself or of the RMS.

    Of itself, since one ulp of an element of eight times the RMS exceeds 1e-6 of the RMS: another order of summation
    changes it.
    """
    budget = 0.0 if bitwise else CAUSAL
    if before.numel() == 0:
        return Error(0.0, budget)
    error, scale = difference(got, before), extent(before)
    if scale == 0 or not math.isfinite(scale):
        return Error(float(error.max()), budget and budget * scale)
    size = before.detach().to(torch.float64).abs().clamp(min=scale)
    return Error(float(torch.where(error == 0, 0.0, error / size).nan_to_num(torch.inf, torch.inf).max()), budget)


def difference(got: Tensor, truth: Tensor) -> Tensor:
    """|got - truth| in float64: 0 where both are the same infinity, infinite where anything else is not finite."""
    got, truth = got.detach().to(torch.float64), truth.detach().to(torch.float64)
    error = torch.where(got == truth, 0.0, (got - truth).abs())
    return error.nan_to_num(nan=torch.inf, posinf=torch.inf)


def rms(tensor: Tensor) -> float:
    """Root mean square over finite elements; infinite if an element is +inf, as `difference` marks errors."""
    tensor = tensor.detach().to(torch.float64)
    if not tensor.numel():
        return 0.0
    if bool((tensor == torch.inf).any()):
        return math.inf
    return float(tensor.masked_fill(tensor == -torch.inf, 0.0).square().mean().sqrt())


def extent(truth: Tensor) -> float:
    """The scale of a reference: RMS over its finite elements, so that infinities do not loosen the budget of others."""
    return rms(truth.masked_fill(truth == torch.inf, 0.0))


def _relative(error: float, budget: float, scale: float) -> Error:
    if scale == 0 or not math.isfinite(scale):
        return Error(error, budget)
    return Error(error / scale, budget / scale)
