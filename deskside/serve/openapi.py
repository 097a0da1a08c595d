"""OpenAPI document of the server.

Requests are the types of protocol.py, with the bounds that this server adds to theirs. Responses are described here and
written by answers.py; tests/serve/test_fuzz.py holds both to this document.
"""

from collections.abc import Collection
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from deskside import __version__
from deskside.serve.protocol import ChatRequest, CompletionRequest, RequestMessage

SCHEMAS = "#/components/schemas/"
REFUSALS = {
    "400": "The request is malformed, out of bounds or asks for something that is not available; `param` names it.",
    "401": "A token is needed.",
    "403": "Another web page, or another host's name.",
    "404": "No such path, or the model is not served here.",
    "405": "The path takes another method.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "All places are taken; `retry-after` says when to come back.",
    "500": "The request failed in the server.",
    "503": "The server is stopping, or its device has failed.",
}
FOR_GET = ("401", "403", "404", "405")


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Exact):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Exact):
    """Return the error responses."""

    error: ErrorDetail


class Usage(_Exact):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(_Exact):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Any]


class ChatLogprobs(_Exact):
    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(_Exact):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None
    text_offset: list[int]


class AssistantMessage(_Exact):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Exact):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextChoice(_Exact):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class _Answer(_Exact):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class Model(_Exact):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    chat_template: bool


class ModelList(_Exact):
    object: Literal["list"]
    data: list[Model]


class Health(_Exact):
    status: Literal["ok", "failed"]


RESPONSES: tuple[type[BaseModel], ...] = (ChatCompletion, Completion, Model, ModelList, Health, Error)


def document(places: int, max_tokens: int, vocabulary: int, roles: Collection[str]) -> dict[str, Any]:
    """Return the document.

    places: choices that one request may ask for; max_tokens: of one answer; roles: of messages, empty where the model
    has no chat template.
    """
    _, definitions = models_json_schema(
        [
            (ChatRequest, "validation"),
            (CompletionRequest, "validation"),
            *((r, "validation") for r in RESPONSES),
        ],
        ref_template=SCHEMAS + "{model}",
    )
    schemas: dict[str, Any] = definitions["$defs"]
    for name in (ChatRequest.__name__, CompletionRequest.__name__):
        properties = schemas[name]["properties"]
        for field, most in (("max_tokens", max_tokens), ("max_completion_tokens", max_tokens), ("n", places)):
            for part in _inside(properties.get(field), "integer"):
                part["maximum"] = min(most, part.get("maximum", most))
    if roles:
        schemas[RequestMessage.__name__]["properties"]["role"]["enum"] = sorted(roles)
    prompt = schemas[CompletionRequest.__name__]["properties"]["prompt"]
    for token in _inside(prompt, "integer"):
        token["maximum"] = vocabulary - 1
    for kind in prompt["anyOf"]:
        if kind["type"] == "array" and kind["items"].get("type") != "integer":
            kind["maxItems"] = places
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "deskside serve",
            "version": __version__,
            "description": (
                "A part of OpenAI's API, for one model. `stream_options` needs `stream`: true; `best_of` has to "
                "equal `n`; a prompt and its answer have to fit the model."
            ),
        },
        "paths": {
            "/health": {"get": _get("Whether the server computes", Health, ("503",))},
            "/v1/models": {"get": _get("The model that is served", ModelList, FOR_GET)},
            "/v1/models/{name}": {
                "get": {
                    **_get("The model of this name", Model, FOR_GET),
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
            "/v1/chat/completions": {"post": _post("Answer messages", ChatRequest, ChatCompletion)},
            "/v1/completions": {"post": _post("Continue texts", CompletionRequest, Completion)},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _get(what: str, answer: type[BaseModel], refusals: tuple[str, ...]) -> dict[str, Any]:
    found = {number: _refusal(number) for number in refusals}
    if answer is Health:
        found["503"] = {"description": "The device has failed.", **_content(Health)}
    return {"summary": what, "responses": {"200": {"description": what, **_content(answer)}, **found}}


def _post(what: str, request: type[BaseModel], answer: type[BaseModel]) -> dict[str, Any]:
    content = _content(answer)["content"]
    # One event: its data is a chunk in OpenAI's form, and at the end [DONE].
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    stream = {"text/event-stream": {"schema": event}}
    return {
        "summary": what,
        "requestBody": {"required": True, **_content(request)},
        "responses": {
            "200": {
                "description": f"{what}: whole, or with `stream` as server-sent events.",
                "content": {**content, **stream},
            },
            **{number: _refusal(number) for number in REFUSALS},
        },
    }


def _refusal(number: str) -> dict[str, Any]:
    return {"description": REFUSALS[number], **_content(Error)}


def _content(model: type[BaseModel]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": SCHEMAS + model.__name__}}}}


def _inside(schema: Any, kind: str) -> list[dict[str, Any]]:
    """Yield all parts of a schema that describe one JSON type."""
    if isinstance(schema, list):
        return [found for part in schema for found in _inside(part, kind)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") == kind else []
    return own + [found for part in schema.values() for found in _inside(part, kind)]
