"""Every mistake is wrong somewhere, and none is wrong where it does not apply."""

from __future__ import annotations

from foci.ops.scan import mistakes
from foci.ops.scan.spec import SPEC
from tests.ops.in_slices import InMistakes


class TestMistakes(InMistakes):
    spec, module = SPEC, mistakes

    def test_few_apply_to_a_plain_case(self) -> None:
        silent = {mistake.name for mistake in SPEC.mistakes} - self.wrong_in_a_plain_case()
        assert silent == {
            "state ignored", "state of the first row", "state of whole blocks of 64", "documents ignored",
        }  # fmt: skip
