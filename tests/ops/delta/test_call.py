"""Call: sizes, defaults, and log_decay in its one form whatever its rank."""

from __future__ import annotations

import pytest
import torch

from foci.core.library import _schema
from foci.ops.delta.call import Call, bind

B, T, G, H, K, V = 2, 5, 1, 3, 4, 6
ARGS = (torch.zeros(B, T, G, K), torch.zeros(B, T, G, K), torch.zeros(B, T, H, V), torch.zeros(B, T, H))


@pytest.mark.parametrize(
    ("shape", "form"), [((H,), (1, 1, H, 1)), ((B, T, H), (B, T, H, 1)), ((B, T, H, K), (B, T, H, K))]
)
def test_decay_has_one_form(shape: tuple[int, ...], form: tuple[int, ...]) -> None:
    call = bind(*ARGS, log_decay=torch.zeros(shape))
    assert call.log_decay is not None
    assert call.log_decay.shape == form


def test_sizes_and_defaults() -> None:
    call = bind(*ARGS)
    assert call.sizes == (B, T, G, H, K, V, B)
    assert call.scale == 0.5
    assert call.accumulator == torch.float32
    packed = bind(*(x[:1] for x in ARGS), offsets=torch.tensor([0, 0, 5], dtype=torch.int32))
    assert packed.sizes[-1] == 2


def test_the_schema_names_every_field() -> None:
    assert [part.split()[1] for part in _schema(Call).split(", ")] == list(Call._fields)
