"""HTTP routes: models, chat completions and completions of the OpenAI API, /health, /metrics, /openapi.json, and the
chat page.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from deskside import __version__
from deskside.data.encoder import EncoderInfo
from deskside.engine.grammar import Grammar
from deskside.engine.requests import Request as EngineRequest
from deskside.engine.requests import check_prompt
from deskside.serve.grammar_thread import GrammarThread
from deskside.serve.metrics import CONTENT_TYPE, metrics_text
from deskside.serve.openapi import openapi_document
from deskside.serve.pending import PendingResponse, StreamingResponse, until_disconnect
from deskside.serve.protocol import ApiError, ChatRequest, CompletionRequest, field_error, parse_request
from deskside.serve.responses import ResponseWriter
from deskside.serve.templating import PromptEncoder, PromptTooLong
from deskside.serve.worker import Worker
from deskside.utils.errors import UsageError
from deskside.weights.load import Loaded

RETRY_SECONDS = 1
# Texts up to this length (a few milliseconds of tokenization) are encoded in the event loop: the tokenizer holds the
# GIL most of the time, so a thread would only add the time of two switches.
SHORT_CHARACTERS = 1 << 13
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
        encoder: The library that encodes prompts; None is tokenizers.
    """

    loaded: Loaded
    worker: Worker
    name: str
    max_choices: int
    max_tokens: int
    max_length: int
    encoder: EncoderInfo | None = None


def make_app(service: Service) -> Starlette:
    """Return the ASGI application."""
    handler = RequestHandler(service)
    page_html, page_headers = _read_page()
    vocab_size = service.loaded.config.vocab_size
    api = openapi_document(service.max_choices, service.max_tokens, vocab_size, handler.prompts.roles)

    async def page(request: Request) -> Response:
        return HTMLResponse(page_html, headers={**HEADERS, **page_headers})

    async def health(request: Request) -> Response:
        failed = service.worker.failed is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200, HEADERS)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(
            metrics_text(service.worker.engine), headers={**HEADERS, "content-type": CONTENT_TYPE}
        )

    async def openapi(request: Request) -> Response:
        return JSONResponse(api, headers=HEADERS)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [handler.card]}, headers=HEADERS)

    async def model(request: Request) -> Response:
        handler.check_model(request.path_params["name"])
        return JSONResponse(handler.card, headers=HEADERS)

    async def chat(request: Request) -> Response:
        return await handler.answer(parse_request(ChatRequest, await request.body()), request)

    async def complete(request: Request) -> Response:
        return await handler.answer(parse_request(CompletionRequest, await request.body()), request)

    # The routes that clients call most come first.
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/", page),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
    ]
    handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _internal_error}
    app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    app.router.redirect_slashes = False
    return app


async def _api_error(request: Request, error: ApiError) -> Response:
    headers = dict(HEADERS)
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return JSONResponse(error.body, error.status, headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = ApiError(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}")
    return JSONResponse(message.body, error.status_code, {**HEADERS, **(error.headers or {})})


async def _internal_error(request: Request, error: Exception) -> Response:
    message = ApiError(500, "internal error; see the server's log")
    return JSONResponse(message.body, 500, HEADERS)


class _Tokenizer:
    """Tokenizes requests; not thread-safe."""

    def __init__(self, service: Service):
        self._service = service
        # A prompt must leave room for at least one token of the answer.
        self.prompts = PromptEncoder(service.loaded, service.max_length - 1, service.encoder)

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
                return [self.prompts.conversation(body.conversation())]
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
        # Tokenization of a long text must neither block the event loop nor delay short ones.
        self._short, self._long = _Tokenizer(service), _Tokenizer(service)
        self._long_thread = ThreadPoolExecutor(1, "long prompts")
        self._grammars = GrammarThread(service.loaded)
        self.prompts = self._short.prompts
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
            if body.characters <= SHORT_CHARACTERS:
                prompts = self._short.encode(body)
            else:
                loop = asyncio.get_running_loop()
                prompts = await loop.run_in_executor(self._long_thread, self._long.encode, body)
            source = body.text_grammar()
            grammar = None if source is None else await self._grammars.compile(source)
            pending = self._start(body, prompts, num_choices, grammar)
            if body.stream:
                return StreamingResponse(pending, HEADERS)
            response = await until_disconnect(pending.complete(), request.receive)
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

    def _end(self, pending: PendingResponse | None, num_choices: int) -> None:
        """Release the choices of a request, and cancel its unfinished ones."""
        self._num_choices -= num_choices
        if pending is not None:
            pending.cancel()

    def _start(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[Sequence[int]],
        num_choices: int,
        grammar: Grammar | None,
    ) -> PendingResponse:
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
                    grammar=grammar,
                )
                for number, prompt in enumerate(prompts)
            ]
        except UsageError as error:
            raise field_error(error) from None
        chat = isinstance(body, ChatRequest)
        tokenizer = service.loaded.tokenizer
        writer = ResponseWriter(chat, service.name, self._fingerprint, tokenizer, body.wants_logprobs)
        return PendingResponse(
            service.worker,
            requests,
            writer,
            body.stream,
            body.usage_in_stream,
            lambda pending: self._end(pending, num_choices),
        )


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
