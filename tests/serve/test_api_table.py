"""docs/serve.md lists what the server does with every field and endpoint of
OpenAI's client, and the server does so.
"""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deskside.weights.load import Loaded, load_model
from tests.serve.api_table import (
    APIS,
    INEFFECTIVE,
    is_refused,
    openai_endpoints,
    openai_fields,
    routes,
    tables,
    verdict,
)
from tests.serve.chatty import make_chatty
from tests.serve.in_process import with_client

DOCUMENT = Path(__file__).parents[2] / "docs" / "serve.md"
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 3,
        "temperature": 0,
    },
    "/v1/completions": {"prompt": "a", "max_tokens": 3, "temperature": 0},
    "/v1/responses": {"input": "a", "max_output_tokens": 3, "temperature": 0},
    "/v1/embeddings": {"input": "a"},
}
VALUES: dict[str, Any] = {
    "metadata": {"label": "x"},
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "b"},
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "service_tier": "priority",
    "store": True,
    "verbosity": "medium",
    "background": True,
    "context_management": [{"type": "compaction"}],
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "max_tool_calls": 3,
    "truncation": "auto",
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(make_chatty(tmp_path_factory.mktemp("table"))[1])


def test_the_document_has_these_tables() -> None:
    assert DOCUMENT.read_text("utf-8").endswith(tables()), "python -m tests.serve.api_table prints the tables"
    assert len(openai_endpoints()) >= 18 and ("POST", "/v1/responses") in routes()


@pytest.mark.parametrize(("path", "model", "parameters"), APIS, ids=[path for path, *_ in APIS])
def test_fields_do_what_the_table_says(loaded: Loaded, path: str, model: Any, parameters: Any) -> None:
    async def ask(client: openai.AsyncOpenAI) -> dict[str | None, httpx.Response]:
        http: Any = client._client
        found = {None: await http.post(f"http://here{path}", json=BASE[path])}
        for field in openai_fields(parameters):
            if field in INEFFECTIVE or is_refused(model, field):
                body = {**BASE[path], field: VALUES.get(field, "x")}
                found[field] = await http.post(f"http://here{path}", json=body)
        return found

    answers = with_client(loaded, ask)
    plain = answers.pop(None)
    assert plain.status_code == 200
    for field, response in answers.items():
        assert field is not None
        if verdict(model, field).startswith("refused"):
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        else:
            assert response.status_code == 200, response.text
            for part in ("choices", "data"):
                assert response.json().get(part) == plain.json().get(part)
    known = set(openai_fields(parameters))
    assert known <= model.model_fields.keys(), "a field of the client that no list has"


def test_endpoints_of_stored_objects_are_not_found(loaded: Loaded) -> None:
    served = routes()
    missing = [(m, p) for m, p in openai_endpoints() if not any(m == s and _fits(p, t) for s, t in served)]

    async def ask(client: openai.AsyncOpenAI) -> list[int]:
        http: Any = client._client
        found = []
        for method, path in missing:
            headers = {"content-type": "application/json"}
            response = await http.request(method, f"http://here{path}", content=b"{}", headers=headers)
            assert response.json()["error"]["type"] == "invalid_request_error"
            found.append(response.status_code)
        return found

    assert len(missing) >= 10 and set(with_client(loaded, ask)) == {404, 405}


def _fits(path: str, pattern: str) -> bool:
    import re

    return re.fullmatch(pattern, path) is not None
