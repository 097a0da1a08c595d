"""Streamed text: never half a character, and in sum exactly what decoding everything at once gives."""

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deskside.data.tokenizer import SPECIAL_TOKENS, train
from deskside.engine.text import REPLACEMENT, TextStream


@cache
def tokenizer() -> Tokenizer:
    """Hardly any merges, so that most characters beyond ASCII are several tokens."""
    return train(["hello world, hello there"] * 3, vocab_size=270)


@given(st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_text_comes_in_whole_characters(text: str) -> None:
    text = text.replace(REPLACEMENT, "")
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
    """A model may emit bytes that are no UTF-8, and special tokens, which show as nothing."""
    tokens = [token for token in tokens if tokenizer().id_to_token(token) is not None]
    stream = TextStream(tokenizer())
    text = "".join(stream.push(token) for token in tokens) + stream.finish()
    assert text == tokenizer().decode(tokens)


def test_special_tokens_are_silent() -> None:
    stream = TextStream(tokenizer())
    ids = [tokenizer().token_to_id(name) for name in SPECIAL_TOKENS]
    a = tokenizer().token_to_id("a")
    assert [stream.push(token) for token in [a, *ids, a]] == ["a", "", "", "", "a"]
