"""Log-probabilities in the form of OpenAI's responses.

A token that is only a part of a character has U+FFFD in its text. A token that begins a word has the space before it,
except at the beginning of a text, where SentencePiece's decoders drop it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from deskside.engine.requests import TopTokens
from deskside.engine.text import REPLACEMENT


class ScoredToken(NamedTuple):
    """A token with its log-probability and the most probable tokens in its place.

    logprob: None for the first token of a prompt. in_text: False for a start token that is not part of the text.
    begins: True for the first token of a text.
    """

    token: int
    logprob: float | None
    top: TopTokens = ()
    in_text: bool = True
    begins: bool = False


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[ScoredToken]) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion."""
    return {"content": chat_tokens(tokenizer, tokens), "refusal": None}


def chat_tokens(tokenizer: Tokenizer, tokens: Iterable[ScoredToken]) -> list[dict[str, Any]]:
    """Return the tokens of an answer with their alternatives."""
    text_of = _text_of_tokens(tokenizer)

    def entry(token: int, logprob: float | None, begins: bool) -> dict[str, Any]:
        text = text_of(token, begins)
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if REPLACEMENT in text else list(text.encode()),
        }

    return [
        {
            **entry(scored.token, scored.logprob, scored.begins),
            "top_logprobs": [entry(*pair, scored.begins) for pair in scored.top],
        }
        for scored in tokens
    ]


def text_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ScoredToken], has_top: bool, offset: int
) -> dict[str, Any]:
    """Return the `logprobs` of a text completion. offset: of the first token in the text, in characters."""
    text_of = _text_of_tokens(tokenizer)
    texts = [text_of(scored.token, scored.begins) for scored in tokens]
    offsets = []
    for text, scored in zip(texts, tokens, strict=True):
        offsets.append(offset)
        offset += len(text) if scored.in_text else 0
    tops = [_top_by_text(text_of, text, scored) for text, scored in zip(texts, tokens, strict=True)]
    return {
        "tokens": texts,
        "token_logprobs": [scored.logprob for scored in tokens],
        "top_logprobs": tops if has_top else None,
        "text_offset": offsets,
    }


def _text_of_tokens(tokenizer: Tokenizer) -> Callable[[int, bool], str]:
    """Return a function of a token, which may be special, and of whether it begins a text, that returns its text.

    It decodes each token once.
    """
    before = tokenizer.encode("a", add_special_tokens=False).ids
    text_before = tokenizer.decode(before, skip_special_tokens=False)

    @cache
    def text_of(token: int, begins: bool) -> str:
        if not begins:
            text = str(tokenizer.decode([*before, token], skip_special_tokens=False))
            if text.startswith(text_before):
                return text.removeprefix(text_before)
        return str(tokenizer.decode([token], skip_special_tokens=False))

    return text_of


def _top_by_text(
    text_of: Callable[[int, bool], str], text: str, scored: ScoredToken
) -> dict[str, float] | None:
    """Return the log-probabilities by text, also of the token itself. Of tokens with one text, the best counts."""
    if scored.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in scored.top:
        found.setdefault(text_of(token, scored.begins), logprob)
    found.setdefault(text, scored.logprob)
    return found
