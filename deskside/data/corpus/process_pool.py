"""Worker processes for data preparation: one per core, spawned, and ended with this process."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Generic, TypeVar

from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import RunError, UsageError

FEW = 2048  # fewer items are processed faster without starting processes
CHUNK = 128  # items sent to a process at once

Context = TypeVar("Context")
Item = TypeVar("Item")
Made = TypeVar("Made")
Tool = TypeVar("Tool")


class WorkerDied(Exception):
    """A worker process ended before it returned its result."""


class Task(Generic[Made]):
    """A call that runs in a worker process, and its result once `done` is true."""

    def __init__(self) -> None:
        self.done = False
        self._value: Made | None = None
        self._error: BaseException | None = None

    def finish(self, value: Made | None, error: BaseException | None) -> None:
        self.done, self._value, self._error = True, value, error

    def result(self) -> Made:
        """Return the result, or raise the exception that the call raised."""
        assert self.done
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # None is a result, too


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    task: Task[Any] | None = None


class WorkerPool:
    """Context manager of spawned processes that run functions. An exception in the block kills the processes.

    Every worker has its own pipe, and this process uses no thread, so a worker can be killed at any time. In
    concurrent.futures.ProcessPoolExecutor all workers write to one pipe: one that dies in the middle of a message
    leaves the executor's thread waiting for the rest, and `shutdown` waits for that thread forever
    (python/cpython#94777 is the same fault on the other queue). Workers also end if this process is killed, because
    their pipe is closed then.

    Args:
        count: number of processes.
        start: called with `arguments` in each process first.
    """

    def __init__(self, count: int, start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.count = count
        self._start = start, arguments
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        context = multiprocessing.get_context("spawn")
        # Workers inherit the mask: Ctrl-C in a terminal reaches them too, but only this process handles it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(self.count):
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(there, *self._start), daemon=True)
                process.start()
                there.close()  # so that the death of the worker closes the pipe
                self._workers.append(_Worker(process, here))
        except BaseException:
            self._close(kill=True)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(kill=kind is not None)

    def _close(self, kill: bool) -> None:
        for worker in self._workers:
            if kill:
                worker.process.kill()
            worker.connection.close()
        for worker in self._workers:
            worker.process.join()

    def submit(self, function: Callable[..., Made], *arguments: Any) -> Task[Made]:
        """Run function(*arguments) in a worker; wait for an idle one first. Raises WorkerDied."""
        # Only idle workers are written to: two sides that write large messages to each other would both block.
        while not (idle := [worker for worker in self._workers if worker.task is None]):
            self.receive()
        task: Task[Made] = Task()
        try:
            idle[0].connection.send((function, arguments))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerDied from error
        idle[0].task = task
        return task

    def receive(self) -> None:
        """Wait until at least one task is done. Raises WorkerDied."""
        busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]  # `wait` returns what it was given
            try:
                value, error = worker.connection.recv()
            except (EOFError, ConnectionResetError) as lost:
                raise WorkerDied from lost
            assert worker.task is not None
            worker.task.finish(value, error)
            worker.task = None


def _serve(connection: Connection, start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run the calls that arrive through a pipe, until it is closed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    start(*arguments)
    while True:
        try:
            function, given = connection.recv()
        except EOFError:
            return
        value: object = None
        error: Exception | None = None
        try:
            value = function(*given)
        except (RunError, UsageError, MemoryError) as raised:
            error = raised
        except Exception:  # noqa: BLE001 - the parent raises it; not every exception can be sent
            error = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
        connection.send((value, error))


def in_order(
    items: Iterable[tuple[Context, Item]],
    work: Callable[[Tool, Item], Made],
    own: Tool,
    build: Callable[[], Tool],
) -> Generator[tuple[Context, Made], None, None]:
    """Yield (context, work(tool, item)) for every item, in order. Contexts stay in this process.

    Fewer than FEW items are processed here with the tool `own`; more of them by one process per core, each with a
    tool made by `build`. work, build, items and results must be picklable. Raises RunError if a process dies. Close
    the generator (contextlib.closing) if it may not be exhausted.
    """
    rest = iter(items)
    first = list(itertools.islice(rest, FEW))
    every, count = itertools.chain(first, rest), cpu_cores()
    if len(first) < FEW or count == 1:
        for context, item in every:
            yield context, work(own, item)
        return
    running: deque[tuple[list[Context], Task[list[Made]]]] = deque()
    try:
        with WorkerPool(count, _start, (build,)) as pool:
            while chunk := list(itertools.islice(every, CHUNK)):
                made = pool.submit(_work, work, [item for _, item in chunk])
                running.append(([context for context, _ in chunk], made))
                if len(running) > 2 * count:  # a bound on the results that wait for a slow chunk
                    yield from _oldest(pool, running)
            while running:
                yield from _oldest(pool, running)
    except WorkerDied as error:
        raise RunError(
            "a process that prepares data was killed, most likely for memory; run the same command again with more of "
            "it free"
        ) from error


def _oldest(
    pool: WorkerPool, running: deque[tuple[list[Context], Task[list[Made]]]]
) -> Iterable[tuple[Context, Made]]:
    contexts, made = running.popleft()
    while not made.done:
        pool.receive()
    return zip(contexts, made.result(), strict=True)


_tool: Any = None  # one per process, set by the initializer


def _start(build: Callable[[], Any]) -> None:
    global _tool
    _tool = build()


def _work(work: Callable[[Any, Any], Made], items: list[Any]) -> list[Made]:
    return [work(_tool, item) for item in items]
