"""Run the HTTP server: uvicorn around the app, the guard and the engine's thread."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deskside.engine.device import say
from deskside.engine.engine import Engine
from deskside.weights.load import Loaded

if TYPE_CHECKING:
    from deskside.serve.guard import Limits


GRACE_SECONDS = 10  # that answers may still take once the server is asked to stop
# An idle connection is left open for longer than clients leave theirs (httpx, and so OpenAI's: 5 s). Otherwise both end
# it at once, and a request that is sent in that moment is lost.
IDLE_SECONDS = 30

ANY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class ServerOptions:
    """What the server is told by its command.

    hosts: names under which it may be asked, None for any; token: what clients have to know, None for nothing.
    """

    host: str
    name: str
    max_batch: int
    concurrency: int
    max_tokens: int
    hosts: frozenset[str] | None
    token: str | None
    limits: "Limits"


def serve(loaded: Loaded, engine: Engine, options: ServerOptions, listening: socket.socket) -> None:
    """Answer requests on a bound socket until SIGINT or SIGTERM."""
    import uvicorn

    from deskside.serve.app import Service, make_app
    from deskside.serve.guard import MAX_HEAD, Guard, connection_class
    from deskside.serve.worker import Worker

    _quiet()
    name = options.name
    longest = min(loaded.config.max_position_embeddings, engine.free_tokens)
    shown = options.host if options.host not in ANY_ADDRESS else socket.gethostname()
    shown = f"[{shown}]" if ":" in shown else shown
    address = f"http://{shown}:{listening.getsockname()[1]}"
    at = "" if loaded.step is None else f", step {loaded.step}"

    class Server(uvicorn.Server):
        """uvicorn's, which ends well when it is told to end, and says when it is there."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.handle_exit, number, None)
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(f"serving {name}{at}: {address}  (Ctrl-C stops it)", flush=True)
            say(
                f"API: {address}/v1, {options.max_batch} answers at once, cache of {engine.nbytes / 2**30:.2f} GiB"
            )

    async def run() -> None:
        worker = Worker(engine, asyncio.get_running_loop(), lambda line: say(f"deskside: {line}"))
        app = make_app(Service(loaded, worker, name, options.concurrency, options.max_tokens, longest))
        config = uvicorn.Config(
            Guard(app, options.hosts, options.token, options.limits),
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
    # It has ended as it was asked to; asking again must not make that a failure.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _OneLine(logging.Formatter):
    """Errors without their traceback."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        what = "" if error is None else f": {type(error).__name__}: {error}"
        return f"{record.getMessage().strip()}{what}".splitlines()[0][:300]


def _quiet() -> None:
    """uvicorn's errors, in one line each. What clients do wrong is theirs to hear."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    # Answers that are cut off when the server stops are no error.
    handler.addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
    )
    logger = logging.getLogger("uvicorn")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.ERROR)
