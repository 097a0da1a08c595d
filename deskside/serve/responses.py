"""Responses of the OpenAI API, complete or as a stream of server-sent events.

Each event of a stream is a line that begins with `data: `, followed by an empty line (WHATWG HTML, "Server-sent
events"). The data are OpenAI's chunks in JSON; the last event is `data: [DONE]`, or an error object.
"""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from deskside.engine.requests import Event, SampleOutput
from deskside.engine.text import REPLACEMENT

DONE = b"data: [DONE]\n\n"
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


def sse(value: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(prompt_lengths: Sequence[int], completion_tokens: int, cached: Sequence[int]) -> dict[str, Any]:
    """Return the token counts of a response. A prompt counts once for all of its choices.

    cached: tokens of each prompt that its first choice found in the prefix cache.
    """
    return {
        "prompt_tokens": sum(prompt_lengths),
        "completion_tokens": completion_tokens,
        "total_tokens": sum(prompt_lengths) + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
    }


class ResponseWriter:
    """Creates the JSON objects of one chat or text completion."""

    def __init__(self, chat: bool, model: str, fingerprint: str, tokenizer: Tokenizer, logprobs: bool):
        self.chat, self.logprobs = chat, logprobs
        self._tokenizer = tokenizer
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def complete(
        self, answers: Sequence[SampleOutput], prompt_lengths: Sequence[int], cached: Sequence[int]
    ) -> dict[str, Any]:
        """Return the response of a request without streaming; one answer per choice."""
        choices: list[dict[str, Any]] = []
        for index, answer in enumerate(answers):
            assert answer.reason is not None
            logprobs = self._logprobs(answer.tokens, answer.logprobs, 0) if self.logprobs else None
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            content = {"message": message} if self.chat else {"text": answer.text}
            finish_reason = FINISH_REASONS[answer.reason]
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason})
        return {
            **self._common,
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": choices,
            "usage": usage(prompt_lengths, sum(len(answer.tokens) for answer in answers), cached),
        }

    def first_chunk(self, index: int) -> bytes:
        """Return the first chunk of a choice in a chat stream."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def chunk(self, index: int, event: Event, offset: int) -> bytes:
        """Return the chunk of an event. `offset`: characters of the choice in earlier chunks."""
        content: dict[str, Any] = {"delta": {"content": event.text}} if self.chat else {"text": event.text}
        if self.chat and not event.text and event.reason is not None:
            content = {"delta": {}}
        logprobs = None
        if self.logprobs and event.token is not None and event.logprob is not None:
            logprobs = self._logprobs([event.token], [event.logprob], offset)
        finish_reason = None if event.reason is None else FINISH_REASONS[event.reason]
        return self._chunk(index, content, logprobs, finish_reason)

    def usage_chunk(
        self, prompt_lengths: Sequence[int], completion_tokens: int, cached: Sequence[int]
    ) -> bytes:
        """Return the last chunk of a stream: the token counts."""
        return self._sse([], {"usage": usage(prompt_lengths, completion_tokens, cached)})

    def _chunk(self, index: int, content: dict[str, Any], logprobs: Any, finish_reason: str | None) -> bytes:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._sse([choice], {})

    def _sse(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return sse({**self._common, "object": kind, "choices": choices, **extra})

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float], offset: int) -> dict[str, Any]:
        """Return OpenAI's logprobs object. A token with only a part of a character has U+FFFD in its text."""
        texts = [str(self._tokenizer.decode([token], skip_special_tokens=False)) for token in tokens]
        if self.chat:
            content = [
                {
                    "token": text,
                    "logprob": logprob,
                    "bytes": None if REPLACEMENT in text else list(text.encode()),
                    "top_logprobs": [],
                }
                for text, logprob in zip(texts, logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }
