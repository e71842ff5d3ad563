"""Without an order every token sees all others: Sana's way, its normaliser, packed, with a state, past one chunk."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck

import foci


@pytest.mark.parametrize("T", [1, 5, 512, 700])
def test_it_is_one_product(T: int) -> None:
    q, k = torch.randn(2, T, 2, 4, dtype=torch.float64), torch.randn(2, T, 2, 4, dtype=torch.float64)
    v = torch.randn(2, T, 4, 3, dtype=torch.float64)
    out, state = foci.linear_attention(q, k, v, causal=False, scale=0.7, return_state=True)
    q, k = (x.repeat_interleave(2, dim=2) for x in (q, k))
    whole = torch.einsum("bshk,bshv->bhkv", k, v)
    torch.testing.assert_close(state, whole)
    torch.testing.assert_close(out, 0.7 * torch.einsum("bthk,bhkv->bthv", q, whole))


def test_the_normaliser_is_one_more_column() -> None:
    q, k, v = (torch.rand(1, 9, 2, 4, dtype=torch.float64) for _ in range(3))
    ones = torch.ones(1, 9, 2, 1, dtype=torch.float64)
    out, _ = foci.linear_attention(q, k, torch.cat([v, ones], dim=-1), causal=False)
    weights = torch.einsum("bthk,bshk->bhts", q, k)
    expected = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), v)
    torch.testing.assert_close(out[..., :-1] / out[..., -1:], expected)


def test_documents_do_not_see_each_other() -> None:
    q, k, v = (torch.randn(1, 9, 2, 4) for _ in range(3))
    offsets, state = torch.tensor([0, 0, 2, 9]), torch.randn(3, 2, 4, 4)
    out, final = foci.linear_attention(q, k, v, causal=False, offsets=offsets, state=state, return_state=True)
    assert final is not None
    for n, (start, stop) in enumerate(pairwise(offsets.tolist())):
        alone = [x[:, start:stop] for x in (q, k, v)]
        expected, last = foci.linear_attention(*alone, causal=False, state=state[n : n + 1], return_state=True)
        torch.testing.assert_close(out[:, start:stop], expected)
        torch.testing.assert_close(final[n : n + 1], last)


def test_gradients() -> None:
    leaves = [torch.randn(1, 5, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    state = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def both(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, final = foci.linear_attention(*given[:3], state=given[3], causal=False, return_state=True)
        assert final is not None
        return out, final

    assert gradcheck(both, (*leaves, state))
