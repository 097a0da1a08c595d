"""Log-probabilities in the form of OpenAI's responses.

A token that is only a part of a character has U+FFFD in its text.
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
    """

    token: int
    logprob: float | None
    top: TopTokens = ()
    in_text: bool = True


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[ScoredToken]) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion."""
    return {"content": chat_tokens(tokenizer, tokens), "refusal": None}


def chat_tokens(tokenizer: Tokenizer, tokens: Iterable[ScoredToken]) -> list[dict[str, Any]]:
    """Return the tokens of an answer with their alternatives."""
    text_of = _text_of_tokens(tokenizer)

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = text_of(token)
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if REPLACEMENT in text else list(text.encode()),
        }

    return [
        {**entry(scored.token, scored.logprob), "top_logprobs": [entry(*pair) for pair in scored.top]}
        for scored in tokens
    ]


def text_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ScoredToken], has_top: bool, offset: int
) -> dict[str, Any]:
    """Return the `logprobs` of a text completion. offset: of the first token in the text, in characters."""
    text_of = _text_of_tokens(tokenizer)
    texts = [text_of(scored.token) for scored in tokens]
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


def _text_of_tokens(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Return a function that returns the text of one token, also of a special one. It decodes each token once."""
    return cache(lambda token: str(tokenizer.decode([token], skip_special_tokens=False)))


def _top_by_text(text_of: Callable[[int], str], text: str, scored: ScoredToken) -> dict[str, float] | None:
    """Return the log-probabilities by text, also of the token itself. Of tokens with one text, the best counts."""
    if scored.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in scored.top:
        found.setdefault(text_of(token), logprob)
    found.setdefault(text, scored.logprob)
    return found
