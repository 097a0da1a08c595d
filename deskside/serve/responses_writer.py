"""Responses of POST /v1/responses: one object, or a stream of typed events.

Both are made from a chat completion: the message's reasoning, text and calls become the items of the output, in this
order. Each event of a stream has a name, a running `sequence_number`, and the item that it belongs to.
"""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from deskside.data.chat.answer_parser import AnswerParser, AnswerPart
from deskside.engine.requests import SampleOutput
from deskside.serve.responses import ResponseOptions, ResponseWriter, usage
from deskside.serve.responses_request import ResponsesRequest

# Type of an item -> the parts of the names of its events.
CONTENT_EVENTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
}


def writer_of(body: ResponsesRequest) -> "Callable[[ResponseOptions, str, str, Tokenizer], ResponsesWriter]":
    """Return a function that creates the writer of a request from the arguments of `ResponseWriter`."""
    return lambda options, model, fingerprint, tokenizer: ResponsesWriter(
        body, options, model, fingerprint, tokenizer
    )


class ResponsesWriter(ResponseWriter):
    """Creates the response or its stream."""

    def __init__(
        self,
        body: ResponsesRequest,
        options: ResponseOptions,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
    ):
        new_parser = options.new_parser
        options = replace(options, new_parser=lambda: new_parser() or AnswerParser("no", None))
        super().__init__(options, model, fingerprint, tokenizer)
        self._response = _empty_response(body, model)
        self._sequence = 0
        self._output: list[dict[str, Any]] = []  # finished items of a stream
        self._item: dict[str, Any] | None = None  # the item that the stream is in
        self._reason: str | None = None  # why the answer ended
        self._length = 0  # characters of the answer until now
        # Log-probabilities of tokens that may be of later text, and where the characters of each begin and end.
        self._scored: list[tuple[dict[str, Any], int, int]] = []

    # A response in one piece

    def complete(
        self, answers: Sequence[Sequence[SampleOutput]], prompt_lengths: Sequence[int], cached: Sequence[int]
    ) -> dict[str, Any]:
        """Return the response."""
        chat = super().complete(answers, prompt_lengths, cached)
        (choice,) = chat["choices"]
        message, logprobs = choice["message"], choice["logprobs"]
        output = []
        if reasoning := message.get("reasoning_content"):
            output.append(_item("reasoning", reasoning))
        if message["content"] is not None:
            output.append(_item("message", message["content"], logprobs))
        output += [_item("function_call", "", call=call) for call in message.get("tool_calls", ())]
        return self._finished(output, choice["finish_reason"], chat["usage"])

    def _finished(
        self, output: list[dict[str, Any]], reason: str | None, counts: dict[str, Any]
    ) -> dict[str, Any]:
        cut = reason == "length"
        thoughts = [item["content"][0]["text"] for item in output if item["type"] == "reasoning"]
        thinking = sum(len(self._tokenizer.encode(text, add_special_tokens=False).ids) for text in thoughts)
        if cut and output:
            output[-1]["status"] = "incomplete"
        return {
            **self._response,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "output": output,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thinking},
                "total_tokens": counts["total_tokens"],
            },
        }

    # A stream

    def start(self, num_choices: int) -> bytes:
        """Return the first events."""
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=self._response) for name in names)

    def end(self, prompt_lengths: Sequence[int], completion_tokens: int, cached: Sequence[int]) -> bytes:
        """Return the last events, with the whole response."""
        # An answer without text is an empty message.
        empty = b"" if self._item is not None or self._output else self._open(_item("message", ""))
        closed = empty + self._close()
        counts = usage(prompt_lengths, completion_tokens, cached)
        response = self._finished(self._output, self._reason, counts)
        return closed + self._event(f"response.{response['status']}", response=response)

    def error(self, body: dict[str, Any]) -> bytes:
        """Return the event of an error."""
        error = body["error"]
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def _chunk(self, index: int, content: dict[str, Any], logprobs: Any, finish_reason: str | None) -> bytes:
        """Return the events for a delta of a chat completion."""
        delta = content["delta"]
        self._reason = finish_reason or self._reason
        events = b""
        if reasoning := delta.get("reasoning_content"):
            events += self._add("reasoning", reasoning)
        if text := delta.get("content"):
            events += self._add("message", text, logprobs=() if logprobs is None else logprobs["content"])
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self._close() + self._open(
                    _item("function_call", "", call=_without_arguments(call))
                )
            events += self._add("function_call", call["function"]["arguments"])
        return events

    def _logprobs_of_part(self, part: AnswerPart, logprobs: Any, texts: Sequence[str]) -> Any:
        """Return the log-probabilities of the tokens with characters of a part's text.

        A token without characters of its own, as it ends in the middle of one, has the next one.
        """
        for place, text in zip([] if logprobs is None else logprobs["content"], texts, strict=False):
            begin, self._length = self._length, self._length + len(text)
            self._scored.append((place, begin, max(begin + 1, self._length)))
        if not part.text_places:
            return None
        scored = [
            place
            for place, begin, end in self._scored
            if any(begin < text_end and text_begin < end for text_begin, text_end in part.text_places)
        ]
        assigned = part.text_places[-1][1]
        self._scored = [token for token in self._scored if token[1] >= assigned]
        return {"content": scored}

    def _add(self, kind: str, text: str, logprobs: Sequence[Any] = ()) -> bytes:
        """Return the events that add text to an item, after those that open it if the stream is in another one."""
        events = b""
        if self._item is None or self._item["type"] != kind:
            events += self._close() + self._open(_item(kind, ""))
        assert self._item is not None
        name, _ = CONTENT_EVENTS[kind]
        extra: dict[str, Any] = {}
        if kind == "function_call":
            self._item["arguments"] += text
        else:
            part = self._item["content"][0]
            part["text"] += text
            extra["content_index"] = 0
            if kind == "message":
                part["logprobs"] += logprobs
                extra["logprobs"] = list(logprobs)
        return events + self._event(f"{name}.delta", **self._place(), delta=text, **extra)

    def _open(self, item: dict[str, Any]) -> bytes:
        """Return the events that begin an item."""
        self._item = item | {"status": "in_progress"}
        shown = self._item if item["type"] == "function_call" else self._item | {"content": []}
        place = len(self._output)
        events = self._event("response.output_item.added", output_index=place, item=shown)
        if item["type"] == "message":
            events += self._event(
                "response.content_part.added", **self._place(), content_index=0, part=item["content"][0]
            )
        return events

    def _close(self) -> bytes:
        """Return the events that end the item that the stream is in, if any."""
        item = self._item
        if item is None:
            return b""
        name, field = CONTENT_EVENTS[item["type"]]
        place, extra = self._place(), {}
        if item["type"] == "function_call":
            extra = {"name": item["name"], "arguments": item["arguments"]}
        else:
            extra = {"content_index": 0, field: item["content"][0]["text"]}
        if item["type"] == "message":
            extra["logprobs"] = item["content"][0]["logprobs"]
        events = self._event(f"{name}.done", **place, **extra)
        if item["type"] == "message":
            events += self._event(
                "response.content_part.done", **place, content_index=0, part=item["content"][0]
            )
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        events += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._item = None
        return events

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return f"event: {name}\ndata: {text}\n\n".encode()


def _item(kind: str, text: str, logprobs: Any = None, call: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return an item of the output. call: of a chat completion."""
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
    item: dict[str, Any] = {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "completed"}
    if call is not None:
        function = call["function"]
        return item | {"call_id": call["id"], "name": function["name"], "arguments": function["arguments"]}
    if kind == "reasoning":
        return item | {"summary": [], "content": [{"type": "reasoning_text", "text": text}]}
    scored = [] if logprobs is None else logprobs["content"]
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(scored)}
    return item | {"role": "assistant", "content": [part]}


def _without_arguments(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"function": call["function"] | {"arguments": ""}}


def _empty_response(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """Return the response of a request before its answer."""
    reasoning = None if body.reasoning is None else body.reasoning.effort
    form = None if body.text is None else body.text.format
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.response_metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
