"""The command that continues an unfinished run: that of its pipeline if it has one, else that of its objective."""

import shlex
from pathlib import Path
from typing import Any

from deskside.run.record import mapping, read_object, text
from deskside.utils.errors import UsageError

PIPELINE_FILE = "go.json"  # the state of `deskside go`


def resume_command(path: Path) -> str | None:
    """Return the command that continues an unfinished run; None for a finished one, or if there is no run."""
    run = shlex.quote(str(path))
    if (path / PIPELINE_FILE).is_file():
        state, _ = read_object(path / PIPELINE_FILE)
        return None if text(state.get("phase")) == "done" else f"deskside go --resume {run}"
    if not (path / "run.json").is_file() or (path / "summary.json").exists():
        return None
    return f"deskside {_objective(path) or 'train'} --resume {run}"


def weights_command(path: Path) -> str:
    """Return a command that starts another run from the weights of a finished one."""
    objective, run = _objective(path), shlex.quote(str(path))
    return (
        f"deskside {objective} {run} --data FILE" if objective else f"deskside train --init {run} --hours 1"
    )


def check_unfinished(path: Path) -> None:
    """Raise UsageError for a finished run."""
    if (path / "summary.json").exists():
        raise UsageError(
            f"{path} is finished; start another run from its weights with: {weights_command(path)}"
        )


def name_in_use(path: Path) -> UsageError:
    """Return the error for a name whose folder exists, with the command that continues its run, if one can."""
    command = resume_command(path)
    if command is not None:
        return UsageError(f"{path} exists; choose another --name, or continue it with: {command}")
    finished = (path / "summary.json").exists()
    return UsageError(f"{path} exists{' and is finished' if finished else ''}; choose another --name")


def _objective(path: Path) -> str:
    """Return sft, dpo, kto or grpo, "" for pretraining or if it is not known."""
    run: dict[str, Any] = read_object(path / "run.json")[0]
    return text(mapping(mapping(run.get("config")).get("align")).get("name"))
