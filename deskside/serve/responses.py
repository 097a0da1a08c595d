"""Responses of the OpenAI API, complete or as a stream of server-sent events.

A stream is a list of JSON objects behind `data: `, each followed by an empty line, and `data: [DONE]` at its end
(WHATWG HTML, "Server-sent events"; the objects are OpenAI's chunks).
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
FINISH = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


def sse(value: dict[str, Any]) -> bytes:
    """Return one event of a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(prompts: Sequence[int], completion: int) -> dict[str, int]:
    """Return token counts: each prompt once, and all generated tokens."""
    return {
        "prompt_tokens": sum(prompts),
        "completion_tokens": completion,
        "total_tokens": sum(prompts) + completion,
    }


class ResponseWriter:
    """Makes the JSON objects of one chat or text completion."""

    def __init__(self, chat: bool, model: str, fingerprint: str, tokenizer: Tokenizer, logprobs: bool):
        self.chat, self.logprobs = chat, logprobs
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, answers: Sequence[SampleOutput], prompts: Sequence[int]) -> dict[str, Any]:
        """Return the response to a request without streaming; `answers` are in the order of the choices."""
        choices: list[dict[str, Any]] = []
        for index, answer in enumerate(answers):
            assert answer.reason is not None
            given = self._logprobs(answer.tokens, answer.logprobs, 0) if self.logprobs else None
            says = {"role": "assistant", "content": answer.text, "refusal": None}
            content = {"message": says} if self.chat else {"text": answer.text}
            choices.append(
                {"index": index, **content, "logprobs": given, "finish_reason": FINISH[answer.reason]}
            )
        return {
            **self._head,
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": choices,
            "usage": usage(prompts, sum(len(answer.tokens) for answer in answers)),
        }

    def first(self, index: int) -> bytes:
        """Return the first chunk of a choice in a chat stream."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def piece(self, index: int, event: Event, offset: int) -> bytes:
        """Return a chunk of a choice, or its end. `offset` counts the characters of the choice before it."""
        content: dict[str, Any] = {"delta": {"content": event.text}} if self.chat else {"text": event.text}
        if self.chat and not event.text and event.reason is not None:
            content = {"delta": {}}
        given = None
        if self.logprobs and event.token is not None and event.logprob is not None:
            given = self._logprobs([event.token], [event.logprob], offset)
        return self._chunk(index, content, given, FINISH[event.reason] if event.reason is not None else None)

    def counts(self, prompts: Sequence[int], completion: int) -> bytes:
        """Return the last chunk of a stream, with token counts."""
        return self._sse([], {"usage": usage(prompts, completion)})

    def _chunk(self, index: int, content: dict[str, Any], given: Any, finish: str | None) -> bytes:
        return self._sse([{"index": index, **content, "logprobs": given, "finish_reason": finish}], {})

    def _sse(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return sse({**self._head, "object": kind, "choices": choices, **more})

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float], offset: int) -> dict[str, Any]:
        """Return tokens as text with log-probabilities. A partial character is shown as U+FFFD."""
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
