"""Excluded NaN is found; what is told once as a wrong forward is not told again as another fault."""

from __future__ import annotations

from typing import Any

import torch

from foci.check.run import examine
from foci.ops.masks import Mask
from foci.ops.softmax.api import attention_with_lse
from foci.ops.softmax.conventions import adapt
from foci.ops.softmax.spec import SPEC
from tests.check.effects_gallery import ByHand
from tests.check.gallery import no_maximum_subtracted
from tests.check.test_laws import ask, ours


def test_excluded_nan() -> None:
    law = "unwritten memory, strides, excluded NaN"
    assert ask(law, ours()) == []

    def attend(q, k, v, *, mask: Mask | None = None, bias=None, softcap=None, sink=None, scale=None, dropout=0.0):
        out, lse = attention_with_lse(
            q, k, v, mask=mask, bias=bias, softcap=softcap, sink=sink, scale=scale, dropout=dropout
        )
        return out + 0 * v.sum(), lse

    told = ask(law, adapt(attend))
    assert told and "NaN in keys or values that the mask excludes" in told[0]


def test_the_programs_default_dtype() -> None:
    def attend(q, k, v, *, mask: Mask | None = None, bias=None, softcap=None, sink=None, scale=None, dropout=0.0):
        out, lse = attention_with_lse(
            q, k, v, mask=mask, bias=bias, softcap=softcap, sink=sink, scale=scale, dropout=dropout
        )
        return out + (torch.empty(0).element_size() - 4), lse  # as if the rest of wider memory were not written

    told = ask("unwritten memory, strides, excluded NaN", adapt(attend))
    assert told and "the program's default dtype" in told[0]


def test_a_backward_that_raises_anyway_depends_on_no_strides() -> None:
    law = "unwritten memory, strides, excluded NaN"

    def written_to(q, k, v):
        """Where einsum kept a copy its backward passes; of other strides einsum keeps the tensor itself."""
        p = (torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        out = torch.einsum("bhts,bshd->bthd", p, v)
        with torch.no_grad():
            v.nan_to_num_(0)
        return out

    assert ask("gradients", adapt(written_to)) and ask(law, adapt(written_to)) == []

    class Dense(ByHand):
        forward = staticmethod(ByHand.forward)

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return ByHand.backward(ctx, dout.view(-1).view(dout.shape))

    told = ask(law, adapt(lambda q, k, v: Dense.apply(q, k, v)))
    assert any("the gradient depends on the strides" in sentence for sentence in told)


def test_nan_is_the_forwards_fault_alone() -> None:
    laws = ["forward", "batch slot", "unwritten memory, strides, excluded NaN", "same bits twice"]
    report = examine(SPEC, adapt(no_maximum_subtracted), only=laws, dtypes=(torch.float32,), isolated=False)
    assert [row.law for row in report.rows if row.failures] == ["forward"]
