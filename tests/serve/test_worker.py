"""The engine's thread survives every exception in it. Affected clients are notified, and the others continue."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from deskside.engine.engine import Engine
from deskside.engine.requests import Event, Request
from deskside.engine.sampling import Sampling
from deskside.serve.worker import EngineMessage, Worker
from deskside.utils.errors import RunError, UsageError
from tests.engine.test_generate import make, plain

MODEL = make(num_hidden_layers=1)
PROMPT = (5, 17, 3)


class Panic(BaseException):
    """An exception like those of the tokenizer's Rust code, which do not derive from Exception."""


class Client:
    """Receives the messages about one request."""

    def __init__(self) -> None:
        self.told: list[EngineMessage] = []
        self.ended = asyncio.Event()

    def hear(self, told: EngineMessage) -> None:
        self.told.append(told)
        if not isinstance(told, Event) or told.reason is not None:
            self.ended.set()

    async def end(self) -> EngineMessage:
        await asyncio.wait_for(self.ended.wait(), 60)
        return self.told[-1]

    @property
    def tokens(self) -> list[int]:
        return [e.token for e in self.told if isinstance(e, Event) and e.token is not None]


def with_worker(engine: Engine, work: Callable[[Worker, list[str]], Awaitable[None]]) -> list[str]:
    """Run `work` with a worker, and return the lines of its log."""
    lines: list[str] = []

    async def run() -> None:
        worker = Worker(engine, asyncio.get_running_loop(), lines.append)
        worker.start()
        try:
            await work(worker, lines)
        finally:
            await asyncio.get_running_loop().run_in_executor(None, worker.stop)
        with pytest.raises(RunError, match="stopping"):
            worker.submit(Request(PROMPT, 1), lambda told: None)

    asyncio.run(run())
    return lines


async def asked(worker: Worker, request: Request) -> tuple[EngineMessage, list[int]]:
    client = Client()
    worker.submit(request, client.hear)
    return await client.end(), client.tokens


@pytest.mark.parametrize(
    "error", [ValueError("Overflow when unpacking long long"), MemoryError(), Panic("index")]
)
def test_a_request_that_cannot_be_set_up_ends_alone(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(MODEL, max_batch=4, max_tokens=256)
    real = engine.submit

    def submit(request: Request) -> int:
        if request.sampling.top_k == 7:
            raise error
        return real(request)

    monkeypatch.setattr(engine, "submit", submit)

    async def work(worker: Worker, lines: list[str]) -> None:
        beside = asyncio.create_task(asked(worker, Request(PROMPT, 40)))
        for _ in range(5):
            told, _ = await asked(worker, Request(PROMPT, 4, Sampling(top_k=7)))
            assert isinstance(told, RunError) and type(error).__name__ in str(told)
        told, _ = await asked(worker, Request((), 4))
        assert isinstance(told, UsageError)
        told, tokens = await beside
        assert isinstance(told, Event) and tokens == plain(MODEL, list(PROMPT), 40)

    assert len(with_worker(engine, work)) == 5


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), Panic("index")])
def test_a_step_that_raises_ends_its_batch_and_the_thread_goes_on(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(MODEL, max_batch=2, max_tokens=256)
    real, steps = engine.step, []

    def step() -> list[Event]:
        steps.append(1)
        if len(steps) in (4, 5):
            real()
            raise error
        return real()

    monkeypatch.setattr(engine, "step", step)

    async def work(worker: Worker, lines: list[str]) -> None:
        pairs = [asked(worker, Request(PROMPT, 20, samples=2)), asked(worker, Request((9,), 20))]
        for told, _ in await asyncio.gather(*pairs):
            assert (
                isinstance(told, RunError)
                and str(told) == f"the engine failed: {type(error).__name__}: {error}"
            )
        told, tokens = await asked(worker, Request(PROMPT, 20))
        assert isinstance(told, Event) and tokens == plain(MODEL, list(PROMPT), 20)
        assert worker.failed is None

    lines = with_worker(engine, work)
    assert len(lines) == 2 and "test_worker.py" in lines[0]


def test_a_device_beyond_repair_refuses_until_it_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MODEL, max_batch=1, max_tokens=256)
    real, broken = (engine.step, engine.restart), [True]

    def step() -> Any:
        if broken:
            raise RuntimeError("CUDA error")
        return real[0]()

    def restart() -> None:
        if broken:
            raise RuntimeError("CUDA error: the context is gone")
        real[1]()

    monkeypatch.setattr(engine, "step", step)
    monkeypatch.setattr(engine, "restart", restart)

    async def work(worker: Worker, lines: list[str]) -> None:
        found = await asyncio.gather(*(asked(worker, Request(PROMPT, 5)) for _ in range(3)))
        assert all(isinstance(told, RunError) for told, _ in found)
        assert worker.failed is not None
        told, _ = await asked(worker, Request(PROMPT, 5))
        assert told is worker.failed
        broken.clear()
        told, tokens = await asked(worker, Request(PROMPT, 5))
        assert isinstance(told, Event) and tokens == plain(MODEL, list(PROMPT), 5)
        assert worker.failed is None

    # It says once that it failed, and once that it cannot be restarted.
    assert len(with_worker(engine, work)) == 2
