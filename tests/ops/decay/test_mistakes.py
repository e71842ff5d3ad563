"""Every mistake is wrong somewhere, and none is wrong where it does not apply; the right step is the reference."""

from __future__ import annotations

from foci.ops.decay import mistakes
from foci.ops.decay.spec import SPEC
from tests.ops.in_slices import InWalkedMistakes


class TestMistakes(InWalkedMistakes):
    spec, module = SPEC, mistakes

    def test_few_apply_to_a_plain_case(self) -> None:
        assert self.wrong_in_a_plain_case() == {
            "causal ignored", "k normalised",
            "q normalised", "read before the write", "scale off", "scaled twice", "state not handed on",
            "state of whole blocks of 16", "state transposed", "state without the last token", "unscaled",
        }  # fmt: skip
