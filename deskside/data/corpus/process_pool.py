"""Worker processes for data preparation: one per core, spawned, and ended with this process."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from deskside.facts.cpu import cpu_cores
from deskside.utils.errors import RunError

FEW = 2048  # fewer items are processed faster without starting processes
CHUNK = 128  # items sent to a process at once

Context = TypeVar("Context")
Item = TypeVar("Item")
Made = TypeVar("Made")
Tool = TypeVar("Tool")


@contextlib.contextmanager
def processes(
    count: int, start: Callable[..., None], arguments: tuple[Any, ...]
) -> Iterator[ProcessPoolExecutor]:
    """Context manager of a pool whose processes call start(*arguments), which should call `become_worker`.

    An exception in the block terminates the processes.
    """
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), initializer=start, initargs=arguments
    )
    try:
        yield pool
    except BrokenProcessPool:
        raise
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def become_worker() -> None:
    """Initialize a worker process: Ctrl-C ends it at once, and its tokenizer uses one thread."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports the interruption
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process


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
    running: deque[tuple[list[Context], Future[list[Made]]]] = deque()
    try:
        with processes(count, _start, (build,)) as pool:
            while chunk := list(itertools.islice(every, CHUNK)):
                made = pool.submit(_work, work, [item for _, item in chunk])
                running.append(([context for context, _ in chunk], made))
                if len(running) > 2 * count:  # keeps every process busy
                    yield from _next(running)
            while running:
                yield from _next(running)
    except BrokenProcessPool as error:
        raise RunError(
            "a process that prepares data was killed, most likely for memory; run the same command again with more of "
            "it free"
        ) from error


def _next(running: deque[tuple[list[Context], Future[list[Made]]]]) -> Iterator[tuple[Context, Made]]:
    contexts, made = running.popleft()
    return zip(contexts, made.result(), strict=True)


_tool: Any = None  # one per process, set by the initializer


def _start(build: Callable[[], Any]) -> None:
    global _tool
    become_worker()
    _tool = build()


def _work(work: Callable[[Any, Any], Made], items: list[Any]) -> list[Made]:
    return [work(_tool, item) for item in items]
