"""The tables of docs/serve.md: every field and endpoint of OpenAI's chat, completions, responses and embeddings API.

    python -m tests.serve.api_table     prints them

OpenAI's fields and endpoints are those of its official client. What the server does with each comes from the server's
own types: fields of the classes of field_lists.py have no effect or are refused, the others are honored.
"""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import openai
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from deskside.serve.embeddings import EmbeddingRequest
from deskside.serve.field_lists import (
    REMEDIES,
    ChatIneffectiveFields,
    ChatRefusedFields,
    IneffectiveFields,
)
from deskside.serve.protocol import ChatRequest, CompletionRequest
from deskside.serve.responses_request import ResponsesRefusedFields, ResponsesRequest

# Path, our request, OpenAI's parameters.
APIS: tuple[tuple[str, type[BaseModel], Any], ...] = (
    ("/v1/chat/completions", ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
    ("/v1/completions", CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
    ("/v1/responses", ResponsesRequest, response_create_params.ResponseCreateParamsStreaming),
    ("/v1/embeddings", EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
)
INEFFECTIVE = IneffectiveFields.model_fields | ChatIneffectiveFields.model_fields
REFUSED = (ChatRefusedFields, ResponsesRefusedFields)
MODULES = (
    "chat.completions.completions",
    "chat.completions.messages",
    "completions",
    "embeddings",
    "models",
    "responses.input_items",
    "responses.input_tokens",
    "responses.responses",
)


def openai_fields(parameters: Any) -> list[str]:
    """Return the fields of a TypedDict of the official client, with those of its bases."""
    return sorted(parameters.__required_keys__ | parameters.__optional_keys__)


def verdict(model: type[BaseModel], field: str) -> str:
    """Return what the server does with a field of OpenAI's API."""
    if field not in model.model_fields:
        return f"refused: it {REMEDIES[field]}" if field in REMEDIES else "refused"
    if field in INEFFECTIVE:
        return f"accepted without effect: {INEFFECTIVE[field].description}"
    if is_refused(model, field):
        allowed = [value for value in _literals(model.model_fields[field].annotation) if value is not False]
        but = f", but for {' and '.join(map(str, allowed))}" if allowed else ""
        return f"refused{but}" + (f": {REMEDIES[field]}" if field in REMEDIES else "")
    return "honored"


def is_refused(model: type[BaseModel], field: str) -> bool:
    """Return True if the server accepts only a value of this field that requests nothing."""
    by_class = any(field in kind.model_fields for kind in REFUSED if issubclass(model, kind))
    return by_class or (model is CompletionRequest and field == "suffix")


def _literals(annotation: Any) -> Iterator[Any]:
    for part in get_args(annotation):
        yield from [part] if isinstance(part, str | bool) else _literals(part)


def field_tables() -> str:
    """Return one table for each API: OpenAI's fields, then ours."""
    parts = []
    for path, model, parameters in APIS:
        known = openai_fields(parameters)
        rows = [f"| `{field}` | {verdict(model, field)} |" for field in known]
        own = sorted(
            field.alias or name
            for name, field in model.model_fields.items()
            if (field.alias or name) not in known and name not in INEFFECTIVE and not is_refused(model, name)
        )
        rows += [f"| `{field}` | honored; not OpenAI's |" for field in own]
        parts.append("\n".join([f"**{path}**", "", "| Field | |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def openai_endpoints() -> list[tuple[str, str]]:
    """Return method and path of every request that the client's modules make."""
    found = set()
    for name in MODULES:
        module = import_module(f"openai.resources.{name}")
        assert module.__file__ is not None
        text = Path(module.__file__).read_text()
        for call in re.finditer(
            r"self\._(get_api_list|get|post|delete)\(\s*(?:path_template\()?\s*\"([^\"]+)\"", text
        ):
            method = "GET" if call[1] == "get_api_list" else call[1].upper()
            found.add((method, "/v1" + call[2]))
    return sorted(found, key=lambda pair: (pair[1], pair[0]))


def endpoint_table(served: set[tuple[str, str]]) -> str:
    """Return the table of endpoints. served: methods and path patterns of our
    routes, with OpenAI's and other endpoints.
    """
    rows = []
    theirs = openai_endpoints()
    for method, path in theirs:
        answered = any(method == m and re.fullmatch(p, path) for m, p in served)
        rows.append(
            f"| {method} {path} | {'honored' if answered else 'HTTP 404 or 405: nothing is stored'} |"
        )
    own = sorted((m, p) for m, p in served if not any(m == t and re.fullmatch(p, path) for t, path in theirs))
    rows += [f"| {method} {path} | not OpenAI's |" for method, path in own]
    return "\n".join(["| Endpoint | |", "| --- | --- |", *rows])


def routes() -> set[tuple[str, str]]:
    """Return the methods and paths of the application, as patterns."""
    from starlette.routing import Route

    source = import_module("deskside.serve.app").__file__
    assert source is not None
    paths = re.findall(r'Route\("([^"]+)", \w+(?:\.\w+)?(, methods=\["POST"\])?\)', Path(source).read_text())
    made = [Route(path, lambda request: None, methods=["POST"] if post else ["GET"]) for path, post in paths]
    return {
        ("POST" if "POST" in (route.methods or ()) else "GET", re.sub(r"\{\w+:path\}", ".+", route.path))
        for route in made
    }


def tables() -> str:
    """Return all tables, as in docs/serve.md."""
    return f"{endpoint_table(routes())}\n\n{field_tables()}\n"


if __name__ == "__main__":
    print(f"openai {openai.__version__}")
    print(tables())
