"""What transformers computes round a recurrence, by foci's kernels on a GPU: short convolutions and gated norms.

Elsewhere, and where foci has no such kernel, the model's own code runs; but for the convolution of packed documents.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from foci.core.plans import on_gpu
from foci.integrations.transformers_keywords import asked, documents
from foci.integrations.transformers_recurrences import How, Run, learns
from foci.nn.parts import history
from foci.ops.layer_parts import ACTIVATIONS, Norm, convolve, convolve_step, known

GATED_NORM = "RMSNormGated"  # with which the names of transformers' classes end


def short_convolution(how: How, theirs: Run) -> Run:
    """Their short convolution [B,D,T] on a GPU, where torch's takes longer, and per packed document everywhere.

    Theirs refuses packed documents, or mixes them.
    """

    def run(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **keywords: Any,
    ) -> Tensor:
        offsets = documents(asked(keywords))
        if offsets is None and not on_gpu(hidden_states):
            return theirs(hidden_states, weight, bias, activation=activation)
        x, ages = hidden_states.transpose(1, 2), None
        if offsets is not None:  # x may be longer than the documents: it begins with tokens from the cache
            ends = offsets[1:].to(x.device, non_blocking=True) + (x.shape[1] - offsets[-1])
            ages = history(x, 0, offsets=pad(ends, (1, 0)), return_tail=False).ages
        ours = known(activation)
        y = convolve(x, weight[:, None], bias, activation if ours else None, ages=ages)
        if not ours:
            from transformers.activations import ACT2FN

            y = ACT2FN[activation](y)
        return y.transpose(1, 2)

    return run


def step_convolution(how: How, theirs: Run) -> Run:
    """The same for one token behind conv_state [B,D,S], the cache's own tensor, which is changed in place."""

    def run(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        before = weight.shape[-1] - 1
        spare = conv_state.shape[-1] - before  # tokens that the cache keeps, but no tap reaches
        ours = hidden_states.shape[-1] == 1 and before > 0 and spare >= 0 and known(activation)
        if not ours or not on_gpu(hidden_states) or learns(hidden_states, conv_state, weight, bias):
            return theirs(hidden_states, conv_state, weight, bias, activation)
        if spare:
            older = conv_state[..., 1 : spare + 1]
            conv_state[..., :spare].copy_(older if spare == 1 else older.clone())  # several overlap
        tail = conv_state[..., spare:].transpose(1, 2)
        return convolve_step(hidden_states[..., 0], tail, weight[:, None], bias, activation)[..., None]

    return run


def gated_norm(module: nn.Module) -> Run | None:
    """The forward of a gated norm for `module` to have in place of its own; None if it computes something else.

    What that is, is found by trying it: on a few numbers it must equal one of the norms that foci has.
    """
    theirs = type(module).forward
    recognised = _recognise(module, theirs)
    if recognised is None:
        return None
    activation, gate_first = recognised

    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None or not on_gpu(hidden_states):
            return theirs(self, hidden_states, gate)
        return _norm(self, hidden_states, activation, gate_first)(hidden_states, self.weight, gate)

    return forward


def _norm(module: Any, x: Tensor, activation: str, gate_first: bool) -> Norm:
    """By the names that transformers' gated norms have for their options."""
    size = getattr(module, "group_size", None)
    groups = getattr(module, "n_groups", 1) if size is None else x.shape[-1] // size
    return Norm(groups, module.variance_epsilon, True, activation, gate_first)


@torch.no_grad()
def _recognise(module: nn.Module, theirs: Run) -> tuple[str, bool] | None:
    """The activation and order with which foci's norm equals `theirs`, on a CPU and by a weight of its own.

    A weight that is made of others (a parametrization) is not read, which may change it; such a norm is not recognised.
    """
    held, eps = module._parameters.get("weight"), getattr(module, "variance_epsilon", None)
    if not isinstance(held, Tensor) or held.dim() != 1 or not isinstance(eps, float):
        return None
    own = object.__new__(type(module))  # copy.copy asks modules for a state that some refuse to give
    with _disable_current_modes():  # under which numbers may be fake
        numbers = torch.linspace(-2, 2, 5 * held.shape[0], device="cpu", dtype=torch.float32).sin().view(5, 1, -1)
        weight = 1 + numbers[0, 0]
        vars(own).update(vars(module), _parameters={"weight": weight})
        x, gate = numbers[1:3].clone(), numbers[3:]
        x[1] *= eps**0.5  # beside which eps shows
        try:
            right = theirs(own, x, gate)
        except Exception:  # it wants more than a norm has
            return None
        for activation, gate_first in product(ACTIVATIONS, (False, True)):
            found = _norm(own, x, activation, gate_first)(x, weight, gate)
            if found.shape == right.shape and torch.allclose(found, right, rtol=1e-5, atol=1e-6):
                return activation, gate_first
    return None
