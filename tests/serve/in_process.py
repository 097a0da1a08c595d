"""The server's application without a network, and clients for it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import openai

from deskside.engine.engine import Engine
from deskside.serve.app import make_app
from deskside.serve.service import Service
from deskside.serve.worker import Worker
from deskside.weights.load import Loaded

T = TypeVar("T")


def with_client(
    loaded: Loaded,
    ask: Callable[[openai.AsyncOpenAI], Awaitable[T]],
    max_choices: int = 16,
    adapter_names: tuple[str, ...] = (),
    limits: tuple[int, int] = (3000, 4096),
    **engine: Any,
) -> T:
    """Return ask(client) with a server of this model, whose name is "tiny". The official client makes no retries.

    limits: the most tokens of an answer, and of a prompt with its answer.
    """

    async def run() -> T:
        made = Engine(loaded.model, tokenizer=loaded.tokenizer, **engine)
        worker = Worker(made, asyncio.get_running_loop(), print)
        worker.start()
        try:
            service = Service(loaded, worker, "tiny", max_choices, *limits, adapters=adapter_names)
            app = make_app(service)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, timeout=60) as http:
                base = "http://here/v1"
                return await ask(
                    openai.AsyncOpenAI(base_url=base, api_key="-", max_retries=0, http_client=http)
                )
        finally:
            await asyncio.get_running_loop().run_in_executor(None, worker.stop)

    return asyncio.run(run())
