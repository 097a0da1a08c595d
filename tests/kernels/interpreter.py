"""Triton's interpreter, for kernels on a machine without a GPU.

The interpreter is chosen when a kernel is decorated, for the whole process. Code that needs it therefore runs in a
separate process: `interpreted` starts it, and this module, run as a program, calls the function there.
"""

import fcntl
import json
import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def interpreted(module: str, function: str, *arguments: str) -> Any:
    """Run a function of a module of tests/kernels in a process that interprets kernels, and return its JSON result.

    Processes of pytest-xdist that run tests of the same file share one result.
    """
    folder = Path(os.environ["DESKSIDE_CACHE"])
    result = folder / f"{'-'.join((module, function, *arguments))}.json"
    with (folder / f"{result.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            result.write_text(_interpreted(module, function, *arguments), "utf-8")
    return json.loads(result.read_text("utf-8"))


def _interpreted(module: str, function: str, *arguments: str) -> str:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.interpreter", module, function, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def patch_interpreter() -> None:
    """Patch Triton 3.6's interpreter, which calls int() on an array of one number. numpy 2.4 no longer allows it.

    The patch also avoids that each call of a device function searches all of triton.language for functions to
    replace, although they were replaced when the kernel was launched.
    """
    from triton import language
    from triton.runtime import interpreter

    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    @cache
    def modules(function: Any) -> list[Any]:
        return [m for m in (language, language.core) if any(m is v for v in function.__globals__.values())]

    def patched_language(function: Any) -> Any:
        if any(language.core.is_builtin(module.load) for module in modules(function)):
            return patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang_tensor = patched_tensor
    interpreter._patch_lang = patched_language


if __name__ == "__main__":
    patch_interpreter()
    module, function, *given = sys.argv[1:]
    print(json.dumps(getattr(import_module(f"tests.kernels.{module}"), function)(*given)))
