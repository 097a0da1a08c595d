"""Tests of the application without a network: no request waits longer than it must."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from deskside.engine.engine import Engine
from deskside.serve.app import make_app
from deskside.serve.handler import SHORT_CHARACTERS
from deskside.serve.service import Service
from deskside.serve.templating import PromptEncoder
from deskside.serve.worker import Worker
from deskside.weights.load import Loaded, load_model
from tests.serve.chatty import make_chatty

LONG = "the sea " * SHORT_CHARACTERS


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder: Path = make_chatty(tmp_path_factory.mktemp("app"))[1]
    return load_model(folder)


def test_a_short_prompt_does_not_wait_for_long_ones(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten long texts cannot be encoded until the short one has its answer."""
    answered, begun = threading.Event(), threading.Event()
    real = PromptEncoder.text

    def text(self: PromptEncoder, given: str) -> list[int]:
        if len(given) > SHORT_CHARACTERS:
            begun.set()
            assert answered.wait(60), "the short prompt waits for the long ones"
        return real(self, given)

    monkeypatch.setattr(PromptEncoder, "text", text)

    async def run() -> None:
        engine = Engine(loaded.model, tokenizer=loaded.tokenizer)
        worker = Worker(engine, asyncio.get_running_loop(), lambda line: None)
        worker.start()
        app = make_app(Service(loaded, worker, "tiny", 64, 100, 4096))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:

            async def ask(prompt: Any) -> httpx.Response:
                return await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})

            try:
                long = [asyncio.create_task(ask(LONG)) for _ in range(10)]
                await asyncio.get_running_loop().run_in_executor(None, begun.wait, 60)
                assert (await ask("ab")).status_code == 200
                assert not any(task.done() for task in long)
            finally:
                answered.set()
            for response in await asyncio.gather(*long):
                assert response.status_code == 400
                assert response.json()["error"]["code"] == "context_length_exceeded"
            await asyncio.get_running_loop().run_in_executor(None, worker.stop)
            assert (await ask("ab")).status_code == 503

    asyncio.run(run())
