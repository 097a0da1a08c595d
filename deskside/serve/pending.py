"""Responses that wait for the engine: its events, collected or streamed to one client."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deskside.engine.requests import Event, SampleOutput
from deskside.engine.requests import Request as EngineRequest
from deskside.serve.metrics import TokenTimer
from deskside.serve.protocol import ApiError, field_error
from deskside.serve.responses import ResponseWriter
from deskside.serve.worker import EngineMessage, RequestHandle, Worker
from deskside.utils.errors import RunError, UsageError

# Responses with up to this many log-probabilities (a few milliseconds of work) are written in the event loop, longer
# ones in a thread: others would wait for seconds while millions are written.
SHORT_LOGPROBS = 1 << 13

# A stream sends its first token and its end at once, and what comes between in pieces that are at least this far apart.
# A small model generates hundreds of tokens per second for each of many clients, and sending a piece takes the event
# loop longer than the GPU takes for the token.
PIECE_SECONDS = 0.03

T = TypeVar("T")


class Writer(Protocol):
    """Creates a response without a stream; a `ResponseWriter` also creates streams."""

    def complete(
        self, answers: Sequence[Sequence[SampleOutput]], prompt_lengths: Sequence[int], cached: Sequence[int]
    ) -> dict[str, Any]:
        """Return the JSON object. answers: of each prompt, all samples."""


class PendingResponse:
    """The engine requests of one HTTP request, and the response that is made of their events.

    A stream wakes up for new events at most every PIECE_SECONDS; a response without a stream once, when all is there.

    streamed: whether `stream` will be used, not `complete`. on_end: called by a streaming response at its end, in any
    case.
    """

    def __init__(
        self,
        worker: Worker,
        requests: Sequence[EngineRequest],
        writer: Writer,
        streamed: bool,
        on_end: Callable[["PendingResponse"], None],
        timer: TokenTimer | None = None,
    ):
        self.on_end = on_end
        self._worker, self._requests, self._writer = worker, requests, writer
        self._streamed, self._timer = streamed, timer
        self._unfinished = sum(request.samples for request in requests)
        self._arrived: list[tuple[int, Event]] = []  # (index of the choice, event)
        self._error: UsageError | RunError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pausing = False  # whether a stream has just sent a piece
        self._prompt_lengths = [len(request.prompt) for request in requests]
        self._cached = [0] * len(requests)  # tokens of each prompt that were in the cache
        self._handles: list[RequestHandle] = []
        try:
            for number, request in enumerate(requests):
                self._handles.append(worker.submit(request, partial(self._receive, number)))
        except RunError as error:
            self.cancel()
            raise ApiError(503, str(error)) from None

    def _receive(self, number: int, message: EngineMessage) -> None:
        if isinstance(message, Event):
            self._arrived.append((number * self._requests[0].samples + message.sample, message))
            if self._timer is not None and message.token is not None:
                self._timer.token()
            if message.reason is not None:
                self._unfinished -= 1
                if self._timer is not None and not self._unfinished:
                    self._timer.end()
                if message.sample == 0:
                    self._cached[number] = message.cached_tokens
            if not self._unfinished or (self._streamed and not self._pausing):
                self._wake()
        else:
            self._error = message
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def _pause(self) -> None:
        """Wait for PIECE_SECONDS, or until all events have arrived."""
        if not self._unfinished or self._error is not None:
            return
        self._pausing = True
        timer = asyncio.get_running_loop().call_later(PIECE_SECONDS, self._wake)
        try:
            await self._wait()
        finally:
            timer.cancel()
            self._pausing = False

    def cancel(self) -> None:
        """Cancel unfinished requests."""
        if self._unfinished:
            for handle in self._handles:
                self._worker.cancel(handle)

    async def complete(self) -> bytes:
        """Return the complete response in JSON. Raises ApiError if the engine fails or refuses a request."""
        answers = [SampleOutput(len(r.prompt)) for r in self._requests for _ in range(r.samples)]
        async for events in self._batches():
            for choice, event in events:
                answers[choice].add(event)
        of_choice = iter(answers)
        by_prompt = [list(islice(of_choice, request.samples)) for request in self._requests]

        def write() -> bytes:
            return _json(self._writer.complete(by_prompt, self._prompt_lengths, self._cached))

        scored = sum(
            len(answer.logprobs) + (0 if answer.prompt is None else len(answer.prompt.logprobs))
            for answer in answers
        )
        top = max(max(request.top_logprobs, request.prompt_logprobs or 0) for request in self._requests)
        return write() if scored * (1 + top) <= SHORT_LOGPROBS else await asyncio.to_thread(write)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events as the answer is generated. An error is the last event, as in OpenAI's API.

        Events that arrive together are one piece, because sending takes as long as making them.
        """
        writer = self._writer
        assert isinstance(writer, ResponseWriter)
        num_choices = sum(request.samples for request in self._requests)
        num_tokens = 0
        if start := writer.start(num_choices):
            yield start
        try:
            async for events in self._batches():
                num_tokens += sum(event.token is not None for _, event in events)
                pieces = []
                for choice, event in _joined(events):
                    if event.text or event.reason is not None or event.logprob is not None:
                        pieces.append(writer.chunk(choice, event))
                if piece := b"".join(pieces):
                    yield piece
        except ApiError as error:
            yield writer.error(error.body)
            return
        yield writer.end(self._prompt_lengths, num_tokens, self._cached)

    async def _batches(self) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yield the events that have arrived until all choices are finished. Raises ApiError."""
        while True:
            if self._arrived and (self._streamed or not self._unfinished):
                events, self._arrived = self._arrived, []
                yield events
                if self._streamed:
                    await self._pause()
            elif isinstance(self._error, UsageError):
                raise field_error(self._error)
            elif self._error is not None:
                raise ApiError(503 if self._worker.failed is not None else 500, str(self._error))
            elif not self._unfinished:
                return
            else:
                await self._wait()


def _json(response: Mapping[str, Any]) -> bytes:
    """Return a response in JSON. Its choices are encoded one by one, because json holds the GIL until it is done."""

    def encoded(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    fields = (
        f"{encoded(name)}:"
        + (f"[{','.join(map(encoded, value))}]" if isinstance(value, list) else encoded(value))
        for name, value in response.items()
    )
    return f"{{{','.join(fields)}}}".encode()


def _joined(events: Sequence[tuple[int, Event]]) -> Iterator[tuple[int, Event]]:
    """Join consecutive events of one choice into one, unless they carry log-probabilities."""
    last: tuple[int, Event] | None = None
    for choice, event in events:
        if last is not None and last[0] == choice and last[1].logprob is None and event.logprob is None:
            last = choice, replace(event, text=last[1].text + event.text)
            continue
        if last is not None:
            yield last
        last = choice, event
    if last is not None:
        yield last


class StreamingResponse(Response):
    """A stream of server-sent events. Calls `on_end` however it ends."""

    def __init__(self, pending: PendingResponse, headers: Mapping[str, str]):
        super().__init__(media_type="text/event-stream", headers=headers)
        self._pending = pending
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._pending.stream():
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        try:
            await until_disconnect(write(), receive)
        finally:
            self._pending.on_end(self._pending)


async def until_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel it and return None."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.reschedule(0)  # a time that has passed

    watching = asyncio.ensure_future(disconnect())
    try:
        async with asyncio.timeout(None) as scope:
            return await work
    except TimeoutError:
        if not scope.expired():
            raise
        return None
    finally:
        watching.cancel()
