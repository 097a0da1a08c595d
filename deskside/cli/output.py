"""Output of the commands: JSON, and the name of this program."""

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


def program_name() -> str:
    """Return `deskside`, or the path of the running `deskside` script if the shell would not find this one."""
    running = Path(sys.argv[0])
    on_path = shutil.which("deskside")
    if running.name != "deskside" or (on_path is not None and Path(on_path).samefile(running)):
        return "deskside"
    folder = Path(os.path.abspath(running.parent))
    try:
        return shlex.quote(str(folder.relative_to(Path.cwd()) / running.name))
    except ValueError:  # not below the working directory
        return shlex.quote(str(folder / running.name))
