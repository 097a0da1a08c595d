"""The thread that owns the engine, and how an asyncio server talks to it.

Only one thread uses the engine. Requests and cancellations reach it through a queue, and the events of a step go back
to the event loop in one call. Cancelling a request frees its row and memory at the next step.

The thread survives every exception. An error while a request is submitted ends that request. An error in a step ends
the running requests: the engine restarts with an empty cache and then computes the waiting ones. If the device cannot
be used any more (a CUDA context after an illegal access), requests are refused, and each new one retries the restart.
"""

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deskside.engine.engine import Engine
from deskside.engine.requests import Event, Request
from deskside.utils.errors import RunError, UsageError, describe_error

EngineMessage = Event | UsageError | RunError
STOPPING = "the server is stopping"


@dataclass(eq=False)
class RequestFuture:
    """A submitted request. `tell` is called on the event loop with each event.

    An error is the last event: UsageError if the engine refuses the request, RunError if it failed or the server stops.
    """

    request: Request
    tell: Callable[[EngineMessage], None]
    left: int  # unfinished samples; used by the engine's thread only


class Worker:
    """Runs an engine in a thread until `stop`.

    Attributes:
        failed: Why the device cannot be used any more; None while it works.

    `on_failure` is called on the event loop with a line for the log when the engine or a request has failed.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, on_failure: Callable[[str], None]):
        self.failed: RunError | None = None
        self._engine, self._loop, self._on_failure = engine, loop, on_failure
        self._news = threading.Condition()
        self._inbox: deque[tuple[str, RequestFuture]] = deque()
        self._stopping = False
        self._numbers: dict[RequestFuture, int] = {}
        self._futures: dict[int, RequestFuture] = {}
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End all requests and join the thread."""
        with self._news:
            self._stopping = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: Request, tell: Callable[[EngineMessage], None]) -> RequestFuture:
        """Submit a request to the engine. Raises RunError if the server is stopping."""
        future = RequestFuture(request, tell, request.samples)
        self._tell("submit", future)
        return future

    def cancel(self, future: RequestFuture) -> None:
        """Cancel a request; no further event is delivered. Does nothing for a finished one."""
        self._tell("cancel", future)

    def _tell(self, what: str, future: RequestFuture) -> None:
        with self._news:
            if self._stopping:  # the thread reads no more messages
                if what == "submit":
                    raise RunError(STOPPING)
                return
            self._inbox.append((what, future))
            self._news.notify()

    # In the thread

    def _work(self) -> None:
        while self._take_orders():
            if self.failed is not None:
                continue  # all requests have been told
            try:
                events = self._engine.step()
            except BaseException as error:  # noqa: BLE001 - a panic of the tokenizer's Rust code is no Exception
                why = f"the engine failed: {describe_error(error)}"
                events = self._engine.abandon(why)
                ended = sum(event.reason == "failed" for event in events)
                self._log(f"{why} ({_place(error)}); {ended} answers ended with it")
                self._restart()
            self._post(events)
        self._end(RunError(STOPPING))

    def _restart(self) -> bool:
        """Rebuild the engine's state on the device. Returns whether that succeeded."""
        try:
            self._engine.restart()
        except BaseException as error:  # noqa: BLE001 - whatever it is, those who wait have to hear of it
            failure = RunError(
                f"the engine cannot be started again: {describe_error(error)}; restart the server"
            )
            if self.failed is None:
                self._log(str(failure))
            self.failed = failure
            self._post(self._engine.abandon(str(failure), waiting=True))
            return False
        self.failed = None
        return True

    def _take_orders(self) -> bool:
        """Process the messages since the last step, and wait while the engine is idle. False means stop."""
        with self._news:
            while not self._inbox and self._engine.idle and not self._stopping:
                self._news.wait()
            if self._stopping:
                return False
            orders, self._inbox = self._inbox, deque()
        for what, future in orders:
            if what == "cancel":
                self._cancel(future)
            elif self.failed is not None and not self._restart():
                self._deliver([(future, self.failed)])
            else:
                self._submit(future)
        return True

    def _submit(self, future: RequestFuture) -> None:
        try:
            number = self._engine.submit(future.request)
        except UsageError as error:
            self._deliver([(future, error)])
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is this request's alone
            why = f"the request could not be set up: {describe_error(error)}"
            self._log(f"{why} ({_place(error)})")
            self._deliver([(future, RunError(why))])
        else:
            self._numbers[future], self._futures[number] = number, future

    def _cancel(self, future: RequestFuture) -> None:
        if (number := self._numbers.get(future)) is not None:
            self._forget(number)
            self._engine.cancel(number)

    def _post(self, events: list[Event]) -> None:
        messages: list[tuple[RequestFuture, EngineMessage]] = []
        for event in events:
            if (future := self._futures.get(event.request)) is None:
                continue  # cancelled
            if event.reason == "failed":  # the response needs all samples
                self._cancel(future)
                messages.append((future, RunError(event.error)))
                continue
            messages.append((future, event))
            if event.reason is not None:
                future.left -= 1
                if not future.left:
                    self._forget(event.request)
        if messages:
            self._deliver(messages)

    def _forget(self, number: int) -> None:
        del self._numbers[self._futures.pop(number)]

    def _end(self, error: RunError) -> None:
        with self._news:
            waiting = [future for what, future in self._inbox if what == "submit"]
            self._inbox.clear()
        self._deliver([(future, error) for future in [*self._futures.values(), *waiting]])

    def _log(self, line: str) -> None:
        self._loop.call_soon_threadsafe(self._on_failure, line)

    def _deliver(self, messages: list[tuple[RequestFuture, EngineMessage]]) -> None:
        def put() -> None:
            for future, message in messages:
                future.tell(message)

        self._loop.call_soon_threadsafe(put)


def _place(error: BaseException) -> str:
    """Return the file and line that raised an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"
