"""Store of probe results as JSON lines: probes/<card>.jsonl. Imports no torch; the planner reads it.

A row is one measured point, or the measurement of the card itself:

    {"schema": 1, "kind": "point" | "card", "key": {"machine": {...}, "spec": {...}}, "hash": "...", "status": "ok",
     "error": "", "result": {...}, "seconds": 9.1, "when": "2026-11-20T20:14:03+00:00"}

status: ok, oom, failed, timeout, or skipped (it was concluded, not tried, and `error` says why). A number counts only
for the machine and software that it was measured on, so both are the first half of the key; the second half is what
was asked for. How long a point is measured is not part of it.

Nothing is ever rewritten: a row is appended by one write under a lock and is on the disk before `add` returns, and a
later row overrides an earlier one of the same key. A line that a crash cut off is left in place and skipped,
with a note for its file; so is a row with a value that cannot be (`rows.py`), or whose hash is not its key's.

Who measures holds a lock on .<card>.lock beside the rows, because two probes at once would measure each other.
"""

import contextlib
import datetime
import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.measurements.identity import Machine, this_machine
from deskside.utils.errors import RunError, UsageError
from deskside.utils.parsing import json_value

__all__ = [
    "Busy", "Machine", "Row", "Store", "hash_of", "make_key", "make_row", "open_store", "slug", "this_machine",
]  # fmt: skip

SCHEMA = 1
KINDS = ("point", "card")
STATUSES = ("ok", "oom", "failed", "timeout", "skipped")
FINAL = ("ok", "oom")  # what need not be measured again
NO_PART_OF_KEY = ("steps", "seconds", "warmup_seconds", "device")
TOLD = 3  # damaged lines of a file that a note tells about
TRIAL_BYTES = 2**16  # more than the rows of a probe

Row = dict[str, Any]


class Busy(UsageError):
    """Another probe is measuring on this card."""


def make_key(machine: Machine, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key of what `spec` asks for on this machine; an empty spec is the card's own measurement."""
    return {
        "machine": machine.key(),
        "spec": {name: value for name, value in spec.items() if name not in NO_PART_OF_KEY},
    }


def make_row(
    kind: str,
    key: Mapping[str, Any],
    status: str,
    result: Mapping[str, Any] | None = None,
    error: str = "",
    seconds: float = 0.0,
) -> Row:
    """Return a row for `Store.add`. seconds: wall-clock that the measurement took, everything included."""
    if kind not in KINDS or status not in STATUSES:
        raise ValueError(f"kind {kind!r}, status {status!r}: use one of {KINDS} and of {STATUSES}")
    return {
        "schema": SCHEMA,
        "kind": kind,
        "key": dict(key),
        "hash": hash_of(key),
        "status": status,
        "error": error,
        "result": dict(result or {}),
        "seconds": round(seconds, 3),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def hash_of(key: Mapping[str, Any]) -> str:
    """Return a digest of the key's canonical JSON."""
    text = json.dumps(_strict(key), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def slug(card: str) -> str:
    """Return the name of a card's file: "NVIDIA GeForce RTX 4090" -> "geforce-rtx-4090"."""
    words = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-").removeprefix("nvidia-")
    return words or "card"


def open_store(folder: str | Path = "probes") -> "Store":
    """Return the store in a folder, which need not exist yet. Raises UsageError when it is no folder."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: cannot hold probe results: it is no folder; give another with --probes")
    return Store(path)


@dataclass(frozen=True)
class Store:
    """Rows of all cards in one folder.

    What reads for one machine raises UsageError when that card's file has lines and none can be read. Without one the
    file is passed over, with a note: it may be of any card.
    """

    folder: Path

    def path(self, card: str) -> Path:
        """Return the file that holds a card's rows."""
        return self.folder / f"{slug(card)}.jsonl"

    def rows(self, machine: Machine | None = None, kind: str | None = None) -> list[Row]:
        """Return rows that count for this machine (of all machines without one), one per key, the oldest first."""
        standing: dict[str, Row] = {}
        for row in self._all(machine):
            if (machine is None or not _differences(machine, row)) and kind in (None, row["kind"]):
                earlier = standing.get(row["hash"])
                # A result is not displaced by an attempt that came to none.
                if earlier is None or earlier["status"] not in FINAL or row["status"] in FINAL:
                    standing.pop(row["hash"], None)
                    standing[row["hash"]] = row
        return list(standing.values())

    def find(self, key: Mapping[str, Any]) -> Row | None:
        """Return the newest row of this key, whatever its status."""
        wanted = hash_of(key)
        path = self.path(key["machine"]["card"])
        found = [row for row in _read(path)[0] if row["hash"] == wanted]
        return next((row for row in reversed(found) if row["status"] in FINAL), found[-1] if found else None)

    def add(self, row: Row) -> None:
        """Append a row; it is on the disk when this returns. Raises RunError when it cannot be written."""
        path = self.path(row["key"]["machine"]["card"])
        line = json.dumps(_strict(row), allow_nan=False).encode() + b"\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _append(path, line)
        except OSError as error:
            raise RunError(f"{path}: the result cannot be stored: {error.strerror or error}") from None

    @contextlib.contextmanager
    def measuring(self, card: str) -> Iterator[None]:
        """Hold the right to measure on this card, for as long as the body runs or the process lives.

        Raises Busy when another process has it, and UsageError when results could not be stored: that is tried before
        anything is measured.
        """
        path = self.path(card)
        lock = self.folder / f".{slug(card)}.lock"
        with contextlib.ExitStack() as held:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
                held.callback(os.close, file)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    words = os.pread(file, 32, 0).split()
                    which = f" (process {words[0].decode()})" if words and words[0].isdigit() else ""
                    raise Busy(
                        f"another probe{which} is measuring on {card}, and two at once would measure each other; "
                        f"wait for it"
                    ) from None
                _try_to_write(file)
                if path.exists():
                    os.close(os.open(path, os.O_RDWR | os.O_APPEND))
            except OSError as error:
                raise UsageError(
                    f"{self.folder}: results could not be stored there: {error.strerror or error}; nothing was "
                    f"measured; make room or give another folder with --probes"
                ) from None
            yield

    def notes(self, machine: Machine | None = None) -> list[str]:
        """Return notes on ignored rows: a line for each file that has damaged lines, and for rows of other software or
        another driver."""
        found = [note for path in self._paths(machine) for note in _read(path, machine is not None)[1]]
        if machine is None:
            return found
        groups: dict[str, int] = {}
        for row in self._all(machine):
            if differing := _differences(machine, row):
                groups[differing] = groups.get(differing, 0) + 1
        path = self.path(machine.card)
        for differing, count in groups.items():
            rows = "1 row was" if count == 1 else f"{count} rows were"
            found.append(
                f"{path}: {rows} measured with {differing}, and not used; deskside probe measures anew"
            )
        return found

    def require(self, machine: Machine) -> list[Row]:
        """Return rows of this machine. Raises UsageError when the store has rows of this card, all of other
        software."""
        rows = self.rows(machine)
        if not rows and (strangers := self._all(machine)):
            differing = _differences(machine, strangers[-1])
            raise UsageError(
                f"{self.path(machine.card)}: all of its {len(strangers)} rows were measured with {differing}; "
                f"measure anew with: deskside probe --probes {self.folder}"
            )
        return rows

    def _paths(self, machine: Machine | None) -> list[Path]:
        if machine is not None:
            return [self.path(machine.card)]
        return sorted(self.folder.glob("*.jsonl")) if self.folder.is_dir() else []

    def _all(self, machine: Machine | None) -> list[Row]:
        return [row for path in self._paths(machine) for row in _read(path, machine is not None)[0]]


def _differences(machine: Machine, row: Row) -> str:
    """In what a row's machine differs from this one: "driver 570.1 (here 580.2)"; empty when in nothing."""
    here, there = machine.key(), row["key"]["machine"]
    return ", ".join(
        f"{name.replace('_', ' ')} {_word(there.get(name))} (here {_word(value)})"
        for name, value in here.items()
        if there.get(name) != value
    )


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _read(path: Path, needed: bool = True) -> tuple[list[Row], list[str]]:
    """Return (rows, notes) of one file. Raises UsageError when it is `needed` and has lines of which none can be
    read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], []
    except OSError as error:
        unreadable = f"{path}: cannot be read: {error.strerror or error}"
        if needed:
            raise UsageError(unreadable) from None
        return [], [unreadable]
    rows: list[Row] = []
    damaged: list[tuple[int, str]] = []
    whole_lines = 0
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse(line)
        if isinstance(row, dict):
            rows.append(row)
        elif number == len(lines) and line.startswith(b'{"'):
            damaged.append((number, "the last line was cut off"))
        else:
            damaged.append((number, row))
            whole_lines += 1
    if whole_lines and not rows and needed:
        number, why = damaged[0]
        raise UsageError(
            f"{path}:{number}: {why}, and no other line can be read; move the file away, then measure anew with: "
            f"deskside probe"
        )
    if not damaged:
        return rows, []
    told = "; ".join(f"line {number}: {why}" for number, why in damaged[:TOLD])
    more = f"; and {len(damaged) - TOLD} more" if len(damaged) > TOLD else ""
    passed = "1 line is" if len(damaged) == 1 else f"{len(damaged)} lines are"
    return rows, [f"{path}: {passed} passed over ({told}{more})"]


def _parse(line: bytes) -> Row | str:
    """Return the row that a line holds, or why it holds none."""
    from deskside.measurements.schema import damage, shown  # loads pydantic, which only reading needs

    try:
        row = json_value(line, finite=True)
    except ValueError:  # no UTF-8, no JSON, NaN, or brackets without end
        return "this is no JSON"
    if not isinstance(row, dict) or "schema" not in row:
        return "this is no probe result"
    if row["schema"] != SCHEMA:
        return f"this is a probe result of schema {shown(row['schema'])}, and this deskside reads {SCHEMA}"
    key = row.get("key")
    whole = (
        row.get("kind") in KINDS
        and row.get("status") in STATUSES
        and isinstance(row.get("hash"), str)
        and isinstance(row.get("result"), dict)
        and isinstance(key, dict)
        and isinstance(key.get("machine"), dict)
        and isinstance(key.get("spec"), dict)
    )
    if not whole:
        return "a part of this probe result is missing"
    if row["hash"] != hash_of(row["key"]):
        return f"damaged: field hash: {shown(row['hash'])} is not that of its key"
    wrong = damage(row)
    return f"damaged: {wrong}" if wrong else row


def _try_to_write(file: int) -> None:
    """Fill the lock with as much as a row, then leave this process's number in it."""
    number = f"{os.getpid()}\n".encode()
    try:
        if os.pwrite(file, number.ljust(TRIAL_BYTES), 0) < TRIAL_BYTES:
            raise OSError(28, "no space left")
        os.fsync(file)
    finally:
        os.ftruncate(file, len(number))


def _append(path: Path, line: bytes) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = b"\n" + line  # a line that was cut off must not swallow this one
        try:
            written = os.write(file, line)
            if written < len(line):
                raise OSError(28, "no space left")
            os.fsync(file)
        except OSError:
            os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
