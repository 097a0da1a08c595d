"""The engine's thread, and its communication with an asyncio server.

Only this thread runs the engine. It receives requests and cancellations through a queue, and passes the events of a
step to the event loop in one call. Cancelling a request frees its rows and memory before the next step.

The thread survives errors of the engine. An error while a request is submitted ends that request. An error in a step
ends the running requests (the waiting ones if none runs); the engine restarts with an empty cache and computes the
others. If the device cannot be used any more (a CUDA context after an illegal access), requests are refused, and each
new one retries the restart.
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
class RequestHandle:
    """A submitted request. `on_message` is called on the event loop with each event, and with an error if there is one.

    An error is the last message: UsageError if the engine rejects the request or cannot fulfill it, RunError if the
    request fails or the server stops.
    """

    request: Request
    on_message: Callable[[EngineMessage], None]
    unfinished: int  # samples; used by the engine's thread only


class Worker:
    """Runs an engine in a thread until `stop`.

    Attributes:
        engine: Only the thread may call its methods; its counters may be read.
        failed: Why the device cannot be used any more; None while it works.

    `on_failure` is called on the event loop with a line for the log when the engine raises an unexpected exception.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, on_failure: Callable[[str], None]):
        self.failed: RunError | None = None
        self.engine, self._loop, self._on_failure = engine, loop, on_failure
        self._changed = threading.Condition()  # guards the inbox and `_stopping`
        self._inbox: deque[tuple[str, RequestHandle]] = deque()
        self._stopping = False
        self._numbers: dict[RequestHandle, int] = {}
        self._handles: dict[int, RequestHandle] = {}
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End all requests and join the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: Request, on_message: Callable[[EngineMessage], None]) -> RequestHandle:
        """Submit a request to the engine. Raises RunError if the server is stopping."""
        handle = RequestHandle(request, on_message, request.samples)
        self._send("submit", handle)
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """Cancel a request, after the step in progress. Does nothing for a finished one."""
        self._send("cancel", handle)

    def _send(self, action: str, handle: RequestHandle) -> None:
        with self._changed:
            if self._stopping:  # the thread no longer reads messages
                if action == "submit":
                    raise RunError(STOPPING)
                return
            self._inbox.append((action, handle))
            self._changed.notify()

    # In the thread

    def _work(self) -> None:
        while self._process_inbox():
            if self.failed is not None:
                continue  # all requests have failed; a new one retries the restart
            try:
                events = self.engine.step()
            except BaseException as error:  # noqa: BLE001 - a panic of the tokenizer's Rust code is a BaseException
                why = f"the engine failed: {describe_error(error)}"
                events = self.engine.abandon(why)
                ended = sum(event.reason == "failed" for event in events)
                self._log(f"{why} ({_location(error)}); {ended} running answers failed")
                self._restart()
            self._post(events)
        self._end(RunError(STOPPING))

    def _restart(self) -> bool:
        """Recreate the engine's state on the device. Return True if that succeeded."""
        try:
            self.engine.restart()
        except BaseException as error:  # noqa: BLE001 - waiting requests must fail whatever the error is
            failure = RunError(f"the engine cannot be restarted: {describe_error(error)}; restart the server")
            if self.failed is None:
                self._log(str(failure))
            self.failed = failure
            self._post(self.engine.abandon(str(failure), waiting=True))
            return False
        self.failed = None
        return True

    def _process_inbox(self) -> bool:
        """Process new messages, after waiting for one if the engine is idle. Return False if the thread should stop."""
        with self._changed:
            while not self._inbox and self.engine.idle and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return False
            messages, self._inbox = self._inbox, deque()
        for action, handle in messages:
            if action == "cancel":
                self._cancel(handle)
            elif self.failed is not None and not self._restart():
                self._deliver([(handle, self.failed)])
            else:
                self._submit(handle)
        return True

    def _submit(self, handle: RequestHandle) -> None:
        try:
            number = self.engine.submit(handle.request)
        except UsageError as error:
            self._deliver([(handle, error)])
        except BaseException as error:  # noqa: BLE001 - an error must fail only this request
            why = f"the request could not be set up: {describe_error(error)}"
            self._log(f"{why} ({_location(error)})")
            self._deliver([(handle, RunError(why))])
        else:
            self._numbers[handle], self._handles[number] = number, handle

    def _cancel(self, handle: RequestHandle) -> None:
        if (number := self._numbers.get(handle)) is not None:
            self._forget(number)
            self.engine.cancel(number)

    def _post(self, events: list[Event]) -> None:
        messages: list[tuple[RequestHandle, EngineMessage]] = []
        for event in events:
            if (handle := self._handles.get(event.request)) is None:
                continue  # cancelled
            if event.reason == "failed":  # fails the whole request: its response needs all samples
                self._cancel(handle)
                error = UsageError(event.error) if event.unfulfillable else RunError(event.error)
                messages.append((handle, error))
                continue
            messages.append((handle, event))
            if event.reason is not None:
                handle.unfinished -= 1
                if not handle.unfinished:
                    self._forget(event.request)
        if messages:
            self._deliver(messages)

    def _forget(self, number: int) -> None:
        del self._numbers[self._handles.pop(number)]

    def _end(self, error: RunError) -> None:
        with self._changed:
            waiting = [handle for action, handle in self._inbox if action == "submit"]
            self._inbox.clear()
        self._deliver([(handle, error) for handle in [*self._handles.values(), *waiting]])

    def _log(self, line: str) -> None:
        self._loop.call_soon_threadsafe(self._on_failure, line)

    def _deliver(self, messages: list[tuple[RequestHandle, EngineMessage]]) -> None:
        def put() -> None:
            for handle, message in messages:
                handle.on_message(message)

        self._loop.call_soon_threadsafe(put)


def _location(error: BaseException) -> str:
    """Return the file and line that raised an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"
