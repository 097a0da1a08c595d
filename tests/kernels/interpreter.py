"""Triton's interpreter, for kernels on a machine without a card. Import this before any module of kernels.

The interpreter is chosen when a kernel is decorated, for the whole process: so what needs it runs in a process of its
own, started by `interpreted`.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def interpreted(module: str, *arguments: str) -> str:
    """Run `python -m module` with the interpreter on; its standard output. A failure shows its last lines."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def mend() -> None:
    """Triton 3.6's interpreter takes int() of an array of one number, which numpy 2.4 no longer has."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
