"""prepare.json: what a preparation was asked for and what it has made, so that it can go on and knows its own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deskside.config.base import Part, first_problem
from deskside.data.corpus import output_folder
from deskside.data.corpus.analyze import Scan
from deskside.data.corpus.baselines import TRAIN_COUNTS
from deskside.data.reading import shards
from deskside.data.reading.shards import ShardInfo
from deskside.utils.errors import RunError, UsageError
from deskside.utils.parsing import json_value

STATE = "prepare.json"
FIXED = (STATE, shards.INDEX, shards.STAMP, TRAIN_COUNTS, "tokenizer.json", "tokenizer_config.json")


class State(Part):
    """`arguments` decide every byte of the result; `shards` are written whole, by name; `scan` stands for the tokenizer
    too: it is None until that is written.
    """

    arguments: dict[str, Any]
    scan: Scan | None
    shards: dict[str, ShardInfo]

    @property
    def own_files(self) -> set[str]:
        """Names of the files that a preparation in this state has written."""
        return {*FIXED, *(name for info in self.shards.values() for name in (info.file, info.table))}


def read_state(directory: Path) -> State | None:
    """The state of the preparation in `directory`, None where there is none.

    Raises RunError for a prepare.json that is damaged, or that something else wrote.
    """
    path = directory / STATE
    if not path.is_file():
        return None
    try:
        return State.model_validate(json_value(path.read_bytes()))
    except ValueError as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        raise RunError(
            f"{path}: is damaged, or was not written by `deskside data prepare` ({reason}). Give another --out, or "
            "delete that file and the data beside it."
        ) from None


def write_state(directory: Path, state: State) -> None:
    """Raises: as `shards.write_file`."""
    text = json.dumps(state.model_dump(mode="json"), ensure_ascii=False) + "\n"
    shards.write_file(directory / STATE, lambda file: file.write(text.encode("utf-8", "backslashreplace")))


def look(out: Path) -> State | None:
    """As `read_state`. Raises UsageError too: `out` is a file, or a folder of something else."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file. Give a directory.")
    state = read_state(out)
    if state is None and out.is_dir() and any(out.iterdir()):
        raise UsageError(f"--out {out}: is not empty and holds no prepared data. Give another directory.")
    return state


def refuse_strangers(out: Path, state: State) -> None:
    """Raises UsageError unless `out` can be replaced whole: it holds this preparation's files and no others."""
    left = [
        name for name in output_folder.strangers(out, state.own_files) if not name.endswith(shards.TEMPORARY)
    ]
    if left:
        raise UsageError(
            f"--out {out}: holds {left[0]}, which `deskside data prepare` did not write and which --no-resume would "
            "delete. Move it away, or give another --out."
        )
    output_folder.refuse_fixed(out)


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """How the arguments of two preparations differ, in words; nothing where they do not."""
    now = json_value(json.dumps(now))
    keys = sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key))
    return "; ".join(f"{key}: {_short(before.get(key))} -> {_short(now.get(key))}" for key in keys)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
