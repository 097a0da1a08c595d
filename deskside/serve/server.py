"""Run the HTTP server: uvicorn, the request guard, the app and the engine's thread."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import uvicorn
from starlette.routing import Route
from tokenizers import Tokenizer

from deskside.data.chat.renderer import read_chat_template
from deskside.data.encoder import choose_encoder
from deskside.engine.engine import Engine
from deskside.serve.admission import Admission
from deskside.serve.app import make_app
from deskside.serve.request_guard import MAX_HEAD_BYTES, ClientLimits, RequestGuard, connection_class
from deskside.serve.service import Service
from deskside.serve.worker import Worker
from deskside.utils.console import say
from deskside.weights.load import Loaded

GRACE_SECONDS = 10  # for connections to close after the last answer
# Longer than clients keep idle connections open (httpx, which OpenAI's client uses: 5 s). Otherwise the server may
# close a connection just when the client sends a request on it.
IDLE_SECONDS = 30

# How long Python lets a thread run while another waits. The engine's thread computes most of the time, and the event
# loop waits this long whenever it has something to do; Python's default is 5 ms.
SWITCH_SECONDS = 0.0005

ANY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server.

    Attributes:
        name: Model name in the API.
        concurrency: Maximum number of running and waiting choices.
        max_tokens: Maximum tokens per answer.
        hosts: Allowed names in the Host header; None for any.
        api_keys: Clients must send one of these; none if anyone may use the server.
        drain_seconds: Time that running answers get to finish when the server is stopped.
        adapters: Names in the API of the engine's adapters.
    """

    host: str
    name: str
    max_batch: int
    concurrency: int
    max_tokens: int
    hosts: frozenset[str] | None
    api_keys: tuple[str, ...]
    limits: ClientLimits
    drain_seconds: float
    adapters: tuple[str, ...] = ()


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which lets admitted requests finish after SIGINT or SIGTERM.

    It keeps listening until none runs or `drain_seconds` have passed, so that new requests get 503 and not a refused
    connection.
    A second signal stops it at once.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        admission: Admission,
        drain_seconds: float,
        on_start: Callable[[], None],
    ):
        super().__init__(config)
        self._admission, self._drain_seconds, self._on_start = admission, drain_seconds, on_start
        self._deadline = math.inf

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Not loop.add_signal_handler: closing the loop would remove the handlers, and a second SIGTERM would then
        # kill the process.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._admission.draining:
            self.should_exit = self.force_exit = True
        self._admission.draining = True
        self._deadline = min(self._deadline, time.monotonic() + self._drain_seconds)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server must stop now. uvicorn asks ten times per second."""
        if time.monotonic() >= self._deadline:
            self.should_exit = self.force_exit = True
        drained = self._admission.draining and not self._admission.running
        return await super().on_tick(counter) or drained


def serve(loaded: Loaded, engine: Engine, options: ServerOptions, listening: socket.socket) -> None:
    """Answer requests on a bound socket until SIGINT or SIGTERM."""
    _configure_logging()
    sys.setswitchinterval(SWITCH_SECONDS)
    name = options.name
    max_length = min(loaded.config.max_position_embeddings, engine.free_tokens)
    host = options.host if options.host not in ANY_ADDRESS else socket.gethostname()
    if ":" in host:
        host = f"[{host}]"  # IPv6
    address = f"http://{host}:{listening.getsockname()[1]}"
    step = "" if loaded.step is None else f", step {loaded.step}"
    encoder = choose_encoder(Tokenizer.from_str(loaded.tokenizer.to_str()))  # a copy, because it is changed

    chats = read_chat_template(loaded.tokenizer_dir) is not None

    def started() -> None:
        print(f"serving {name}{step}: {address}  (Ctrl-C stops it)", flush=True)
        if options.adapters:
            say(f"adapters, chosen by the model of a request: {', '.join(options.adapters)}")
        say(f"API: {address}/v1, batch size {options.max_batch}, KV cache of {engine.nbytes / 2**30:.2f} GiB")
        if not chats:
            say(
                "this model has no chat template: it continues text (/v1/completions) and refuses /v1/chat/completions"
            )
        say(f"prompts are encoded with {encoder.describe()}")

    async def run() -> None:
        worker = Worker(engine, asyncio.get_running_loop(), lambda line: say(f"deskside: {line}"))
        limits = (options.concurrency, options.max_tokens, max_length)
        service = Service(loaded, worker, name, *limits, encoder, options.adapters)
        app = make_app(service)
        guard = RequestGuard(app, options.hosts, options.api_keys, options.limits)
        paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
        config = uvicorn.Config(
            service.metrics.measured(guard, paths),
            http=connection_class(options.limits),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            timeout_keep_alive=IDLE_SECONDS,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        server = DrainingServer(config, service.admission, options.drain_seconds, started)
        worker.start()
        try:
            await server.serve([listening])
        finally:
            worker.stop()

    asyncio.run(run())
    # The server has stopped as requested; a second SIGTERM must not change the exit code.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _OneLine(logging.Formatter):
    """Formats an error as one line without traceback."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        reason = "" if error is None else f": {type(error).__name__}: {error}"
        return f"{record.getMessage().strip()}{reason}".splitlines()[0][:300]


def _configure_logging() -> None:
    """Print only errors of the server itself, one line each. Clients' errors are reported to the clients."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    # Answers that are cut off when the server stops are not errors.
    handler.addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
    )
    logger = logging.getLogger("uvicorn")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.ERROR)
