"""Functions of a user's Python file: rewards and tools."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deskside.utils.errors import UsageError, describe_error


def functions_from_file(what: str, file: Path, names: Sequence[str]) -> list[Callable[..., Any]]:
    """Load a file and return its functions of these names. what: begins the message of a UsageError."""
    if not file.is_file():
        raise UsageError(f"{what}: {file} does not exist; give an existing file as my.py:function")
    spec = importlib.util.spec_from_file_location(f"deskside_{what}_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{what}: {file} cannot be loaded: {describe_error(error)}") from error
    functions = []
    for name in names:
        function = getattr(module, name, None)
        if not callable(function):
            raise UsageError(f"{what}: {file} has no function {name!r}")
        functions.append(function)
    return functions
