"""HTTP routes: the three of the OpenAI API, /health, /openapi.json, and the chat page.

A request takes one place per choice from its admission to its last byte. When all places are taken, further requests
get 429 with Retry-After. A client that disconnects frees its places at once.
"""

import asyncio
import base64
import hashlib
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from deskside import __version__
from deskside.engine.requests import Event, SampleOutput, check_prompt
from deskside.engine.requests import Request as EngineRequest
from deskside.serve.openapi import openapi_document
from deskside.serve.protocol import ApiError, ChatRequest, CompletionRequest, read
from deskside.serve.responses import DONE, ResponseWriter, sse
from deskside.serve.templating import Prompts, TooLong
from deskside.serve.worker import EngineMessage, RequestFuture, Worker
from deskside.utils.errors import RunError, UsageError
from deskside.weights.load import Loaded

T = TypeVar("T")
RETRY_SECONDS = 1
SHORT_CHARACTERS = 1 << 14  # texts up to this length (10 ms of tokenization) do not queue behind longer ones
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


@dataclass(frozen=True)
class Service:
    """The served model and its limits.

    Attributes:
        loaded: The model.
        worker: The thread that computes.
        name: Model name in the API.
        places: Maximum number of running and waiting choices.
        max_tokens: Maximum tokens per answer.
        longest: Maximum tokens of a prompt and its answer together.
    """

    loaded: Loaded
    worker: Worker
    name: str
    places: int
    max_tokens: int
    longest: int


def make_app(service: Service) -> FastAPI:
    """Return the ASGI application."""
    queue = RequestQueue(service)
    text, policy = _read_page()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    vocab_size = service.loaded.config.vocab_size
    api = openapi_document(service.places, service.max_tokens, vocab_size, queue.prompts.roles)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        retry = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        return JSONResponse(error.body, error.status, {**HEADERS, **retry})

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:
        message = ApiError(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}")
        return JSONResponse(message.body, error.status_code, {**HEADERS, **(error.headers or {})})

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        message = ApiError(500, "the server failed on this request; its own log says why")
        return JSONResponse(message.body, 500, HEADERS)

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(text, headers={**HEADERS, **policy})

    @app.get("/health")
    async def health() -> Response:
        failed = service.worker.failed is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200, HEADERS)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(api, headers=HEADERS)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [queue.card]}, headers=HEADERS)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        queue.check_model(name)
        return JSONResponse(queue.card, headers=HEADERS)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await queue.answer(read(ChatRequest, await request.body()), request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await queue.answer(read(CompletionRequest, await request.body()), request)

    return app


class _Lane:
    """A thread that tokenizes requests."""

    def __init__(self, service: Service, name: str):
        self.thread = ThreadPoolExecutor(1, name)
        self._service = service
        # One token is left for the answer.
        self.prompts = Prompts(service.loaded, service.longest - 1)

    def encode(self, asked: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Tokenize every prompt of a request. Raises ApiError."""
        name = "messages" if isinstance(asked, ChatRequest) else "prompt"
        service = self._service
        if isinstance(asked, ChatRequest) and not self.prompts.chats:
            raise ApiError(
                400, "this model has no chat template, so it cannot chat; use /v1/completions", param=name
            )
        try:
            if isinstance(asked, ChatRequest):
                return [self.prompts.messages(asked.turns())]
            prompts = [self.prompts.text(p) if isinstance(p, str) else p for p in asked.prompts()]
            for prompt in prompts:
                if len(prompt) >= service.longest:
                    raise TooLong(len(prompt), service.longest - 1)
                check_prompt(prompt, service.loaded.config.vocab_size, service.longest, name)
        except TooLong as error:
            raise ApiError(400, f"{name}: {error}", param=name, code="context_length_exceeded") from None
        except UsageError as error:
            raise ApiError(400, str(error), param=name) from None
        return prompts


class RequestQueue:
    """Admits requests and answers them."""

    def __init__(self, service: Service):
        self.service = service
        self._taken = 0
        # Tokenization must not block the event loop, and long texts must not delay short ones.
        self._lanes = (_Lane(service, "short prompts"), _Lane(service, "long prompts"))
        self.prompts = self._lanes[0].prompts
        step = service.loaded.step
        self._fingerprint = f"deskside-{__version__}" + ("" if step is None else f"-step-{step}")
        self.card = {
            "id": service.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "deskside",
            "max_model_len": service.longest,
            "chat_template": self.prompts.chats,
        }

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for another model than the served one."""
        if name is not None and name != self.service.name:
            raise ApiError(
                404,
                f"model: {name[:80]} is not served here; this is {self.service.name}",
                param="model",
                code="model_not_found",
            )

    async def answer(self, asked: ChatRequest | CompletionRequest, request: Request) -> Response:
        """Return the response, which may be a stream. Raises ApiError."""
        self.check_model(asked.model)
        many = len(asked.prompts()) if isinstance(asked, CompletionRequest) else 1
        weight = many * asked.count
        self._take(weight)
        job: PendingResponse | None = None
        try:
            lane = self._lanes[asked.characters > SHORT_CHARACTERS]
            prompts = await asyncio.get_running_loop().run_in_executor(lane.thread, lane.encode, asked)
            job = self._begin(asked, prompts, weight)
            if asked.stream:
                return _Streamed(job)
            found = await _unless_gone(job.whole(), request.receive)
        except BaseException:
            self._end(job, weight)
            raise
        self._end(job, weight)
        return JSONResponse(found, headers=HEADERS) if found is not None else Response(status_code=499)

    def _take(self, weight: int) -> None:
        places = self.service.places
        if weight > places:
            raise ApiError(400, f"n: {weight} choices in one request; {places} at most", param="n")
        if self._taken + weight > places:
            raise ApiError(
                429,
                f"all {places} places are taken; try again in a moment",
                code="rate_limit_exceeded",
                retry_after=RETRY_SECONDS,
            )
        self._taken += weight

    def _end(self, job: "PendingResponse | None", weight: int) -> None:
        """Free the places, and cancel what still runs."""
        self._taken -= weight
        if job is not None:
            job.cancel()

    def _begin(
        self, asked: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]], weight: int
    ) -> "PendingResponse":
        service = self.service
        most = service.max_tokens
        if asked.limit is not None and asked.limit > most:
            raise ApiError(
                400, f"max_tokens: {asked.limit} is more than this server's {most}", param="max_tokens"
            )
        seed = int.from_bytes(os.urandom(8)) if asked.seed is None else asked.seed % (1 << 64)
        try:
            requests = [
                EngineRequest(
                    tuple(prompt),
                    min(most if asked.limit is None else asked.limit, service.longest - len(prompt)),
                    asked.sampling(),
                    seed,
                    samples=asked.count,
                    first_sample=number * asked.count,
                    eos_tokens=service.loaded.eos_tokens,
                    stop_strings=asked.stops,
                    logprobs=asked.wants_logprobs,
                )
                for number, prompt in enumerate(prompts)
            ]
        except UsageError as error:
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from None
        chat = isinstance(asked, ChatRequest)
        tokenizer = service.loaded.tokenizer
        writer = ResponseWriter(chat, service.name, self._fingerprint, tokenizer, asked.wants_logprobs)
        return PendingResponse(
            service.worker, requests, writer, asked.usage_in_stream, lambda job: self._end(job, weight)
        )


class PendingResponse:
    """The engine requests of one HTTP request. `ended` frees its places."""

    def __init__(
        self,
        worker: Worker,
        requests: Sequence[EngineRequest],
        writer: ResponseWriter,
        usage: bool,
        ended: Callable[["PendingResponse"], None],
    ):
        self.ended = ended
        self._worker, self._requests, self._writer, self._usage = worker, requests, writer, usage
        self._news: asyncio.Queue[tuple[int, EngineMessage]] = asyncio.Queue()
        self._left = sum(request.samples for request in requests)
        self._prompts = [len(request.prompt) for request in requests]  # in tokens
        self._futures: list[RequestFuture] = []
        try:
            for number, request in enumerate(requests):
                self._futures.append(worker.submit(request, partial(self._hear, number)))
        except RunError as error:
            self.cancel()
            raise ApiError(503, str(error)) from None

    def _hear(self, number: int, message: EngineMessage) -> None:
        self._news.put_nowait((number, message))

    def cancel(self) -> None:
        """Cancel unfinished requests."""
        if self._left:
            for future in self._futures:
                self._worker.cancel(future)

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer. Raises ApiError if the engine fails."""
        answers = [SampleOutput(len(r.prompt)) for r in self._requests for _ in range(r.samples)]
        async for choice, event in self._events():
            answers[choice].add(event)
        return self._writer.whole(answers, self._prompts)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the answer as it is generated. A failure is the last event, in OpenAI's form."""
        choices = self._left
        said, count = [0] * choices, 0
        if self._writer.chat:
            for choice in range(choices):
                yield self._writer.first(choice)
        try:
            async for choice, event in self._events():
                count += event.token is not None
                if event.text or event.reason is not None or (event.logprob is not None):
                    yield self._writer.piece(choice, event, said[choice])
                said[choice] += len(event.text)
        except ApiError as error:
            yield sse(error.body)
            return
        if self._usage:
            yield self._writer.counts(self._prompts, count)
        yield DONE

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        samples = self._requests[0].samples
        while self._left:
            number, message = await self._news.get()
            if isinstance(message, UsageError):
                raise ApiError(400, str(message))
            if isinstance(message, RunError):
                raise ApiError(503 if self._worker.failed is not None else 500, str(message))
            self._left -= message.reason is not None
            yield number * samples + message.sample, message


class _Streamed(Response):
    """A stream of server-sent events that always cancels its job at the end."""

    def __init__(self, job: PendingResponse):
        super().__init__(media_type="text/event-stream", headers=HEADERS)
        self._job = job
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in self._job.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        try:
            await _unless_gone(write(), receive)
        finally:
            self._job.ended(self._job)


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel it and return None."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


def _read_page() -> tuple[str, dict[str, str]]:
    """Return the page, and a content security policy for its own script, style and server only."""
    text = files("deskside.serve").joinpath("page.html").read_text("utf-8")

    def digest(tag: str) -> str:
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert inside is not None
        return base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()

    policy = (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, {"content-security-policy": policy, "referrer-policy": "no-referrer"}
