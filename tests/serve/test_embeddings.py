"""/v1/embeddings against mean pooling of transformers on the exported model."""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel

from deskside.weights.load import Loaded, load_model
from tests.evaluate.made_model import Made, make
from tests.serve.in_process import with_client

TEXTS = ["the wide sea", "sailors sang songs", "7 days and 12 ships went to 東京 " * 5]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("embeddings"))


@pytest.fixture(scope="module")
def loaded(made: Made) -> Loaded:
    return load_model(made.folder)


def mean_pooled(folder: Path, tokens: list[int]) -> torch.Tensor:
    model: Any = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        return model(torch.tensor([tokens])).last_hidden_state[0].mean(0)


@pytest.mark.parametrize("engine", [{}, {"prefill_tokens": 16, "page_size": 8}])
def test_embeddings_are_transformers_mean_pooling(made: Made, loaded: Loaded, engine: dict[str, int]) -> None:
    prompts = [
        [loaded.start_token, *made.tokenizer.encode(text, add_special_tokens=False).ids] for text in TEXTS
    ]

    async def ask(client: openai.AsyncOpenAI) -> list[Any]:
        given: list[Any] = [TEXTS, prompts, TEXTS[0], prompts[1]]
        # The client asks for base64 and decodes it, unless float is requested explicitly.
        found = [await client.embeddings.create(model="tiny", input=i) for i in given]
        found.append(await client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float"))
        await client.completions.create(model="tiny", prompt=prompts[2], max_tokens=1)
        found.append(await client.embeddings.create(model="tiny", input=prompts))
        return found

    by_text, by_token, first, second, as_float, again = with_client(loaded, ask, **engine)
    expected = [mean_pooled(made.folder, tokens) for tokens in prompts]
    for answer in (by_text, by_token, as_float, again):
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        for entry, vector in zip(answer.data, expected, strict=True):
            torch.testing.assert_close(torch.tensor(entry.embedding), vector, atol=1e-5, rtol=1e-4)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))
    assert first.data[0].embedding == pytest.approx(by_text.data[0].embedding, abs=1e-6)
    assert second.data[0].embedding == pytest.approx(by_text.data[1].embedding, abs=1e-6)


def test_formats_and_refusals(loaded: Loaded) -> None:
    size = loaded.config.hidden_size

    async def ask(client: openai.AsyncOpenAI) -> list[httpx.Response]:
        http: Any = client._client
        bodies: list[dict[str, Any]] = [
            {"input": "the sea", "dimensions": size, "user": "u"},
            {"input": "the sea", "encoding_format": "base64"},
            {"input": "the sea", "dimensions": size - 1},
            {"input": []},
            {"input": [[5000]]},
            {"input": "sea " * 3000},
            {"input": ["a"] * 17},
            {"input": "a", "encoding_format": "int8"},
            {"input": "a", "model": "gpt-9"},
        ]
        return [await http.post("http://here/v1/embeddings", json=body) for body in bodies]

    plain, coded, *refused = with_client(loaded, ask)
    vector = plain.json()["data"][0]["embedding"]
    packed = base64.b64decode(coded.json()["data"][0]["embedding"])
    assert np.frombuffer(packed, "<f4").tolist() == vector and len(vector) == size
    found = [(response.status_code, response.json()["error"]["param"]) for response in refused]
    assert found[:-1] == [(400, "dimensions"), *[(400, "input")] * 4, (400, "encoding_format")]
    assert found[-1] == (404, "model")
