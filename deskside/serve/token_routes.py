"""POST /tokenize and /detokenize, as vLLM has them: the tokens that a prompt would have, and the text of tokens."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deskside.engine.requests import check_prompt
from deskside.serve.field_lists import ShortText
from deskside.serve.protocol import (
    MAX_MESSAGES,
    ApiError,
    ChatRequest,
    RequestMessage,
    convert_request,
    parse_request,
)
from deskside.serve.sampling_fields import TokenId
from deskside.serve.service import HEADERS, Service
from deskside.serve.strict_model import StrictModel
from deskside.serve.templating import PromptEncoder
from deskside.serve.tool_fields import MAX_TOOLS, Tool
from deskside.utils.errors import UsageError


class TokenizeRequest(StrictModel):
    """POST /tokenize: a prompt as in completions, or messages as in chat completions.

    add_special_tokens: whether the start token precedes a prompt; a chat template writes its own.
    """

    model: ShortText | None = None
    prompt: str | None = None
    messages: Annotated[list[RequestMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[ShortText, Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages", param="prompt")
        if self.prompt is not None:
            for name in ("tools", "chat_template_kwargs"):
                if getattr(self, name):
                    raise ApiError(400, f"{name}: a prompt has no chat template; give messages", param=name)


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: ShortText | None = None
    tokens: list[TokenId]


class TokenRoutes:
    """Handles both requests. Texts of any length are encoded, in a separate thread."""

    def __init__(self, service: Service):
        self._service = service
        self._prompts = PromptEncoder(service.loaded, None, service.encoder)  # not thread-safe
        self._thread = ThreadPoolExecutor(1, "tokenize")

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a prompt."""
        body = parse_request(TokenizeRequest, await request.body())
        self._service.check_model(body.model)
        return await self._run(self._tokenize, body)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens, with special ones."""
        body = parse_request(DetokenizeRequest, await request.body())
        self._service.check_model(body.model)
        return await self._run(self._detokenize, body)

    async def _run(self, work: Any, body: StrictModel) -> Response:
        found = await asyncio.get_running_loop().run_in_executor(self._thread, work, body)
        return JSONResponse(found, headers=HEADERS)

    def _tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        try:
            tokens = self._encode(body)
        except UsageError as error:
            raise ApiError(400, str(error), param="prompt" if body.messages is None else "messages") from None
        strings = None
        if body.return_token_strs:
            strings = [self._service.loaded.tokenizer.id_to_token(token) for token in tokens]
        length = self._service.max_length
        return {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": strings}

    def _encode(self, body: TokenizeRequest) -> list[int]:
        if body.prompt is not None:
            return self._prompts.text(body.prompt)[0 if body.add_special_tokens else 1 :]
        if not self._prompts.has_chat_template:
            raise ApiError(400, "this model has no chat template; give a prompt", param="messages")
        chat = convert_request(
            ChatRequest,
            {
                "messages": body.messages,
                "tools": body.tools,
                "chat_template_kwargs": body.chat_template_kwargs,
            },
        )
        conversation = chat.conversation(self._prompts.variables)
        return self._prompts.conversation(conversation, body.add_generation_prompt)

    def _detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        loaded = self._service.loaded
        if body.tokens:
            try:
                check_prompt(body.tokens, loaded.config.vocab_size, len(body.tokens), "tokens")
            except UsageError as error:
                raise ApiError(400, str(error), param="tokens") from None
        return {"prompt": loaded.tokenizer.decode(body.tokens, skip_special_tokens=False)}
