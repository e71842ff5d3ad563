"""A chunk's gradients where blocks are whole, in float32 and, by an interpreter put right, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from foci.core.tune import interpreting
from foci.ops.delta.api import delta_rule
from foci.ops.delta.cases import Delta
from foci.ops.delta.spec import SPEC
from tests.ops.delta.test_kernels_triton_backward import CPU, apart, draws, found, truth
from tests.ops.recurrences import BUDGET, error, exact

from foci.ops.delta import kernels_triton_tokens as tokens  # isort: skip  after Triton's presence is known


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes bfloat16's bits for numbers in a product, and cuts digits off where a GPU rounds."""
    if not interpreting():
        return
    interpreter = triton.runtime.interpreter
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    product: Callable[..., Any] = builder.create_dot
    cast: Callable[..., Any] = builder.cast_impl

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(self: Any, x: Any, to: Any) -> Any:
        if (x.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, x, to)
        bits = x.data.view(np.uint32).astype(np.uint64)
        return handle(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16), tl.bfloat16)

    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *rest: product(self, widened(a), widened(b), *rest))
    monkeypatch.setattr(builder, "cast_impl", rounded)


def even(dtype: torch.dtype, T: int = 70, **more: Any) -> dict[str, Any]:
    """Four heads on two of keys; whole blocks of K and V."""
    options = {"B": 1, "H": 4, "G": 2, "K": 64, "V": 64, "decay": "token", "state": True} | more
    return Delta("", T=T, **options).case.make(dtype, CPU, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{"B": 2}, {"erase": True}, {"decay": "head"}, {"offsets": (0, 3, 3, 70)}])
def test_whole_blocks(more: dict[str, Any]) -> None:
    errors = apart(even(torch.float32, K=32, V=32, **more))
    assert all(e <= BUDGET[torch.float32] for e in errors.values()), errors


@pytest.mark.usefixtures("bfloat16")
class TestInBfloat16:
    @pytest.mark.parametrize("more", [{"B": 2, "decay": ""}, {"erase": True}, {"offsets": (0, 3, 3, 70)}])
    def test_by_descriptors(self, more: dict[str, Any]) -> None:
        errors = apart(even(torch.bfloat16, **more))
        assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors

    def test_by_pointers(self) -> None:
        """What TMA does not read: heads of the incoming gradient that do not lie side by side."""
        inputs = even(torch.bfloat16, decay="head")
        out, final = draws(SPEC.bind(**inputs))
        errors = apart(inputs, (out.transpose(1, 2).contiguous().transpose(1, 2), final))
        assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors

    @pytest.mark.parametrize("alike", ["identical", "correlated"])
    def test_blocks_in_part_and_alike_keys(self, alike: str) -> None:
        errors = apart(even(torch.bfloat16, K=20, V=12, alike=alike, beta=2.0, full=True))
        assert all(e <= BUDGET[torch.bfloat16] for e in errors.values()), errors

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("decay", ["head", "channel"])
    def test_gates_of_a_head_are_right_to_more_where_no_token_pulls_the_other_way(self, decay: str, seed: int) -> None:
        """A head's gate is in all tokens, whose gradients may cancel, and what was rounded does not: then it misses.

        So judged are |out|^2 / 2 and |state|^2 / 2, of which each token has more with less decay. What is rounded to
        the nearest is gone in the sum, in every draw; what is cut off, of one operand alone, leaves 1e-3.
        """
        problem = Delta("", B=1, T=130, H=2, G=1, K=64, V=64, decay=decay)
        inputs = problem.case.make(torch.bfloat16, CPU, seed)
        out, final = delta_rule(**exact(inputs), return_state=True, backend="chunked")
        grads = out.bfloat16(), final.float()
        got, wanted = (gradients(inputs, grads)["log_decay"] for gradients in (found, truth))
        if decay == "channel":
            got, wanted = (x.double().sum((0, 1, 3)) for x in (got, wanted))
        assert error(got, wanted) <= BUDGET[torch.bfloat16] / 20


def test_places_that_32_bits_do_not_number_are_taken_one_by_one() -> None:
    class Problem:
        call = SPEC.bind(**even(torch.float32))
        erase = call.k
        G, K, V = 2, 64, 64

    config, near = tokens.Config({"BLOCK_K": 64, "BLOCK_V": 32}), torch.empty(1, 70, 4, 64)
    far = torch.empty(1, device="meta").as_strided((1, 70, 4, 64), (1, 2**25, 64, 1))
    assert tokens._even(Problem, near, config) and not tokens._even(Problem, far, config)


def test_heads_that_32_bits_do_not_number_are_copied() -> None:
    class Problem:
        H, G = 32, 1

    near, far = (
        torch.empty(1, device="meta").as_strided((1, 70, 32, 64), (1, 64, step, 1)) for step in (2**26 - 1, 2**26)
    )
    assert tokens._close(near, Problem) is near and tokens._close(far, Problem).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_wait_in_their_own_place_where_its_range_holds_sums(dtype: torch.dtype) -> None:
    found = torch.empty(3, dtype=dtype)
    waiting = tokens._waiting(found)
    assert waiting is not None and tokens._waiting(None) is None
    assert (waiting is found) == (dtype != torch.float16) and (waiting is found or waiting.dtype == torch.float32)
