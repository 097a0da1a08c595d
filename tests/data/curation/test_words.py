from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deskside.data.curation import words as words_module
from deskside.data.curation.words import Hashes, find_words, pieces, seams

TEXT = st.text(alphabet=st.sampled_from("aB1é .\n#\x00\u200d\U0001f600"), max_size=40)


def test_words_of_scripts_with_marks_and_without_spaces() -> None:
    words = find_words(["The cat, क्षेत्र में 字字a ก็ก"])
    found = [words.phrase(i, 1) for i in range(len(words.hash))]
    assert found == ["The", "cat", "क्षेत्र", "में", "字", "字", "a", "ก็", "ก"]
    assert words.length.tolist() == [3, 3, 4, 1, 1, 1, 1, 1, 1]  # letters without marks
    assert words.single.tolist() == [False] * 4 + [True, True, False, True, True]


@given(st.lists(TEXT, min_size=1, max_size=4))
@settings(deadline=None)
def test_words_and_lines_are_those_of_a_regular_expression(texts: list[str]) -> None:
    words = find_words(texts)
    expected = [[word.lower() for word in re.findall("[aB1é\u200d]+", text)] for text in texts]
    assert np.diff(words.first_word).tolist() == [len(part) for part in expected]
    hashes: dict[str, int] = {}
    flat = [word for part in expected for word in part]
    for word, value in zip(flat, words.hash.tolist(), strict=True):
        assert hashes.setdefault(word, value) == value
    assert len(set(hashes.values())) == len(hashes)
    lines = [line.strip() for text in texts for line in text.split("\n") if line.strip()]
    assert words.line_length.tolist() == [len(line) for line in lines]
    for n in (1, 2, 5):
        at, _ = words.ngrams(n)
        assert len(at) == sum(max(0, len(part) - n + 1) for part in expected)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.data())
def test_hashes_of_spans_are_equal_exactly_for_equal_spans(values: list[int], data: st.DataObject) -> None:
    hashes = Hashes(np.array(values, np.uint64) + np.uint64(1))
    spans = [
        tuple(sorted((data.draw(st.integers(0, len(values))), data.draw(st.integers(0, len(values))))))
        for _ in "ab"
    ]
    (a, b), (c, d) = spans
    one, two = hashes.spans(np.array([a, c]), np.array([b, d])).tolist()
    assert (one == two) == (values[a:b] == values[c:d])


def test_pieces_are_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "PIECE", 10)
    for text in ("", "abc def\nghi jkl mno", "x" * 35):
        parts = pieces(text)
        assert "".join(parts) == text and all(len(part) <= 10 for part in parts)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=30), st.integers(1, 4), st.integers(5, 40))
@example([1, 9, 9], 1, 5)  # the last word is cut, and one whole word before it belongs to the sequence
@settings(deadline=None)
def test_every_sequence_across_a_cut_is_in_a_seam(lengths: list[int], count: int, size: int) -> None:
    text = " ".join(f"{number:x}".rjust(length, "w") for number, length in enumerate(lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words_module, "PIECE", size)
        parts = pieces(text)
    found = [f" {seam} " for seam in seams(parts, count)]
    words, end = text.split(" "), 0
    for part in parts[:-1]:
        end += len(part)
        before = len(text[:end].split())  # words that begin before this cut
        for start in range(max(0, before - count), min(before, len(words) - count)):
            sequence = " ".join(words[start : start + count + 1])
            assert any(f" {sequence} " in seam for seam in found), (sequence, parts)
