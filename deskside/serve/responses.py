"""Responses of the OpenAI API, complete or as a stream of server-sent events.

Each event of a stream is a line that begins with `data: `, followed by an empty line (WHATWG HTML, "Server-sent
events"). The data are OpenAI's chunks in JSON; the last event is `data: [DONE]`, or an error object.
"""

import json
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from deskside.data.chat.answer_parser import AnswerParser, AnswerPart, ToolCall
from deskside.engine.requests import Event, PromptScores, Reason, SampleOutput, TokenOutput
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
    """The parts of a response.

    choices: per prompt. echoes: one per prompt, or none. new_parser: returns a parser for an answer, or None if all of
    it is text.
    """

    chat: bool
    choices: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    echoes: Sequence[Echo] = ()
    usage_in_stream: bool = False
    new_parser: Callable[[], AnswerParser | None] = lambda: None


class ResponseWriter:
    """Creates the JSON objects of one chat or text completion."""

    def __init__(self, options: ResponseOptions, model: str, fingerprint: str, tokenizer: Tokenizer):
        self._options, self._tokenizer = options, tokenizer
        self._chat = options.chat
        self._parsers: dict[int, AnswerParser | None] = {}  # of a stream, by choice
        # Of choices of a stream that have a token with its log-probability: characters of all these tokens.
        self._offsets: dict[int, int] = {}
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

    def chunk(self, index: int, event: Event) -> bytes:
        """Return the chunk of an event."""
        if index not in self._parsers:
            self._parsers[index] = self._options.new_parser()
        parser = self._parsers[index]
        part = AnswerPart(event.text) if parser is None else parser.push(event.text)
        if parser is not None and event.reason is not None:
            part.add(parser.finish())
        content = {"delta": _delta(part)} if self._chat else {"text": event.text}
        logprobs, offset = None, self._offsets.get(index, 0)
        if self._options.logprobs and event.token is not None and event.logprob is not None:
            begins = self._chat and index not in self._offsets
            scored = ScoredToken(event.token, event.logprob, event.top, begins=begins)
            logprobs = self._logprobs([scored], offset)
            self._offsets[index] = offset if self._chat else offset + len(logprobs["tokens"][0])
        elif self._options.logprobs and (end := self._end_token(event.end_token)):
            logprobs = self._logprobs(end, offset)
        logprobs = self._logprobs_of_part(part, logprobs, [event.text])
        if parser is not None and not content["delta"] and logprobs is None and event.reason is None:
            return b""  # the text is held back
        finish_reason = None if event.reason is None else _finish_reason(event.reason, parser)
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
            answered = [
                ScoredToken(*place, begins=self._chat and number == 0) for number, place in enumerate(places)
            ]
            logprobs = self._logprobs([*prompt, *answered, *self._end_token(answer.end_token)], 0)
        parser = self._options.new_parser()
        part = AnswerPart(answer.text) if parser is None else parser.parse(answer.text)
        text = answer.text if echo is None else echo.text + answer.text
        content = {"message": _message(part)} if self._chat else {"text": text}
        logprobs = self._logprobs_of_part(part, logprobs, answer.texts)
        finish_reason = _finish_reason(answer.reason, parser)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs_of_part(self, part: AnswerPart, logprobs: Any, texts: Sequence[str]) -> Any:
        """Return the log-probabilities to send with a part of an answer. In a completion, they are those of all tokens.

        logprobs: of new tokens, or None. texts: what each of them adds to the answer.
        """
        return logprobs

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


def _message(part: AnswerPart) -> dict[str, Any]:
    """Return the message of a whole answer."""
    without_text = not part.text and (part.calls or part.reasoning)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if without_text else part.text,
        "refusal": None,
    }
    if part.reasoning:
        message["reasoning_content"] = part.reasoning
    if part.calls:
        message["tool_calls"] = [_call(call) for call in part.calls.values()]
    return message


def _delta(part: AnswerPart) -> dict[str, Any]:
    """Return the fields that a part of an answer adds to the message of a stream."""
    delta: dict[str, Any] = {}
    if part.text:
        delta["content"] = part.text
    if part.reasoning:
        delta["reasoning_content"] = part.reasoning
    if part.calls:
        delta["tool_calls"] = [{"index": place, **_call(call)} for place, call in part.calls.items()]
    return delta


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a call; of a part of a call that is not its first, only the arguments."""
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finish_reason(reason: Reason, parser: AnswerParser | None) -> str:
    called = parser is not None and parser.num_calls > 0
    return "tool_calls" if called and reason != "length" else FINISH_REASONS[reason]


def _scored_prompt(echo: Echo, scores: PromptScores) -> list[ScoredToken]:
    first, *others = echo.tokens
    places = zip(others, scores.logprobs, scores.tops, strict=True)
    return [
        ScoredToken(first, None, (), echo.starts_text, begins=True),
        *(
            ScoredToken(*place, begins=number == 0 and not echo.starts_text)
            for number, place in enumerate(places)
        ),
    ]


def _mean_logprob(answer: SampleOutput) -> float:
    """Return the log-probability per token, by which OpenAI's best_of chooses; an empty answer ranks last."""
    return sum(answer.logprobs) / len(answer.logprobs) if answer.logprobs else -math.inf
