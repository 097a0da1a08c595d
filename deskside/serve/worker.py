"""The thread that owns the engine, and how an asyncio server talks to it.

The engine computes in one thread and is never touched from another. Requests and cancellations go to it through a
queue; what a step tells goes back to the event loop in one call per step. Who loses interest cancels, which gives the
row and its memory back at the next step.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from deskside.engine.engine import Engine
from deskside.engine.requests import Event, Request
from deskside.errors import RunError, UsageError

Told = Event | UsageError | RunError


@dataclass(eq=False)
class Ticket:
    """One request on its way. `tell` is called on the event loop with each of its events; an error is the last one:
    UsageError, the engine refuses the request; RunError, it has failed or stops."""

    request: Request
    tell: Callable[[Told], None]
    left: int  # samples that have not ended, as the thread knows it


class Worker:
    """Runs an engine in a thread until `stop`. failed: why the engine cannot go on; None while it can.

    on_failure is called on the event loop when the engine fails.
    """

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, on_failure: Callable[[RunError], None]
    ):
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
        """Hand a request to the engine. Raises RunError when the engine has failed or stops."""
        ticket = Ticket(request, tell, request.samples)
        self._tell("submit", ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request, and hear no more of it. One that has ended is left alone."""
        self._tell("cancel", ticket)

    def _tell(self, what: str, ticket: Ticket) -> None:
        with self._news:
            if self.failed is not None:  # nobody reads it any more
                if what == "submit":
                    raise self.failed
                return
            self._inbox.append((what, ticket))
            self._news.notify()

    # In the thread

    def _work(self) -> None:
        try:
            while self._take_orders():
                self._post(self._engine.step())
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait have to hear of it
            first = (str(error).splitlines() or [""])[0][:200]
            failure = RunError(f"the engine failed: {type(error).__name__}: {first}")
            self._end(failure)
            self._loop.call_soon_threadsafe(self._on_failure, failure)
            return
        self._end(RunError("the server is stopping"))

    def _take_orders(self) -> bool:
        """What came in since the last step; waits while there is nothing to compute. False: stop."""
        with self._news:
            while not self._inbox and self._engine.idle and not self._stopping:
                self._news.wait()
            if self._stopping:
                return False
            orders, self._inbox = self._inbox, deque()
        for what, ticket in orders:
            if what == "submit":
                try:
                    number = self._engine.submit(ticket.request)
                except UsageError as error:
                    self._deliver([(ticket, error)])
                    continue
                self._numbers[ticket], self._tickets[number] = number, ticket
            elif (known := self._numbers.get(ticket)) is not None:
                self._forget(known)
                self._engine.cancel(known)
        return True

    def _post(self, events: list[Event]) -> None:
        messages: list[tuple[Ticket, Told]] = []
        for event in events:
            if (ticket := self._tickets.get(event.request)) is None:
                continue  # cancelled
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
            self.failed = error
            waiting = [ticket for what, ticket in self._inbox if what == "submit"]
            self._inbox.clear()
        self._deliver([(ticket, error) for ticket in [*self._tickets.values(), *waiting]])

    def _deliver(self, messages: list[tuple[Ticket, Told]]) -> None:
        def put() -> None:
            for ticket, message in messages:
                ticket.tell(message)

        self._loop.call_soon_threadsafe(put)
