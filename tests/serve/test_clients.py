"""LangChain and LiteLLM query the server: their answers equal those of the official client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.serve_load import served
from tests.serve.chatty import make_chatty

HELLO = [{"role": "user", "content": "hello, 東京"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = make_chatty(tmp_path_factory.mktemp("clients"))[1]
    environment = {"OMP_NUM_THREADS": "1", "DESKSIDE_API_KEY": "a-secret"}
    with served([str(folder), "--device", "cpu", "--name", "tiny"], environment) as (address, _):
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def expected(base: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=base, api_key="a-secret", max_retries=0, timeout=60)
    messages: Any = HELLO
    chat = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12)
    text = client.completions.create(model="tiny", prompt="the sea", temperature=0, max_tokens=12)
    vectors = client.embeddings.create(model="tiny", input=["the sea", "a ship"])
    return {
        "chat": chat.choices[0].message.content,
        "text": text.choices[0].text,
        "vectors": [entry.embedding for entry in vectors.data],
    }


@pytest.mark.full
def test_langchain(base: str, expected: dict[str, Any]) -> None:
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    access: dict[str, Any] = {"base_url": base, "api_key": "a-secret", "model": "tiny"}
    options: dict[str, Any] = {**access, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**options, max_tokens=12)
    answer = chat.invoke(HELLO)
    assert answer.content == expected["chat"] and answer.usage_metadata["output_tokens"] == 12
    assert "".join(str(chunk.content) for chunk in chat.stream(HELLO)) == expected["chat"]
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(HELLO)
    assert len(scored.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
    response = ChatOpenAI(**options, max_tokens=12, use_responses_api=True).invoke(HELLO)
    assert response.text == expected["chat"]
    assert OpenAI(**options, max_tokens=12).invoke("the sea") == expected["text"]
    embeddings = OpenAIEmbeddings(**access, check_embedding_ctx_length=False)
    for vector, given in zip(
        embeddings.embed_documents(["the sea", "a ship"]), expected["vectors"], strict=True
    ):
        assert vector == pytest.approx(given, abs=1e-6)


@pytest.mark.full
def test_litellm(base: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would download a price list
    import litellm

    access: dict[str, Any] = {"api_base": base, "api_key": "a-secret", "num_retries": 0}
    options: dict[str, Any] = {**access, "temperature": 0, "max_tokens": 12}
    chat: Any = litellm.completion(model="openai/tiny", messages=HELLO, **options)
    assert chat.choices[0].message.content == expected["chat"]
    pieces: Any = litellm.completion(model="openai/tiny", messages=HELLO, stream=True, **options)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected["chat"]
    more = {"frequency_penalty": 0.5, "seed": 1, "user": "u", "top_p": 0.9, "n": 2, "logit_bias": {"5": 1}}
    assert len(litellm.completion(model="openai/tiny", messages=HELLO, **options, **more).choices) == 2
    text: Any = litellm.text_completion(model="text-completion-openai/tiny", prompt="the sea", **options)
    assert text.choices[0].text == expected["text"]
    vectors: Any = litellm.embedding(model="openai/tiny", input=["the sea", "a ship"], **access)
    assert vectors.data[1]["embedding"] == pytest.approx(expected["vectors"][1], abs=1e-6)
    response: Any = litellm.responses(
        model="openai/tiny", input="hello, 東京", temperature=0, max_output_tokens=12, **access
    )
    assert response.output[0].content[0].text == expected["chat"]
