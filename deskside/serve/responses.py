"""Responses of the OpenAI API, complete or as a stream of server-sent events.

Each event of a stream is a line that begins with `data: `, followed by an empty line (WHATWG HTML, "Server-sent
events"). The data are OpenAI's chunks in JSON; the last event is `data: [DONE]`, or an error object.
"""

import json
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from deskside.engine.requests import Event, PromptScores, SampleOutput, TokenOutput
from deskside.serve.logprobs import ScoredToken, chat_logprobs, text_logprobs

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


@dataclass(frozen=True)
class Echo:
    """A prompt that the response repeats before the answer.

    starts_text: False if the first token is a start token that the server added, which is not part of the text.
    """

    text: str
    tokens: Sequence[int]
    starts_text: bool


@dataclass(frozen=True)
class ResponseOptions:
    """What a response contains. choices: per prompt. echoes: one per prompt, or none."""

    chat: bool
    choices: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    echoes: Sequence[Echo] = ()
    usage_in_stream: bool = False


class ResponseWriter:
    """Creates the JSON objects of one chat or text completion."""

    def __init__(self, options: ResponseOptions, model: str, fingerprint: str, tokenizer: Tokenizer):
        self._options, self._tokenizer = options, tokenizer
        self._chat = options.chat
        self._common = {
            "id": f"{'chatcmpl' if options.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def complete(
        self, answers: Sequence[Sequence[SampleOutput]], prompt_lengths: Sequence[int], cached: Sequence[int]
    ) -> dict[str, Any]:
        """Return the response of a request without streaming. answers: of each prompt, all samples."""
        choices: list[dict[str, Any]] = []
        for number, samples in enumerate(answers):
            scores = samples[0].prompt
            if len(samples) > self._options.choices:
                samples = sorted(samples, key=_mean_logprob, reverse=True)[: self._options.choices]
            echo = self._options.echoes[number] if self._options.echoes else None
            choices += [
                self._choice(len(choices) + i, answer, echo, scores) for i, answer in enumerate(samples)
            ]
        num_tokens = sum(len(answer.tokens) for samples in answers for answer in samples)
        return {
            **self._common,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": choices,
            "usage": usage(prompt_lengths, num_tokens, cached),
        }

    def start(self, num_choices: int) -> bytes:
        """Return the first chunks of a stream; empty if there are none."""
        options = self._options
        if self._chat:
            first = {"delta": {"role": "assistant", "content": ""}}
            return b"".join(self._chunk(index, first, None, None) for index in range(num_choices))
        pieces = [echo.text for echo in options.echoes for _ in range(options.choices)]
        return b"".join(self._chunk(index, {"text": text}, None, None) for index, text in enumerate(pieces))

    def chunk(self, index: int, event: Event, offset: int) -> bytes:
        """Return the chunk of an event. `offset`: characters of the choice in earlier chunks."""
        content: dict[str, Any] = {"delta": {"content": event.text}} if self._chat else {"text": event.text}
        if self._chat and not event.text and event.reason is not None:
            content = {"delta": {}}
        logprobs = None
        if self._options.logprobs and event.token is not None and event.logprob is not None:
            logprobs = self._logprobs([ScoredToken(event.token, event.logprob, event.top)], offset)
        elif self._options.logprobs and (end := self._end_token(event.end_token)):
            logprobs = self._logprobs(end, offset)
        finish_reason = None if event.reason is None else FINISH_REASONS[event.reason]
        return self._chunk(index, content, logprobs, finish_reason)

    def end(self, prompt_lengths: Sequence[int], completion_tokens: int, cached: Sequence[int]) -> bytes:
        """Return the end of a stream: the token counts if the client asked for them, and the mark of the end."""
        if not self._options.usage_in_stream:
            return DONE
        return self._sse([], {"usage": usage(prompt_lengths, completion_tokens, cached)}) + DONE

    def error(self, body: dict[str, Any]) -> bytes:
        """Return the end of a stream after an error."""
        return sse(body)

    def _choice(
        self, index: int, answer: SampleOutput, echo: Echo | None, scores: PromptScores | None
    ) -> dict[str, Any]:
        assert answer.reason is not None
        logprobs = None
        if self._options.logprobs:
            places = zip(answer.tokens, answer.logprobs, answer.tops, strict=True)
            prompt = [] if echo is None or scores is None else _scored_prompt(echo, scores)
            answered = [ScoredToken(*place) for place in places]
            logprobs = self._logprobs([*prompt, *answered, *self._end_token(answer.end_token)], 0)
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        text = answer.text if echo is None else echo.text + answer.text
        content = {"message": message} if self._chat else {"text": text}
        finish_reason = FINISH_REASONS[answer.reason]
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _end_token(self, end: TokenOutput | None) -> list[ScoredToken]:
        """Return the token that ended an answer, as a text completion's logprobs have it and a chat's do not.

        Clients such as lm-eval count on one generated token after the prompt.
        """
        if end is None or self._chat:
            return []
        return [ScoredToken(end.token, end.logprob, end.top, in_text=False)]

    def _chunk(self, index: int, content: dict[str, Any], logprobs: Any, finish_reason: str | None) -> bytes:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._sse([choice], {})

    def _sse(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return sse({**self._common, "object": kind, "choices": choices, **extra})

    def _logprobs(self, tokens: Sequence[ScoredToken], offset: int) -> dict[str, Any]:
        if self._chat:
            return chat_logprobs(self._tokenizer, tokens)
        return text_logprobs(self._tokenizer, tokens, self._options.top_logprobs > 0, offset)


def _scored_prompt(echo: Echo, scores: PromptScores) -> list[ScoredToken]:
    first, *others = echo.tokens
    places = zip(others, scores.logprobs, scores.tops, strict=True)
    return [ScoredToken(first, None, (), echo.starts_text), *(ScoredToken(*place) for place in places)]


def _mean_logprob(answer: SampleOutput) -> float:
    """Return the log-probability per token, by which OpenAI's best_of chooses; an empty answer is the last."""
    return sum(answer.logprobs) / len(answer.logprobs) if answer.logprobs else -math.inf
