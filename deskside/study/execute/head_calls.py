"""Calls that the head of a Ray cluster answers, so that a study outlives the head and can say what happened.

Ray blocks in such a call while the head does not answer. After 60 s it ends the process, with its own message.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from deskside.utils.errors import RunError

# A busy head or network needs a few seconds; the rest of Ray's 60 s is left for the end of the study.
ANSWER_SECONDS = 30.0
POLL_SECONDS = 0.1
T = TypeVar("T")


class HeadCalls:
    """Makes calls in a thread, in order. If one has no answer for `limit` seconds, the head counts as dead.

    Attributes:
        dead: True once the head counts as dead. No call of Ray may follow, since each may block or end the process.
    """

    def __init__(self, address: str, limit: float = ANSWER_SECONDS):
        self.dead = False
        self._address, self._limit = address, limit
        self._began: float | None = None  # time.monotonic() of the call that waits for its answer
        self._calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]()
        threading.Thread(target=self._work, name="head-calls", daemon=True).start()

    def begin(self, function: Callable[[], T]) -> "Future[T]":
        """Queue a call behind the earlier ones, without waiting for its answer."""
        future = Future[T]()
        self._calls.put((future, function))
        return future

    def get(self, function: Callable[[], T]) -> T:
        """Make a call and return its answer. Raises RunError like `check`."""
        future = self.begin(function)
        while not wait([future], timeout=POLL_SECONDS).done:
            self.check()
        return future.result()

    def check(self) -> None:
        """Raise RunError if the head has not answered for too long."""
        began = self._began
        if began is not None and time.monotonic() - began > self._limit:
            self.dead = True
        if self.dead:
            raise RunError(
                f"the head of the Ray cluster at {self._address} does not answer; start the cluster again"
            )

    def _work(self) -> None:
        while True:
            future, function = self._calls.get()
            self._began = time.monotonic()
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised where the answer is read
                future.set_exception(error)
            self._began = None
