"""Streamed text never contains half a character, and its pieces add up to the text decoded at once."""

from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deskside.data.tokenizer import SPECIAL_TOKENS, train
from deskside.engine.text import REPLACEMENT, TextStream
from deskside.utils.errors import UsageError
from tests.engine.sentencepiece import make_sentencepiece


@cache
def tokenizer() -> Tokenizer:
    """Return a tokenizer with hardly any merges, so that most characters beyond ASCII are several tokens."""
    return train(["hello world, hello there"] * 3, vocab_size=270)


@given(st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_text_comes_in_whole_characters(text: str) -> None:
    text = text.replace(REPLACEMENT, "")
    assume(not any(special in text for special in SPECIAL_TOKENS))  # these have no text
    stream = TextStream(tokenizer())
    tokens = tokenizer().encode(text, add_special_tokens=False).ids
    pieces = [stream.push(token) for token in tokens]
    assert stream.finish() == ""
    assert "".join(pieces) == text
    assert REPLACEMENT not in "".join(pieces)


def test_every_character_comes_with_its_last_byte() -> None:
    stream = TextStream(tokenizer())
    tokens = tokenizer().encode("\U0001f600a", add_special_tokens=False).ids
    assert [stream.push(token) for token in tokens] == ["", "", "", "\U0001f600", "a"]


@given(st.lists(st.integers(0, 269), max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_tokens_give_the_text_of_all(tokens: list[int]) -> None:
    """A model may emit bytes that are not UTF-8, and special tokens, which have no text."""
    tokens = [token for token in tokens if tokenizer().id_to_token(token) is not None]
    stream = TextStream(tokenizer())
    text = "".join(stream.push(token) for token in tokens) + stream.finish()
    assert text == tokenizer().decode(tokens)


def test_special_tokens_are_silent() -> None:
    stream = TextStream(tokenizer())
    ids = [tokenizer().token_to_id(name) for name in SPECIAL_TOKENS]
    a = tokenizer().token_to_id("a")
    assert [stream.push(token) for token in [a, *ids, a]] == ["a", "", "", "", "a"]
    shown = TextStream(tokenizer(), skip_special_tokens=False)
    assert [shown.push(token) for token in [a, *ids, a]] == ["a", *SPECIAL_TOKENS, "a"]


@given(st.text("abc\U0001f600", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_text_ends_before_the_stop_string_that_is_complete_first(text: str, stops: list[str]) -> None:
    stream = TextStream(tokenizer(), stops)
    said = ""
    for token in tokenizer().encode(text, add_special_tokens=False).ids:
        said += stream.push(token)
        if stream.stopped:
            break
    said += stream.finish()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    seen = text[: min(ends, default=len(text))]  # every letter is a token
    assert said == text[: min((seen.find(stop) for stop in stops if stop in seen), default=len(text))]
    assert stream.stopped == bool(ends)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stream = TextStream(tokenizer(), ["abc", "b!"])
    ids = {c: tokenizer().token_to_id(c) for c in "abc!d"}
    assert [stream.push(ids[c]) for c in "aabd"] == ["", "a", "", "abd"]
    assert [stream.push(ids[c]) for c in "dab"] == ["d", "", ""]
    assert [stream.push(ids["!"]), stream.stopped, stream.push(ids["d"])] == ["a", True, ""]
    assert stream.finish() == ""
    with pytest.raises(UsageError, match="empty"):
        TextStream(tokenizer(), ["x", ""])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("the cat", " sat"),
        ("def the():\n", "    cat"),
        ("é", "\U0001f600 sat"),
        ("the", "cat"),
        ("", "the cat"),
    ],
)
@pytest.mark.parametrize("stops", [(), ("no such text",)])
def test_a_text_that_continues_another_keeps_its_first_space(
    before: str, after: str, stops: tuple[str, ...]
) -> None:
    pieces = make_sentencepiece()
    tokens = pieces.encode(before + after, add_special_tokens=False).ids
    context = pieces.encode(before, add_special_tokens=False).ids if before else [1]
    if after == "cat":
        tokens = [*context, pieces.token_to_id("cat")]
    answer = tokens if not before else tokens[len(context) :]
    stream = TextStream(pieces, stops, context=context)
    assert "".join(stream.push(token) for token in answer) + stream.finish() == after


def test_a_text_that_continues_half_a_character_begins_anew() -> None:
    first, *rest = make_sentencepiece().encode("é", add_special_tokens=False).ids[1:]
    stream = TextStream(make_sentencepiece(), context=[first])
    assert stream.push(rest[0]) + stream.finish() == REPLACEMENT
