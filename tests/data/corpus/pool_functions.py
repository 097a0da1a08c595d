"""Functions for worker processes, in a small module because every worker imports it."""

import os

from deskside.utils.errors import RunError


def tool(name: str) -> tuple[str, int]:
    """Return the value that a worker creates at its start: the name, and its process id."""
    return name, os.getpid()


def squared(tool: tuple[str, int], item: int) -> tuple[int, str, int]:
    """Return the square of an item, with the tool. A negative item ends the process."""
    if item < 0:
        os._exit(1)
    return item * item, *tool


def megabytes(tool: tuple[str, int], item: int) -> bytes:
    """Return this many bytes."""
    return bytes(item)


class Unpicklable(Exception):
    """An exception that cannot be sent to another process if it holds a function."""


def failing(kind: str) -> None:
    """Raise RunError, or an exception that cannot be sent to another process."""
    if kind == "unpicklable":
        raise Unpicklable(lambda: None)
    raise RunError(kind)
