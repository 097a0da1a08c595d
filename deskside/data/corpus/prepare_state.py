"""prepare.json: the arguments and the progress of a preparation, for resuming it and recognizing its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from deskside.config.base import Part, first_problem
from deskside.data.corpus.analyze import Analysis
from deskside.data.corpus.baselines import TRAIN_COUNTS
from deskside.data.corpus.source_files import FileRecord
from deskside.data.reading.index import ShardInfo
from deskside.data.reading.index_file import INDEX
from deskside.data.reading.verify import STAMP
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import TEMPORARY_SUFFIX, check_replaceable, unowned_files, write_json
from deskside.utils.format import plural
from deskside.utils.parsing import json_value

STATE = "prepare.json"
_State = TypeVar("_State", bound=Part)
FIXED_FILES = (STATE, INDEX, STAMP, TRAIN_COUNTS, "tokenizer.json", "tokenizer_config.json")


class PrepareState(Part):
    """The state of a preparation.

    arguments: everything that determines the result, apart from the content of the sources. files: those of the
    sources, None in states of earlier versions. scan: the result of the first pass; None until the tokenizer has been
    written as well. shards: the completed shards by name.
    """

    arguments: dict[str, Any]
    files: list[FileRecord] | None = None
    scan: Analysis | None
    shards: dict[str, ShardInfo]

    @property
    def written_files(self) -> set[str]:
        """Names of all files that a preparation in this state may have written."""
        return {*FIXED_FILES, *(name for info in self.shards.values() for name in (info.file, info.table))}


def read_state(directory: Path) -> PrepareState | None:
    """Return the state of the preparation in `directory`, or None if it has no prepare.json.

    Raises RunError if prepare.json is damaged or was written by another program.
    """
    return read_state_file(
        directory / STATE,
        PrepareState,
        "deskside data prepare",
        "delete this file and the data in its folder",
    )


def read_state_file(path: Path, kind: type[_State], command: str, remedy: str) -> _State | None:
    """Return the content of a state file, or None if it does not exist.

    Raises RunError if it is damaged or was not written by `command`. remedy: an alternative to giving another --out.
    """
    if not path.is_file():
        return None
    try:
        return kind.model_validate(json_value(path.read_bytes()))
    except ValueError as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        raise RunError(
            f"{path}: is damaged, or was not written by `{command}` ({reason}). Give another --out, or {remedy}."
        ) from None


def write_state(directory: Path, state: PrepareState) -> None:
    """Write prepare.json. Raises as `write_json`."""
    write_json(directory / STATE, state.model_dump(mode="json"))


def open_state(out: Path) -> PrepareState | None:
    """Return the state in `out`, as `read_state`. Raises UsageError if `out` is a file, or a folder of other data."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file. Give a directory.")
    state = read_state(out)
    if state is None and out.is_dir() and any(out.iterdir()):
        raise UsageError(f"--out {out}: is not empty and holds no prepared data. Give another directory.")
    return state


def check_owned(out: Path, state: PrepareState) -> None:
    """Raise UsageError unless `out` can be replaced as a whole: it has only files of this preparation."""
    foreign = [
        name for name in unowned_files(out, state.written_files) if not name.endswith(TEMPORARY_SUFFIX)
    ]
    if foreign:
        raise UsageError(
            f"--out {out}: holds {foreign[0]}, which `deskside data prepare` did not write and which --no-resume would "
            "delete. Move it away, or give another --out."
        )
    check_replaceable(out)


def describe_difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe how the arguments of two preparations differ, or return "" if they are equal."""
    now = json_value(json.dumps(now))  # `before` was read from JSON, which has lists instead of tuples
    keys = sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key))
    differences = []
    for key in keys:
        if key.endswith("sources"):
            old, new = _files(before.get(key)), _files(now.get(key))
            if old and new:
                differences.append(f"{key.replace('_', ' ')}: {_changed_files(old, new)}")
                continue
        differences.append(f"{key}: {_short(before.get(key))} -> {_short(now.get(key))}")
    return "; ".join(differences)


def _files(sources: object) -> dict[str, object]:
    """Return {file name: the rest of its entry} from the `Source.identity` of all sources."""
    found: dict[str, object] = {}
    for source in sources if isinstance(sources, list) else []:
        for entry in source if isinstance(source, list) else []:
            if isinstance(entry, list) and entry and isinstance(entry[0], str):
                found[entry[0]] = entry[1:]
    return found


def _changed_files(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """Describe how the files of the sources differ: how many, and the first of each kind."""
    kinds = {
        "new": [name for name in new if name not in old],
        "missing": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and old[name] != new[name]],
    }
    texts = [f"{plural(len(names), kind + ' file')} ({names[0]})" for kind, names in kinds.items() if names]
    return ", ".join(texts) or "in another order"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
