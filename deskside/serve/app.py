"""HTTP routes: models, chat completions and completions of the OpenAI API, /health, /openapi.json, and the chat page.

The server admits up to `max_choices` choices at a time. A choice counts from the admission of its request until the
response is complete (if streamed, sent) or the client disconnects. Requests beyond the limit get 429 with Retry-After,
and a request that exceeds it alone gets 400.
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
from deskside.serve.protocol import ApiError, ChatRequest, CompletionRequest, parse_request
from deskside.serve.responses import DONE, ResponseWriter, sse
from deskside.serve.templating import PromptEncoder, PromptTooLong
from deskside.serve.worker import EngineMessage, RequestHandle, Worker
from deskside.utils.errors import RunError, UsageError
from deskside.weights.load import Loaded

T = TypeVar("T")
RETRY_SECONDS = 1
SHORT_CHARACTERS = 1 << 14  # texts up to this length (10 ms of tokenization) do not wait for longer ones
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


@dataclass(frozen=True)
class Service:
    """The served model and its limits.

    Attributes:
        loaded: The model.
        worker: The thread of the engine.
        name: Model name in the API.
        max_choices: Maximum number of running and waiting choices.
        max_tokens: Maximum tokens per answer.
        max_length: Maximum tokens of a prompt and its answer together.
    """

    loaded: Loaded
    worker: Worker
    name: str
    max_choices: int
    max_tokens: int
    max_length: int


def make_app(service: Service) -> FastAPI:
    """Return the ASGI application."""
    handler = RequestHandler(service)
    page_html, page_headers = _read_page()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    vocab_size = service.loaded.config.vocab_size
    api = openapi_document(service.max_choices, service.max_tokens, vocab_size, handler.prompts.roles)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        headers = dict(HEADERS)
        if error.retry_after is not None:
            headers["retry-after"] = str(error.retry_after)
        return JSONResponse(error.body, error.status, headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = ApiError(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}")
        return JSONResponse(message.body, error.status_code, {**HEADERS, **(error.headers or {})})

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        message = ApiError(500, "internal error; see the server's log")
        return JSONResponse(message.body, 500, HEADERS)

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(page_html, headers={**HEADERS, **page_headers})

    @app.get("/health")
    async def health() -> Response:
        failed = service.worker.failed is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200, HEADERS)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(api, headers=HEADERS)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [handler.card]}, headers=HEADERS)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        handler.check_model(name)
        return JSONResponse(handler.card, headers=HEADERS)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await handler.answer(parse_request(ChatRequest, await request.body()), request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await handler.answer(parse_request(CompletionRequest, await request.body()), request)

    return app


class _TokenizerThread:
    """A thread that tokenizes requests."""

    def __init__(self, service: Service, name: str):
        self.executor = ThreadPoolExecutor(1, name)
        self._service = service
        # A prompt must leave room for at least one token of the answer.
        self.prompts = PromptEncoder(service.loaded, service.max_length - 1)

    def encode(self, body: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Tokenize every prompt of a request. Raises ApiError."""
        name = "messages" if isinstance(body, ChatRequest) else "prompt"
        service = self._service
        if isinstance(body, ChatRequest) and not self.prompts.has_chat_template:
            raise ApiError(
                400, "this model has no chat template, so it cannot chat; use /v1/completions", param=name
            )
        try:
            if isinstance(body, ChatRequest):
                return [self.prompts.messages(body.chat_messages())]
            prompts = [self.prompts.text(p) if isinstance(p, str) else p for p in body.prompts()]
            for prompt in prompts:
                if len(prompt) >= service.max_length:
                    raise PromptTooLong(len(prompt), service.max_length - 1)
                check_prompt(prompt, service.loaded.config.vocab_size, service.max_length, name)
        except PromptTooLong as error:
            raise ApiError(400, f"{name}: {error}", param=name, code="context_length_exceeded") from None
        except UsageError as error:
            raise ApiError(400, str(error), param=name) from None
        return prompts


class RequestHandler:
    """Admits completion requests and responds to them."""

    def __init__(self, service: Service):
        self.service = service
        self._num_choices = 0  # admitted and not finished
        # Tokenization must not block the event loop, and long texts must not delay short ones.
        self._tokenizers = (
            _TokenizerThread(service, "short prompts"),
            _TokenizerThread(service, "long prompts"),
        )
        self.prompts = self._tokenizers[0].prompts
        step = service.loaded.step
        self._fingerprint = f"deskside-{__version__}" + ("" if step is None else f"-step-{step}")
        self.card = {
            "id": service.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "deskside",
            "max_model_len": service.max_length,
            "chat_template": self.prompts.has_chat_template,
        }

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names a model that is not the served one."""
        if name is not None and name != self.service.name:
            raise ApiError(
                404,
                f"model: {name[:80]} is not served; the served model is {self.service.name}",
                param="model",
                code="model_not_found",
            )

    async def answer(self, body: ChatRequest | CompletionRequest, request: Request) -> Response:
        """Return the response to a request, which may be a stream. Raises ApiError."""
        self.check_model(body.model)
        num_prompts = len(body.prompts()) if isinstance(body, CompletionRequest) else 1
        num_choices = num_prompts * body.choices_per_prompt
        self._admit(num_choices, "n" if num_prompts == 1 else "prompt")
        pending: PendingResponse | None = None
        try:
            short, long = self._tokenizers
            tokenizer = short if body.characters <= SHORT_CHARACTERS else long
            loop = asyncio.get_running_loop()
            prompts = await loop.run_in_executor(tokenizer.executor, tokenizer.encode, body)
            pending = self._start(body, prompts, num_choices)
            if body.stream:
                return _StreamingResponse(pending)
            response = await _until_disconnect(pending.complete(), request.receive)
        except BaseException:
            self._end(pending, num_choices)
            raise
        self._end(pending, num_choices)
        if response is None:
            return Response(status_code=499)  # nginx's code for a client that disconnected
        return JSONResponse(response, headers=HEADERS)

    def _admit(self, num_choices: int, field: str) -> None:
        max_choices = self.service.max_choices
        if num_choices > max_choices:
            raise ApiError(
                400, f"{field}: {num_choices} choices exceed the maximum of {max_choices}", param=field
            )
        if self._num_choices + num_choices > max_choices:
            raise ApiError(
                429,
                f"the server is at capacity ({max_choices} choices); try again in a moment",
                code="rate_limit_exceeded",
                retry_after=RETRY_SECONDS,
            )
        self._num_choices += num_choices

    def _end(self, pending: "PendingResponse | None", num_choices: int) -> None:
        """Release the choices of a request, and cancel its unfinished ones."""
        self._num_choices -= num_choices
        if pending is not None:
            pending.cancel()

    def _start(
        self, body: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]], num_choices: int
    ) -> "PendingResponse":
        """Submit the requests to the engine. Raises ApiError."""
        service = self.service
        max_tokens = service.max_tokens if body.max_new_tokens is None else body.max_new_tokens
        if max_tokens > service.max_tokens:
            is_new_name = isinstance(body, ChatRequest) and body.max_completion_tokens is not None
            field = "max_completion_tokens" if is_new_name else "max_tokens"
            raise ApiError(
                400,
                f"{field}: {max_tokens} exceeds this server's maximum of {service.max_tokens}",
                param=field,
            )
        seed = int.from_bytes(os.urandom(8)) if body.seed is None else body.seed % (1 << 64)
        try:
            requests = [
                EngineRequest(
                    tuple(prompt),
                    min(max_tokens, service.max_length - len(prompt)),
                    body.sampling(),
                    seed,
                    samples=body.choices_per_prompt,
                    first_sample=number * body.choices_per_prompt,
                    eos_tokens=service.loaded.eos_tokens,
                    stop_strings=body.stop_strings,
                    logprobs=body.wants_logprobs,
                )
                for number, prompt in enumerate(prompts)
            ]
        except UsageError as error:
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from None  # "field: reason"
        chat = isinstance(body, ChatRequest)
        tokenizer = service.loaded.tokenizer
        writer = ResponseWriter(chat, service.name, self._fingerprint, tokenizer, body.wants_logprobs)
        return PendingResponse(
            service.worker,
            requests,
            writer,
            body.usage_in_stream,
            lambda pending: self._end(pending, num_choices),
        )


class PendingResponse:
    """The engine requests of one HTTP request, and the response that is made of their events.

    on_end: called by a streaming response at its end, in any case.
    """

    def __init__(
        self,
        worker: Worker,
        requests: Sequence[EngineRequest],
        writer: ResponseWriter,
        usage: bool,
        on_end: Callable[["PendingResponse"], None],
    ):
        self.on_end = on_end
        self._worker, self._requests, self._writer, self._usage = worker, requests, writer, usage
        self._messages: asyncio.Queue[tuple[int, EngineMessage]] = asyncio.Queue()
        self._unfinished = sum(request.samples for request in requests)
        self._prompt_lengths = [len(request.prompt) for request in requests]
        self._handles: list[RequestHandle] = []
        try:
            for number, request in enumerate(requests):
                self._handles.append(worker.submit(request, partial(self._receive, number)))
        except RunError as error:
            self.cancel()
            raise ApiError(503, str(error)) from None

    def _receive(self, number: int, message: EngineMessage) -> None:
        self._messages.put_nowait((number, message))

    def cancel(self) -> None:
        """Cancel unfinished requests."""
        if self._unfinished:
            for handle in self._handles:
                self._worker.cancel(handle)

    async def complete(self) -> dict[str, Any]:
        """Return the complete response. Raises ApiError if the engine fails or refuses a request."""
        answers = [SampleOutput(len(r.prompt)) for r in self._requests for _ in range(r.samples)]
        async for choice, event in self._events():
            answers[choice].add(event)
        return self._writer.complete(answers, self._prompt_lengths)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events as the answer is generated. An error is the last event, as in OpenAI's API."""
        num_choices = self._unfinished
        offsets = [0] * num_choices  # characters sent so far
        num_tokens = 0
        if self._writer.chat:
            for choice in range(num_choices):
                yield self._writer.first_chunk(choice)
        try:
            async for choice, event in self._events():
                num_tokens += event.token is not None
                if event.text or event.reason is not None or event.logprob is not None:
                    yield self._writer.chunk(choice, event, offsets[choice])
                offsets[choice] += len(event.text)
        except ApiError as error:
            yield sse(error.body)
            return
        if self._usage:
            yield self._writer.usage_chunk(self._prompt_lengths, num_tokens)
        yield DONE

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield (index of the choice, event) until all choices are finished. Raises ApiError."""
        samples = self._requests[0].samples
        while self._unfinished:
            number, message = await self._messages.get()
            if isinstance(message, UsageError):
                raise ApiError(400, str(message))
            if isinstance(message, RunError):
                raise ApiError(503 if self._worker.failed is not None else 500, str(message))
            self._unfinished -= message.reason is not None
            yield number * samples + message.sample, message


class _StreamingResponse(Response):
    """A stream of server-sent events. Calls `on_end` however it ends."""

    def __init__(self, pending: PendingResponse):
        super().__init__(media_type="text/event-stream", headers=HEADERS)
        self._pending = pending
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._pending.stream():
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        try:
            await _until_disconnect(write(), receive)
        finally:
            self._pending.on_end(self._pending)


async def _until_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel it and return None."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        disconnected.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


def _read_page() -> tuple[str, dict[str, str]]:
    """Return the chat page, and headers that allow only its own script, style and server."""
    text = files("deskside.serve").joinpath("page.html").read_text("utf-8")

    def digest(tag: str) -> str:
        match = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert match is not None
        return base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()

    policy = (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, {"content-security-policy": policy, "referrer-policy": "no-referrer"}
