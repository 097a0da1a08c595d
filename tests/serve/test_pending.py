"""Responses built from engine events without an engine: several tokens of each choice arrive at once."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from deskside.data import tokenizer as bpe
from deskside.engine.requests import Event, Request
from deskside.engine.text import TextStream
from deskside.serve.pending import PendingResponse
from deskside.serve.responses import ResponseOptions, ResponseWriter
from deskside.serve.worker import EngineMessage
from deskside.utils.errors import RunError

PROMPT = (1, 2, 3)


class FakeWorker:
    """Passes on a test's messages."""

    failed = None

    def __init__(self) -> None:
        self.receivers: list[Callable[[EngineMessage], None]] = []
        self.cancelled: list[Any] = []

    def submit(self, request: Request, on_message: Callable[[EngineMessage], None]) -> int:
        self.receivers.append(on_message)
        return len(self.receivers)

    def cancel(self, handle: Any) -> None:
        self.cancelled.append(handle)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return bpe.train(["abc abd "] * 9, 300)


def events(logprobs: bool) -> list[Event]:
    """Return the events of two steps with four tokens each, for two choices. The
    second choice ends by a stop string.
    """
    logprob = -0.5 if logprobs else None

    def token(sample: int, text: str, reason: Any = None) -> Event:
        return Event(0, sample, 70, reason, text, logprob, logprob, cached_tokens=2 if reason else 0)

    first = [token(0, "a"), token(0, ""), token(0, "bc"), token(0, "d"), token(1, "x"), token(1, "", "stop")]
    return [*first, token(0, "e"), token(0, "f"), Event(0, 0, None, "eos", "!", cached_tokens=2)]


def made(
    worker: FakeWorker, tokenizer: Tokenizer, logprobs: bool, streamed: bool, samples: int = 2
) -> PendingResponse:
    request = Request(PROMPT, 9, samples=samples, logprobs=logprobs)
    options = ResponseOptions(False, samples, logprobs, usage_in_stream=True)
    writer = ResponseWriter(options, "m", "f", tokenizer)
    return PendingResponse(worker, [request], writer, streamed, lambda pending: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_has_the_text_of_the_whole_answer(logprobs: bool, tokenizer: Tokenizer) -> None:
    async def streamed() -> list[dict[str, Any]]:
        worker = FakeWorker()
        pending = made(worker, tokenizer, logprobs, True)
        for event in events(logprobs):
            worker.receivers[0](event)
        lines = b"".join([piece async for piece in pending.stream()]).decode().split("\n\n")
        pending.cancel()
        assert lines[-2:] == ["data: [DONE]", ""] and not worker.cancelled
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def whole() -> dict[str, Any]:
        worker = FakeWorker()
        pending = made(worker, tokenizer, logprobs, False)
        answer = asyncio.create_task(pending.complete())
        for event in events(logprobs):
            assert not answer.done()
            worker.receivers[0](event)
            await asyncio.sleep(0)
        return json.loads(await answer)  # type: ignore[no-any-return]

    *chunks, counts = asyncio.run(streamed())
    answer = asyncio.run(whole())
    assert counts["choices"] == [] and counts["usage"] == answer["usage"]
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    # Without log-probabilities, tokens of one choice that arrive together form one chunk.
    assert len(chunks) == (9 if logprobs else 3)
    for expected in answer["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == expected["finish_reason"]
        if logprobs:
            given = [x for part in parts if part["logprobs"] for x in part["logprobs"]["token_logprobs"]]
            assert given == expected["logprobs"]["token_logprobs"]


def test_the_offsets_of_tokens_whose_text_is_held_back(tokenizer: Tokenizer) -> None:
    """A stop string holds back the text of its first characters, which come with a later token."""
    tokens = tokenizer.encode("abcabdabd abc", add_special_tokens=False).ids
    text = TextStream(tokenizer, ["abdx"])
    worker = FakeWorker()
    pending = made(worker, tokenizer, True, True, samples=1)
    for token in tokens[:-1]:
        worker.receivers[0](Event(0, 0, token, None, text.push(token), -0.5, -0.5))
    end = text.push(tokens[-1]) + text.finish()
    worker.receivers[0](Event(0, 0, tokens[-1], "length", end, -0.5, -0.5))

    async def streamed() -> list[Any]:
        lines = b"".join([piece async for piece in pending.stream()]).decode().split("\n\n")
        return [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-2]]

    scores = [choice["logprobs"] for choices in asyncio.run(streamed()) for choice in choices]
    starts = [len(tokenizer.decode(tokens[:n])) for n in range(len(tokens))]
    assert [offset for score in scores for offset in score["text_offset"]] == starts


def test_a_stream_waits_between_its_pieces_but_not_with_its_end(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deskside.serve.pending.PIECE_SECONDS", 1e9)

    async def streamed() -> list[bytes]:
        worker = FakeWorker()
        pending = made(worker, tokenizer, False, True)
        pieces: list[bytes] = []

        async def read() -> None:
            pieces.extend([piece async for piece in pending.stream()])

        reading = asyncio.create_task(read())
        for event in events(False):
            await asyncio.sleep(0.001)
            worker.receivers[0](event)
        await asyncio.wait_for(reading, 60)
        return pieces

    first, rest, end = asyncio.run(streamed())
    assert first.count(b"data: ") == 1 and b'"text":"a"' in first
    assert b'"text":"bcd"' in rest and b'"text":"ef!"' in rest
    assert end.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("logprobs", [False, True])
def test_long_logprobs_do_not_hold_up_the_event_loop(
    logprobs: bool, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def complete(*_: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"id": "東京", "choices": [{"a": 1}, {}], "data": [], "usage": {"b": 2}}

    async def whole() -> bytes:
        worker = FakeWorker()
        pending = made(worker, tokenizer, logprobs, False)
        for event in events(logprobs):
            worker.receivers[0](event)
        return await pending.complete()

    monkeypatch.setattr(ResponseWriter, "complete", complete)
    monkeypatch.setattr("deskside.serve.pending.SHORT_LOGPROBS", 2)
    assert json.loads(asyncio.run(whole())) == complete()
    assert (threads[0] is threading.main_thread()) == (not logprobs)


def test_a_failure_is_the_last_event_and_cancels_the_rest(tokenizer: Tokenizer) -> None:
    async def streamed() -> tuple[list[str], FakeWorker]:
        worker = FakeWorker()
        pending = made(worker, tokenizer, False, True)
        worker.receivers[0](events(False)[0])
        worker.receivers[0](RunError("no more memory"))
        text = b"".join([piece async for piece in pending.stream()]).decode()
        pending.cancel()
        return text.split("\n\n"), worker

    lines, worker = asyncio.run(streamed())
    assert len(lines) == 3 and json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == "a"
    assert json.loads(lines[1].removeprefix("data: "))["error"]["message"] == "no more memory"
    assert worker.cancelled == [1]
