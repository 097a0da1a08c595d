"""Run the HTTP server: uvicorn around the app, the guard and the engine's thread."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from deskside.engine.engine import Engine
from deskside.serve.app import Service, make_app
from deskside.serve.request_guard import MAX_HEAD, ClientLimits, RequestGuard, connection_class
from deskside.serve.worker import Worker
from deskside.utils.console import say
from deskside.weights.load import Loaded

GRACE_SECONDS = 10  # for running answers after the server was asked to stop
# Idle connections stay open longer than clients keep theirs (httpx, and so OpenAI's client: 5 s). Otherwise both sides
# may close at the same moment, and a request sent then is lost.
IDLE_SECONDS = 30

ANY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server. `hosts` are the allowed Host headers, None for any; `token` is None for no token."""

    host: str
    name: str
    max_batch: int
    concurrency: int
    max_tokens: int
    hosts: frozenset[str] | None
    token: str | None
    limits: ClientLimits


def serve(loaded: Loaded, engine: Engine, options: ServerOptions, listening: socket.socket) -> None:
    """Answer requests on a bound socket until SIGINT or SIGTERM."""
    _quiet()
    name = options.name
    longest = min(loaded.config.max_position_embeddings, engine.free_tokens)
    shown = options.host if options.host not in ANY_ADDRESS else socket.gethostname()
    shown = f"[{shown}]" if ":" in shown else shown
    address = f"http://{shown}:{listening.getsockname()[1]}"
    at = "" if loaded.step is None else f", step {loaded.step}"

    class Server(uvicorn.Server):
        """uvicorn's server with our signal handling and start message."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # Not the event loop's handlers: closing the loop would remove them, and a second SIGTERM would then kill.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.handle_exit)
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(f"serving {name}{at}: {address}  (Ctrl-C stops it)", flush=True)
            say(
                f"API: {address}/v1, batch size {options.max_batch}, KV cache of {engine.nbytes / 2**30:.2f} GiB"
            )

    async def run() -> None:
        worker = Worker(engine, asyncio.get_running_loop(), lambda line: say(f"deskside: {line}"))
        app = make_app(Service(loaded, worker, name, options.concurrency, options.max_tokens, longest))
        config = uvicorn.Config(
            RequestGuard(app, options.hosts, options.token, options.limits),
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
            h11_max_incomplete_event_size=MAX_HEAD,
        )
        server = Server(config)
        worker.start()
        try:
            await server.serve([listening])
        finally:
            worker.stop()

    asyncio.run(run())
    # The server has stopped as requested; a second SIGTERM must not turn that into a failure.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _OneLine(logging.Formatter):
    """Formats errors in one line, without traceback."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        what = "" if error is None else f": {type(error).__name__}: {error}"
        return f"{record.getMessage().strip()}{what}".splitlines()[0][:300]


def _quiet() -> None:
    """Print only uvicorn's own errors, in one line each; mistakes of clients are reported to the clients."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    # Answers cut off by stopping the server are not errors.
    handler.addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
    )
    logger = logging.getLogger("uvicorn")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.ERROR)
