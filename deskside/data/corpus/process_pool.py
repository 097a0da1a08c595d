"""Worker processes for data preparation. They are spawned, and end when this process ends."""

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

MIN_PARALLEL_ITEMS = 2048  # fewer items are processed faster without starting processes
ITEMS_PER_TASK = 128  # items sent to a process at once

Context = TypeVar("Context")
Item = TypeVar("Item")
Result = TypeVar("Result")
Tool = TypeVar("Tool")


class WorkerDied(Exception):
    """A worker process ended before it returned its result."""


class Task(Generic[Result]):
    """A call that runs in a worker process. Once `done` is true, `result` returns its result."""

    def __init__(self) -> None:
        self.done = False
        self._value: Result | None = None
        self._error: BaseException | None = None

    def finish(self, value: Result | None, error: BaseException | None) -> None:
        """Store the result or the exception of the call."""
        self.done, self._value, self._error = True, value, error

    def result(self) -> Result:
        """Return the result, or raise the exception that the call raised."""
        assert self.done
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # None may be the result


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
    that closes their pipes.

    Args:
        count: Number of processes.
        initializer: Called with `arguments` once in each process, before the first task.
    """

    def __init__(self, count: int, initializer: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.count = count
        self._initializer, self._arguments = initializer, arguments
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        context = multiprocessing.get_context("spawn")
        # Ctrl-C in a terminal reaches the workers too, but only this process should handle it. They inherit the mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(self.count):
                here, there = context.Pipe()
                process = context.Process(
                    target=_serve, args=(there, self._initializer, self._arguments), daemon=True
                )
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

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Task[Result]:
        """Run function(*arguments) in a worker, as soon as one is idle. Raises WorkerDied."""
        # Only write to idle workers: if both sides write large messages to each other, both block forever.
        while not (idle := [worker for worker in self._workers if worker.task is None]):
            self.receive()
        task: Task[Result] = Task()
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
            worker = busy[connection]  # type: ignore[index]  # `wait` returns some of its arguments
            try:
                value, error = worker.connection.recv()
            except (EOFError, ConnectionResetError) as disconnected:
                raise WorkerDied from disconnected
            assert worker.task is not None
            worker.task.finish(value, error)
            worker.task = None


class Calls:
    """Runs calls in worker processes, or in this one without a pool, and passes each result to a function.

    A context manager, which ends with the last call. An exception in the block leaves the running calls to the pool.
    """

    def __init__(self, pool: WorkerPool | None) -> None:
        self.pool = pool
        self.running: list[tuple[Task[Any], Callable[[Any], None]]] = []

    def submit(self, then: Callable[[Any], None], function: Callable[..., Any], *arguments: Any) -> None:
        """Run function(*arguments), and call `then` with the result, here or in a later call of this class."""
        if self.pool is None:
            then(function(*arguments))
            return
        self.running.append((self.pool.submit(function, *arguments), then))
        self._collect()

    def _collect(self) -> None:
        for entry in [entry for entry in self.running if entry[0].done]:
            self.running.remove(entry)
            entry[1](entry[0].result())

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        while kind is None and self.running and self.pool is not None:
            self.pool.receive()
            self._collect()


def _serve(connection: Connection, initializer: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run the calls that arrive through a pipe, until it is closed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    initializer(*arguments)
    while True:
        try:
            function, call_arguments = connection.recv()
        except EOFError:
            return
        value: object = None
        error: Exception | None = None
        try:
            value = function(*call_arguments)
        except (RunError, UsageError, MemoryError) as raised:
            error = raised
        except Exception:  # noqa: BLE001 - the parent raises it; not every exception can be pickled
            error = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
        connection.send((value, error))


def map_in_order(
    items: Iterable[tuple[Context, Item]],
    function: Callable[[Tool, Item], Result],
    local_tool: Tool,
    make_tool: Callable[[], Tool],
) -> Generator[tuple[Context, Result], None, None]:
    """Yield (context, function(tool, item)) for every item, in order. Contexts stay in this process.

    Fewer than MIN_PARALLEL_ITEMS items, or all items if there is one core, are processed here with `local_tool`.
    Otherwise there is one process per core, each with its own tool from `make_tool`. The functions, items and results
    must be picklable. Raises RunError if a process dies. If the generator may not be exhausted, close it
    (contextlib.closing).
    """
    remaining = iter(items)
    first = list(itertools.islice(remaining, MIN_PARALLEL_ITEMS))
    all_items, count = itertools.chain(first, remaining), cpu_cores()
    if len(first) < MIN_PARALLEL_ITEMS or count == 1:
        for context, item in all_items:
            yield context, function(local_tool, item)
        return
    running: deque[tuple[list[Context], Task[list[Result]]]] = deque()
    try:
        with WorkerPool(count, _initialize, (make_tool,)) as pool:
            while chunk := list(itertools.islice(all_items, ITEMS_PER_TASK)):
                task = pool.submit(_process_chunk, function, [item for _, item in chunk])
                running.append(([context for context, _ in chunk], task))
                if len(running) > 2 * count:  # limits the results that wait for a slow chunk
                    yield from _oldest_results(pool, running)
            while running:
                yield from _oldest_results(pool, running)
    except WorkerDied as error:
        raise RunError(
            "a process that prepares data was killed, most likely for lack of memory; free some memory and "
            "run the same command again"
        ) from error


def _oldest_results(
    pool: WorkerPool, running: deque[tuple[list[Context], Task[list[Result]]]]
) -> Iterable[tuple[Context, Result]]:
    """Remove the oldest chunk and return its contexts and results, as soon as they are complete."""
    contexts, task = running.popleft()
    while not task.done:
        pool.receive()
    return zip(contexts, task.result(), strict=True)


_tool: Any = None  # set by _initialize, once per worker process


def _initialize(make_tool: Callable[[], Any]) -> None:
    global _tool
    _tool = make_tool()


def _process_chunk(function: Callable[[Any, Any], Result], items: list[Any]) -> list[Result]:
    return [function(_tool, item) for item in items]
