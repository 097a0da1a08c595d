"""What commands print: JSON, the speed of a run, the next commands."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from deskside.utils import strict_json


def print_json(value: Any, indent: int | None = None) -> None:
    """Print one JSON value on standard output; NaN and infinities become null."""
    print(strict_json.dumps(value, indent=indent))


def note(text: str) -> None:
    """Print a line on standard error, which holds everything but results."""
    print(text, file=sys.stderr, flush=True)


def stopped_summary(run: Any, signal: str) -> dict[str, Any]:
    """Return the JSON of a run that a signal stopped; `steps` are those of its last checkpoint."""
    from deskside.weights.checkpoint_files import find

    saved = [checkpoint.step for checkpoint in find(run.checkpoints)[:1]]
    return {"status": "stopped", "signal": signal, "run": str(run.path), "steps": saved[0] if saved else None}


def speed(summary: dict[str, Any]) -> str:
    """Return the speed of the training steps, and that of the whole run where it is lower."""
    precision = summary["precision"] + (", emulated" if summary["emulated"] else "")
    rate, seconds = summary["tokens_per_second"], summary["seconds"]
    if not rate or not seconds:
        return f"not known, in {precision}"
    overall = summary["tokens"] / seconds
    beside = f"; {overall:,.0f} with set-up, evaluation and checkpoints" if overall < 0.99 * rate else ""
    return f"{rate:,.0f} tokens/s in training steps{beside} ({precision})"


def print_next(page: Path, *commands: str) -> None:
    """Print the path of the report and the commands that usually follow."""
    print(f"\nreport: {page}")
    print("next:")
    for command in commands:
        print(f"  {program()} {command}")


def program() -> str:
    """Return `deskside` as the user's shell finds it: with a path if it is not the one on PATH."""
    own = Path(sys.argv[0])
    found = shutil.which("deskside")
    if own.name != "deskside" or (found is not None and Path(found).samefile(own)):
        return "deskside"
    folder = Path(os.path.abspath(own.parent))
    try:
        return shlex.quote(str(folder.relative_to(Path.cwd()) / own.name))
    except ValueError:
        return shlex.quote(str(folder / own.name))
