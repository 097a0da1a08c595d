"""The thread that owns the engine, and how an asyncio server talks to it.

The engine computes in one thread and is never touched from another. Requests and cancellations go to it through a
queue; what a step tells goes back to the event loop in one call per step. Who loses interest cancels, which gives the
row and its memory back at the next step.

The thread survives every exception. One that a request causes while it is taken in ends that request. One that a step
raises ends the requests that were running in it: the engine starts again with an empty cache, and those that waited are
computed then. Where the device is beyond repair (a CUDA context after an illegal access), requests are refused, and
each new one tries the restart again.
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
from deskside.utils.errors import RunError, UsageError, described

Told = Event | UsageError | RunError
STOPPING = "the server is stopping"


@dataclass(eq=False)
class Ticket:
    """One request on its way. `tell` is called on the event loop with each of its events; an error is the last one:
    UsageError, the engine refuses the request; RunError, the request has failed, or the server stops."""

    request: Request
    tell: Callable[[Told], None]
    left: int  # samples that have not ended, as the thread knows it


class Worker:
    """Runs an engine in a thread until `stop`. failed: why the device is beyond repair; None while it computes.

    on_failure is called on the event loop with a line for the server's log whenever the engine or the setup of a
    request has failed.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, on_failure: Callable[[str], None]):
        self.failed: RunError | None = None
        self._engine, self._loop, self._on_failure = engine, loop, on_failure
        self._news = threading.Condition()
        self._inbox: deque[tuple[str, Ticket]] = deque()
        self._stopping = False
        self._numbers: dict[Ticket, int] = {}
        self._tickets: dict[int, Ticket] = {}
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """End what runs, and wait for the thread."""
        with self._news:
            self._stopping = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: Request, tell: Callable[[Told], None]) -> Ticket:
        """Hand a request to the engine. Raises RunError when the server is stopping."""
        ticket = Ticket(request, tell, request.samples)
        self._tell("submit", ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request, and hear no more of it. One that has ended is left alone."""
        self._tell("cancel", ticket)

    def _tell(self, what: str, ticket: Ticket) -> None:
        with self._news:
            if self._stopping:  # nobody reads it any more
                if what == "submit":
                    raise RunError(STOPPING)
                return
            self._inbox.append((what, ticket))
            self._news.notify()

    # In the thread

    def _work(self) -> None:
        while self._take_orders():
            if self.failed is not None:
                continue  # those who asked have heard of it
            try:
                events = self._engine.step()
            except BaseException as error:  # noqa: BLE001 - a panic of the tokenizer's Rust code is no Exception
                why = f"the engine failed: {described(error)}"
                events = self._engine.abandon(why)
                ended = sum(event.reason == "failed" for event in events)
                self._log(f"{why} ({_place(error)}); {ended} answers ended with it")
                self._restart()
            self._post(events)
        self._end(RunError(STOPPING))

    def _restart(self) -> bool:
        """Make the engine's state on the device anew. Returns whether it computes again."""
        try:
            self._engine.restart()
        except BaseException as error:  # noqa: BLE001 - whatever it is, those who wait have to hear of it
            failure = RunError(f"the engine cannot be started again: {described(error)}; restart the server")
            if self.failed is None:
                self._log(str(failure))
            self.failed = failure
            self._post(self._engine.abandon(str(failure), waiting=True))
            return False
        self.failed = None
        return True

    def _take_orders(self) -> bool:
        """What came in since the last step; waits while there is nothing to compute. False: stop."""
        with self._news:
            while not self._inbox and self._engine.idle and not self._stopping:
                self._news.wait()
            if self._stopping:
                return False
            orders, self._inbox = self._inbox, deque()
        for what, ticket in orders:
            if what == "cancel":
                self._cancel(ticket)
            elif self.failed is not None and not self._restart():
                self._deliver([(ticket, self.failed)])
            else:
                self._submit(ticket)
        return True

    def _submit(self, ticket: Ticket) -> None:
        try:
            number = self._engine.submit(ticket.request)
        except UsageError as error:
            self._deliver([(ticket, error)])
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is this request's alone
            why = f"the request could not be set up: {described(error)}"
            self._log(f"{why} ({_place(error)})")
            self._deliver([(ticket, RunError(why))])
        else:
            self._numbers[ticket], self._tickets[number] = number, ticket

    def _cancel(self, ticket: Ticket) -> None:
        if (number := self._numbers.get(ticket)) is not None:
            self._forget(number)
            self._engine.cancel(number)

    def _post(self, events: list[Event]) -> None:
        messages: list[tuple[Ticket, Told]] = []
        for event in events:
            if (ticket := self._tickets.get(event.request)) is None:
                continue  # cancelled
            if event.reason == "failed":  # the request's other samples are of no use without it
                self._cancel(ticket)
                messages.append((ticket, RunError(event.error)))
                continue
            messages.append((ticket, event))
            if event.reason is not None:
                ticket.left -= 1
                if not ticket.left:
                    self._forget(event.request)
        if messages:
            self._deliver(messages)

    def _forget(self, number: int) -> None:
        del self._numbers[self._tickets.pop(number)]

    def _end(self, error: RunError) -> None:
        with self._news:
            waiting = [ticket for what, ticket in self._inbox if what == "submit"]
            self._inbox.clear()
        self._deliver([(ticket, error) for ticket in [*self._tickets.values(), *waiting]])

    def _log(self, line: str) -> None:
        self._loop.call_soon_threadsafe(self._on_failure, line)

    def _deliver(self, messages: list[tuple[Ticket, Told]]) -> None:
        def put() -> None:
            for ticket, message in messages:
                ticket.tell(message)

        self._loop.call_soon_threadsafe(put)


def _place(error: BaseException) -> str:
    """Return the file and line that raised an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"
