"""OpenAPI document of the server.

The request schemas are the types of protocol.py, narrowed to the limits of the running server. The response schemas are
defined here, and responses.py and app.py produce the responses. tests/serve/test_fuzz.py checks both against this
document.
"""

from collections.abc import Collection
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from deskside import __version__
from deskside.serve.embeddings import EmbeddingRequest
from deskside.serve.protocol import ChatRequest, CompletionRequest, RequestMessage
from deskside.serve.responses_request import ResponsesRequest
from deskside.serve.token_routes import DetokenizeRequest, TokenizeRequest

SCHEMAS = "#/components/schemas/"
ERROR_DESCRIPTIONS = {
    "400": "The request is malformed, or a field is out of range or not supported; `param` names the field, if known.",
    "401": "The bearer token is missing or wrong.",
    "403": "The request comes from another website, or its Host header does not name this server.",
    "404": "The path does not exist, or this server does not serve the model.",
    "405": "The path does not support this method.",
    "408": "The request body arrived too slowly.",
    "413": "The request body is too large.",
    "415": "The request body is not application/json.",
    "429": "The server is at capacity; `retry-after` says when to try again.",
    "500": "The request failed because of an error in the server.",
    "503": "The server is stopping, or its device has failed.",
}
GET_ERRORS = ("401", "403", "404", "405")


class _Response(BaseModel):  # fields that are not declared are an error
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Response):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Response):
    """The body of an error response."""

    error: ErrorDetail


class PromptTokensDetails(_Response):
    cached_tokens: int


class Usage(_Response):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(_Response):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Response):
    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(_Response):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class FunctionCall(_Response):
    name: str
    arguments: str


class ToolCall(_Response):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(_Response):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class ChatChoice(_Response):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class TextChoice(_Response):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class _CompletionResponse(_Response):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(_CompletionResponse):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(_CompletionResponse):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class Model(_Response):
    """A served name. max_tokens: of an answer. chat_template_variables: what chat_template_kwargs may set."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None
    max_model_len: int
    max_tokens: int
    chat_template: bool
    chat_template_variables: list[str]


class ModelList(_Response):
    object: Literal["list"]
    data: list[Model]


class Health(_Response):
    status: Literal["ok", "draining", "failed"]


class Version(_Response):
    version: str


class Tokens(_Response):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokensText(_Response):
    prompt: str


class Embedding(_Response):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(_Response):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(_Response):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class ResponseObject(BaseModel):
    """OpenAI's response object; the fields that repeat the request are not listed here."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


# Path, summary, request and response of each POST route.
POSTS: tuple[tuple[str, str, type[BaseModel], type[BaseModel]], ...] = (
    ("/v1/chat/completions", "Create a chat completion", ChatRequest, ChatCompletion),
    ("/v1/completions", "Create a text completion", CompletionRequest, Completion),
    ("/v1/responses", "Create a response", ResponsesRequest, ResponseObject),
    ("/v1/embeddings", "Create embeddings", EmbeddingRequest, EmbeddingList),
    ("/tokenize", "Return the tokens of a prompt", TokenizeRequest, Tokens),
    ("/detokenize", "Return the text of tokens", DetokenizeRequest, TokensText),
)
STREAMED = (ChatRequest, CompletionRequest, ResponsesRequest)
OTHER_RESPONSES = (Model, ModelList, Health, Version, Error)


def openapi_document(
    max_choices: int, max_tokens: int, vocab_size: int, roles: Collection[str]
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server with these limits.

    Args:
        max_choices: Maximum number of choices, and of prompts, of one request.
        max_tokens: Maximum number of generated tokens of one choice.
        roles: Roles that the chat template accepts; empty if the model has no chat template.
    """
    _, definitions = models_json_schema(
        [
            *((model, "validation") for _, _, *models in POSTS for model in models),
            *((model, "validation") for model in OTHER_RESPONSES),
        ],
        ref_template=SCHEMAS + "{model}",
    )
    schemas: dict[str, Any] = definitions["$defs"]
    for request in STREAMED:
        properties = schemas[request.__name__]["properties"]
        for field, maximum in (
            ("max_tokens", max_tokens),
            ("max_completion_tokens", max_tokens),
            ("max_output_tokens", max_tokens),
            ("n", max_choices),
        ):
            _limit_integers(properties.get(field), maximum)
    if roles:
        schemas[RequestMessage.__name__]["properties"]["role"]["enum"] = sorted(roles)
    _limit_integers(schemas[DetokenizeRequest.__name__]["properties"]["tokens"], vocab_size - 1)
    for prompted, field in ((CompletionRequest, "prompt"), (EmbeddingRequest, "input")):
        prompt = schemas[prompted.__name__]["properties"][field]
        _limit_integers(prompt, vocab_size - 1)  # token IDs
        for kind in prompt["anyOf"]:
            # An array of integers is one tokenized prompt. Every other array is a list of prompts.
            if kind["type"] == "array" and kind["items"].get("type") != "integer":
                kind["maxItems"] = max_choices
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "deskside serve",
            "version": __version__,
            "description": (
                "A subset of OpenAI's API, for one model and its adapters. `stream_options` requires `stream`: true; "
                "`best_of` must be at least `n`; a prompt must have fewer tokens than the `max_model_len` of the model."
            ),
        },
        "paths": {
            "/health": {"get": _get("Report whether the model can run", Health, ())},
            "/metrics": {"get": _metrics()},
            "/v1/models": {"get": _get("List the served model and its adapters", ModelList, GET_ERRORS)},
            "/v1/models/{name}": {
                "get": {
                    **_get("Describe a model", Model, GET_ERRORS),
                    "parameters": [
                        {
                            "name": "name",
                            "in": "path",
                            "required": True,
                            "schema": {"type": "string", "minLength": 1},
                        }
                    ],
                }
            },
            "/version": {"get": _get("Report the server's version", Version, GET_ERRORS)},
            **{path: {"post": _post(text, asked, given)} for path, text, asked, given in POSTS},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _get(summary: str, response: type[BaseModel], errors: tuple[str, ...]) -> dict[str, Any]:
    responses = {"200": {"description": summary, **_content(response)}}
    if response is Health:  # /health has a Health body in either case
        responses["503"] = {
            "description": "The device has failed, or the server is stopping.",
            **_content(Health),
        }
    return {"summary": summary, "responses": responses | {status: _error(status) for status in errors}}


def _metrics() -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    responses = {"200": {"description": "Counters in Prometheus' text format", "content": text}}
    errors = {status: _error(status) for status in GET_ERRORS}
    return {"summary": "Report what the engine has done", "responses": responses | errors}


def _post(summary: str, request: type[BaseModel], response: type[BaseModel]) -> dict[str, Any]:
    content = _content(response)["content"]
    description = "The response."
    # The schema of one server-sent event. `data` is a chunk as OpenAI defines it, and at the end [DONE] or an error.
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    if request in STREAMED:
        content |= {"text/event-stream": {"schema": event}}
        description = "The response: JSON, or server-sent events if `stream` is true."
    return {
        "summary": summary,
        "requestBody": {"required": True, **_content(request)},
        "responses": {
            "200": {"description": description, "content": content},
            **{status: _error(status) for status in ERROR_DESCRIPTIONS},
        },
    }


def _error(status: str) -> dict[str, Any]:
    return {"description": ERROR_DESCRIPTIONS[status], **_content(Error)}


def _content(model: type[BaseModel]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": SCHEMAS + model.__name__}}}}


def _limit_integers(schema: Any, maximum: int) -> None:
    """Lower the maximum of all integers within a schema to `maximum`, in place."""
    if isinstance(schema, list):
        for part in schema:
            _limit_integers(part, maximum)
    elif isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema["maximum"] = min(maximum, schema.get("maximum", maximum))
        for part in schema.values():
            _limit_integers(part, maximum)
