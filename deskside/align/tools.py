"""Tools: functions of a user's Python file that the model may call while it answers.

`my_tools.py:search,add` names them. As in transformers, a function's name, type hints and docstring (with an `Args:`
section) are its description for the model. Functions run in the run's own process, for several answers at once, so they
must be safe in threads, and are responsible for their own time limits.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.align.user_functions import functions_from_file
from deskside.data.chat.answer_parser import ToolCall
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import UsageError, describe_error
from deskside.utils.parsing import json_value


@dataclass(frozen=True)
class ToolResult:
    """The result of a call: the text that the tool returned, or its value as JSON. failed: it raised an exception."""

    text: str
    failed: bool = False


@dataclass(frozen=True)
class Tools:
    """The tools of a file. functions: by name. schemas: their descriptions, as chat templates expect them."""

    file: Path
    functions: Mapping[str, Callable[..., Any]]
    schemas: tuple[dict[str, Any], ...]

    @classmethod
    def parse(cls, spec: str) -> "Tools":
        """Load the tools of a specification `file.py:name,name`. Raises UsageError if it is not valid."""
        from transformers.utils import get_json_schema

        path, colon, names = spec.rpartition(":")
        if not colon or not path.endswith(".py"):
            raise UsageError(f"tools: {spec!r} must name a file and its functions: my_tools.py:search,add")
        file = Path(path).resolve()
        wanted = [name.strip() for name in names.split(",")]
        functions = functions_from_file("tools", file, wanted)
        schemas = []
        for name, function in zip(wanted, functions, strict=True):
            try:
                schemas.append(get_json_schema(function))
            except Exception as error:  # noqa: BLE001 - transformers raises various ones
                raise UsageError(
                    f"tools: {name} in {file} needs type hints, and a docstring with an Args: section that describes "
                    f"each parameter ({describe_error(error)})"
                ) from None
        return cls(file, dict(zip(wanted, functions, strict=True)), tuple(schemas))

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run calls, several at once, and return their results in order."""
        with ThreadPoolExecutor(cpu_cores()) as pool:
            return list(pool.map(self._run, calls))

    def _run(self, call: ToolCall) -> ToolResult:
        try:
            result = self.functions[call.name](**json_value(call.arguments, big_integers=True))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except Exception as error:  # noqa: BLE001 - the model has to see the error of its call
            return ToolResult(json.dumps({"error": describe_error(error)}), failed=True)
        # Without halves of surrogate pairs.
        return ToolResult(text.encode("utf-8", "replace").decode("utf-8"))
