"""Handling of requests for completions, from their admission to the response."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import Response
from tokenizers import Tokenizer

from deskside import __version__
from deskside.engine.requests import check_prompt
from deskside.serve.answer_plan import plan_answers
from deskside.serve.embeddings import EmbeddingRequest, EmbeddingWriter, embedding_requests
from deskside.serve.engine_requests import echoes, engine_requests
from deskside.serve.grammar_thread import GrammarThread
from deskside.serve.metrics import TokenTimer
from deskside.serve.pending import PendingResponse, StreamingResponse, until_disconnect
from deskside.serve.protocol import FIELDS, ApiError, ChatRequest, CompletionRequest
from deskside.serve.responses import ResponseOptions, ResponseWriter
from deskside.serve.service import HEADERS, Service
from deskside.serve.templating import PromptEncoder, PromptTooLong
from deskside.utils.errors import UsageError

# Texts up to this length (a few milliseconds of tokenization) are encoded in the event loop: the tokenizer holds the
# GIL most of the time, so a thread would only add the time of two switches.
SHORT_CHARACTERS = 1 << 13

OnEnd = Callable[[PendingResponse], None]
NewWriter = Callable[[ResponseOptions, str, str, Tokenizer], ResponseWriter]


class _Tokenizer:
    """Tokenizes requests; not thread-safe."""

    def __init__(self, service: Service):
        self._service = service
        # A prompt must leave room for at least one token of the answer.
        self.prompts = PromptEncoder(service.loaded, service.max_length - 1, service.encoder)

    def encode(self, body: ChatRequest | CompletionRequest | EmbeddingRequest) -> list[list[int]]:
        """Tokenize every prompt of a request. Raises ApiError."""
        name = "messages" if isinstance(body, ChatRequest) else "prompt"
        if isinstance(body, EmbeddingRequest):
            name = "input"
        service = self._service
        if isinstance(body, ChatRequest) and not self.prompts.has_chat_template:
            raise ApiError(
                400, "this model has no chat template, so it cannot chat; use /v1/completions", param=name
            )
        try:
            if isinstance(body, ChatRequest):
                return [self.prompts.conversation(body.conversation(self.prompts.variables))]
            prompts = [self.prompts.text(p) if isinstance(p, str) else p for p in body.prompts()]
            for prompt in prompts:
                if len(prompt) >= service.max_length:
                    raise PromptTooLong(len(prompt), service.max_length - 1)
                check_prompt(prompt, service.loaded.config.vocab_size, service.max_length, name)
        except PromptTooLong as error:
            raise ApiError(400, f"{name}: {error}", param=name, code="context_length_exceeded") from None
        except UsageError as error:
            field = str(error).partition(":")[0]
            raise ApiError(400, str(error), param=field if field in FIELDS else name) from None
        return prompts


class RequestHandler:
    """Admits completion requests and responds to them."""

    def __init__(self, service: Service):
        self.service = service
        # Tokenization of a long text must neither block the event loop nor delay short ones.
        self._short, self._long = _Tokenizer(service), _Tokenizer(service)
        self._long_thread = ThreadPoolExecutor(1, "long prompts")
        self._grammars = GrammarThread(service.loaded)
        self.prompts = self._short.prompts
        step = service.loaded.step
        self._fingerprint = f"deskside-{__version__}" + ("" if step is None else f"-step-{step}")
        self.cards = {
            name: {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "deskside",
                "parent": None if name == service.name else service.name,
                "max_model_len": service.max_length,
                "max_tokens": service.max_tokens,
                "chat_template": self.prompts.has_chat_template,
                "chat_template_variables": sorted(self.prompts.variables),
            }
            for name in service.names
        }

    async def answer(
        self, body: ChatRequest | CompletionRequest, request: Request, new_writer: NewWriter = ResponseWriter
    ) -> Response:
        """Return the response to a request, which may be a stream. Raises ApiError."""
        self.service.check_model(body.model)
        num_prompts = len(body.prompts()) if isinstance(body, CompletionRequest) else 1
        several = "n" if body.samples_per_prompt == body.choices_per_prompt else "best_of"
        field = several if num_prompts == 1 else "prompt"
        num_samples = num_prompts * body.samples_per_prompt

        async def start(on_end: OnEnd) -> PendingResponse:
            prompts = await self._encode(body)
            plan = plan_answers(body, self.prompts, prompts[0])
            grammar = await self._grammars.compile(plan)
            service = self.service
            requests = engine_requests(body, prompts, service, grammar, plan.skip_special_tokens)
            options = ResponseOptions(
                chat=isinstance(body, ChatRequest),
                choices=body.choices_per_prompt,
                logprobs=body.wants_logprobs,
                top_logprobs=body.num_top_logprobs,
                echoes=echoes(body, prompts, service.loaded.tokenizer),
                usage_in_stream=body.usage_in_stream,
                new_parser=plan.parser,
            )
            name = body.model or service.name
            writer = new_writer(options, name, self._fingerprint, service.loaded.tokenizer)
            timer = TokenTimer(service.metrics)
            return PendingResponse(service.worker, requests, writer, bool(body.stream), on_end, timer)

        return await self._respond(request, num_samples, field, start, bool(body.stream))

    async def embed(self, body: EmbeddingRequest, request: Request) -> Response:
        """Return the embeddings that a request asks for. Raises ApiError."""
        self.service.check_model(body.model)

        async def start(on_end: OnEnd) -> PendingResponse:
            prompts = await self._encode(body)
            requests = embedding_requests(body, prompts, self.service)
            writer = EmbeddingWriter(body, body.model or self.service.name)
            return PendingResponse(self.service.worker, requests, writer, False, on_end)

        return await self._respond(request, len(body.prompts()), "input", start)

    async def _encode(self, body: ChatRequest | CompletionRequest | EmbeddingRequest) -> list[list[int]]:
        if body.characters <= SHORT_CHARACTERS:
            return self._short.encode(body)
        return await asyncio.get_running_loop().run_in_executor(self._long_thread, self._long.encode, body)

    async def _respond(
        self,
        request: Request,
        num_choices: int,
        field: str,
        start: Callable[[OnEnd], Awaitable[PendingResponse]],
        stream: bool = False,
    ) -> Response:
        """Admit choices, and respond with what `start` returns. field: of the request, decides their number."""
        admission = self.service.admission
        admission.admit(num_choices, field)

        def end(pending: PendingResponse | None) -> None:
            """Release the choices, and cancel unfinished ones."""
            admission.release(num_choices)
            if pending is not None:
                pending.cancel()

        pending: PendingResponse | None = None
        try:
            pending = await start(end)
            if stream:
                return StreamingResponse(pending, HEADERS)
            response = await until_disconnect(pending.complete(), request.receive)
        except BaseException:
            end(pending)
            raise
        end(pending)
        if response is None:
            return Response(status_code=499)  # nginx's code for a client that disconnected
        return Response(response, headers=HEADERS, media_type="application/json")
