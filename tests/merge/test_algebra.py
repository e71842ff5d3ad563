"""fold and scan, on parts whose order shows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from foci.merge.algebra import fold, scan


@dataclass(frozen=True)
class Word:
    """Merging is concatenation: associative, not commutative."""

    text: str

    def combine(self, later: Word) -> Word:
        return Word(self.text + later.text)

    def neutral(self) -> Word:
        return Word("")


WORDS = [Word(letter) for letter in "abcd"]


def test_fold_keeps_the_order() -> None:
    assert fold(WORDS) == Word("abcd")
    assert fold(iter(WORDS)) == Word("abcd")
    assert fold(WORDS[:1]) == Word("a")


def test_fold_is_associative() -> None:
    for cut in range(1, 4):
        assert fold([fold(WORDS[:cut]), fold(WORDS[cut:])]) == fold(WORDS)


def test_fold_of_nothing_has_no_answer() -> None:
    with pytest.raises(ValueError, match="fold: parts is empty; expected at least one part"):
        fold([])


@pytest.mark.parametrize("parts", [[(1, 2)], [Word("a"), (1, 2)]])
def test_fold_of_what_cannot_combine_says_so(parts: list) -> None:
    with pytest.raises(TypeError, match="fold: parts holds a tuple; expected each"):
        fold(parts)


@pytest.mark.parametrize("parts", [None, 3, Word("a")])
def test_fold_of_what_is_not_several_parts_says_so(parts: object) -> None:
    with pytest.raises(TypeError, match=f"fold: parts is of type {type(parts).__name__}; expected several parts"):
        fold(parts)  # type: ignore[type-var]


def test_scan_is_every_fold_of_a_prefix() -> None:
    assert scan(WORDS) == [Word("a"), Word("ab"), Word("abc"), Word("abcd")]
    assert scan(WORDS, inclusive=False) == [Word(""), Word("a"), Word("ab"), Word("abc")]
    assert scan(WORDS[:1], inclusive=False) == [Word("")]
    assert scan([]) == []
