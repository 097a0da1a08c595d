"""/tokenize, /detokenize, /version and /metrics."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deskside import __version__
from deskside.engine.engine import Engine
from deskside.serve.metrics import Metrics
from deskside.weights.load import Loaded, load_model
from tests.serve.chatty import make_chatty, rendered
from tests.serve.in_process import with_client

TOOL = {"type": "function", "function": {"name": "add"}}
HELLO = [{"role": "user", "content": "hello, 東京"}]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder: Path = make_chatty(tmp_path_factory.mktemp("endpoints"))[1]
    return load_model(folder)


def posted(loaded: Loaded, *requests: tuple[str, dict[str, Any]]) -> list[httpx.Response]:
    async def ask(client: openai.AsyncOpenAI) -> list[httpx.Response]:
        http: Any = client._client
        return [await http.post(f"http://here{path}", json=body) for path, body in requests]

    return with_client(loaded, ask)


def test_tokenize_gives_the_tokens_that_a_prompt_has(loaded: Loaded) -> None:
    text = "the wide <|im_end|> sea, 東京"
    plain, bare, chat, ended = posted(
        loaded,
        ("/tokenize", {"model": "tiny", "prompt": text, "return_token_strs": True}),
        ("/tokenize", {"prompt": text, "add_special_tokens": False}),
        ("/tokenize", {"messages": HELLO}),
        ("/tokenize", {"messages": HELLO, "add_generation_prompt": False}),
    )
    loaded.tokenizer.encode_special_tokens = True
    expected = loaded.tokenizer.encode(text, add_special_tokens=False).ids
    assert plain.json()["tokens"] == [loaded.start_token, *expected]
    assert plain.json()["count"] == len(expected) + 1 and plain.json()["max_model_len"] == 4096
    assert plain.json()["token_strs"] == [loaded.tokenizer.id_to_token(t) for t in plain.json()["tokens"]]
    assert bare.json()["tokens"] == expected and bare.json()["token_strs"] is None
    loaded.tokenizer.encode_special_tokens = False
    prompt = loaded.tokenizer.encode(rendered(HELLO), add_special_tokens=False).ids
    assert chat.json()["tokens"] == prompt
    assert ended.json()["tokens"] == prompt[: len(ended.json()["tokens"])] and ended.json()["count"] < len(
        prompt
    )
    (text_again,) = posted(loaded, ("/detokenize", {"tokens": expected}))
    assert text_again.json() == {"prompt": text}
    asked = {"prompt": text, "max_tokens": 1}
    assert posted(loaded, ("/v1/completions", asked))[0].json()["usage"]["prompt_tokens"] == len(expected) + 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": "a", "unheard_of": 1}, "unheard_of"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": HELLO, "tools": [TOOL, TOOL]}, "tools"),
        (
            "/tokenize",
            {"messages": HELLO, "chat_template_kwargs": {str(n): n for n in range(99)}},
            "chat_template_kwargs",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [5000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_wrong_requests_name_the_field(loaded: Loaded, path: str, body: dict[str, Any], param: str) -> None:
    (refused,) = posted(loaded, (path, body))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_another_model_is_not_served(loaded: Loaded) -> None:
    found = posted(
        loaded,
        ("/tokenize", {"model": "gpt-9", "prompt": "a"}),
        ("/detokenize", {"model": "gpt-9", "tokens": [1]}),
    )
    assert [response.status_code for response in found] == [404, 404]


def test_version_and_metrics(loaded: Loaded) -> None:
    async def ask(client: openai.AsyncOpenAI) -> tuple[Any, str]:
        http: Any = client._client
        await client.completions.create(model="tiny", prompt=[40, 41, 42], max_tokens=5, temperature=0, n=2)
        await client.completions.create(model="tiny", prompt=[40, 41, 42], max_tokens=0)
        version = await http.get("http://here/version")
        metrics = await http.get("http://here/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        return version.json(), metrics.text

    version, text = with_client(loaded, ask)
    assert version == {"version": __version__}
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["deskside_prompt_tokens_total"] == 6 and found["deskside_generated_tokens_total"] == 10
    assert found["deskside_first_token_seconds_count"] == found["deskside_token_seconds_count"] == 1
    assert 0 < found["deskside_token_seconds_sum"] < 60
    assert found["deskside_running_answers"] == 0 and found["deskside_free_cache_tokens"] > 0


def test_responses_are_counted_by_path_and_status(loaded: Loaded) -> None:
    metrics = Metrics(Engine(loaded.model))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/broken":
            raise RuntimeError("before a response")
        await send({"type": "http.response.start", "status": 429})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        measured = metrics.measured(app, frozenset({"/v1/completions"}))
        for path in ("/v1/completions", "/v1/completions", "/anything"):
            await measured({"type": "http", "path": path}, None, send)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError):
            await measured({"type": "http", "path": "/broken"}, None, send)  # type: ignore[arg-type]
        assert len(sent) == 6

    asyncio.run(run())
    counted = {
        (sample.labels["path"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name == "deskside_requests_total"
    }
    assert counted == {("/v1/completions", "429"): 2, ("other", "429"): 1, ("other", "none"): 1}
