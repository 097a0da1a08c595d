"""Store of probe results as JSON lines in probes/<card>.jsonl, which the planner reads. Imports no torch.

A row is a training measurement (kind "point") or a benchmark of the card itself (kind "card"):

    {"schema": 1, "kind": "point" | "card", "key": {"machine": {...}, "spec": {...}}, "hash": "...", "status": "ok",
     "error": "", "result": {...}, "seconds": 9.1, "when": "2026-11-20T20:14:03+00:00"}

status: ok, oom, failed, timeout, or skipped (not tried, because other rows show the outcome; `error` has the reason).
A measurement is valid only for its machine and software, so both are part of the key, besides the measured setting.
The duration of the measurement is not.

The files are append-only: `add` appends a row in one write under a lock and syncs it to disk. A later row overrides an
earlier one with the same key, unless only the earlier one is ok or oom. Readers skip truncated lines, invalid rows
(`schema.py`) and rows whose hash does not match their key, and return a note about them.

A process that measures holds a lock on .<card>.lock in the same folder, because two probes at once would slow each
other down.
"""

import contextlib
import datetime
import errno
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

from deskside.utils.errors import RunError, UsageError
from deskside.utils.machine import Machine, this_cpu, this_machine
from deskside.utils.parsing import json_value

__all__ = [
    "Busy", "Machine", "Row", "Store", "hash_of", "make_key", "make_row", "open_store", "probe_command",
    "slug", "this_cpu", "this_machine",
]  # fmt: skip

SCHEMA = 1
KINDS = ("point", "card")
STATUSES = ("ok", "oom", "failed", "timeout", "skipped")
FINAL = ("ok", "oom")  # statuses of rows that need not be measured again
NOT_IN_KEY = ("steps", "seconds", "warmup_seconds", "device")
MAX_DESCRIBED_LINES = 3  # damaged lines of a file that its note describes
TEST_WRITE_BYTES = 2**16  # written before a probe to check for free space; more than the rows of a probe

Row = dict[str, Any]


class Busy(UsageError):
    """Another probe is measuring on this card."""


def make_key(machine: Machine, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key of a measurement on this machine. spec: the setting; empty for the benchmark of the card."""
    return {
        "machine": machine.key(),
        "spec": {name: value for name, value in spec.items() if name not in NOT_IN_KEY},
    }


def make_row(
    kind: str,
    key: Mapping[str, Any],
    status: str,
    result: Mapping[str, Any] | None = None,
    error: str = "",
    seconds: float = 0.0,
) -> Row:
    """Return a row for `Store.add`. seconds: wall time of the measurement, including its set-up."""
    if kind not in KINDS or status not in STATUSES:
        raise ValueError(
            f"kind {kind!r}, status {status!r}: the kind must be one of {KINDS}, the status of {STATUSES}"
        )
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


def probe_command(machine: Machine) -> str:
    """Return the command that measures a machine."""
    return "deskside probe --device cpu" if machine.device == "cpu" else "deskside probe"


def hash_of(key: Mapping[str, Any]) -> str:
    """Return a digest of the key's canonical JSON."""
    text = json.dumps(_without_nan(key), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def slug(card: str) -> str:
    """Return the file name of a card without suffix: "NVIDIA GeForce RTX 4090" -> "geforce-rtx-4090"."""
    words = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-").removeprefix("nvidia-")
    return words or "card"


def open_store(folder: str | Path = "probes") -> "Store":
    """Return the store in a folder, which need not exist yet. Raises UsageError if the path is not a folder."""
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path}: is not a folder; give a folder for probe results with --probes")
    return Store(path)


@dataclass(frozen=True)
class Store:
    """Rows of all cards in one folder.

    If a card's file has complete lines but no valid row, or cannot be read, reading the rows of one machine with that
    card raises UsageError. Reading the rows of all machines skips the file, and `notes` reports it.
    """

    folder: Path

    def path(self, card: str) -> Path:
        """Return the file that holds a card's rows."""
        return self.folder / f"{slug(card)}.jsonl"

    def rows(self, machine: Machine | None = None, kind: str | None = None) -> list[Row]:
        """Return the current row of every key, the oldest first.

        Args:
            machine: Return only rows that are valid for this machine; None: rows of all machines.
            kind: Return only rows of this kind, "point" or "card".
        """
        current: dict[str, Row] = {}
        for row in self._all(machine):
            if (machine is None or not _differences(machine, row)) and kind in (None, row["kind"]):
                earlier = current.get(row["hash"])
                # A later attempt that failed does not replace a result.
                if earlier is None or earlier["status"] not in FINAL or row["status"] in FINAL:
                    current.pop(row["hash"], None)  # the newest row goes to the end
                    current[row["hash"]] = row
        return list(current.values())

    def find(self, key: Mapping[str, Any]) -> Row | None:
        """Return the newest row of this key with a final status, otherwise its newest row, or None."""
        wanted = hash_of(key)
        path = self.path(key["machine"]["card"])
        rows = [row for row in _read(path)[0] if row["hash"] == wanted]
        final = [row for row in rows if row["status"] in FINAL]
        return final[-1] if final else rows[-1] if rows else None

    def add(self, row: Row) -> None:
        """Append a row and sync it to disk. Raises RunError if it cannot be written."""
        path = self.path(row["key"]["machine"]["card"])
        line = json.dumps(_without_nan(row), allow_nan=False).encode() + b"\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _append(path, line)
        except OSError as error:
            raise RunError(f"{path}: the result cannot be stored: {error.strerror or error}") from None

    @contextlib.contextmanager
    def measuring(self, card: str) -> Iterator[None]:
        """Lock the card for measurements by this process while the body runs.

        Raises Busy if another process has the lock, and UsageError if results could not be stored. Both are checked
        before the body runs.
        """
        path = self.path(card)
        lock = self.folder / f".{slug(card)}.lock"
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
                stack.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    words = os.pread(descriptor, 32, 0).split()
                    owner = f" (process {words[0].decode()})" if words and words[0].isdigit() else ""
                    raise Busy(
                        f"another probe{owner} is measuring on {card}, and two at once would slow each other down; "
                        f"wait until it ends"
                    ) from None
                _check_free_space(descriptor)
                if path.exists():
                    os.close(os.open(path, os.O_RDWR | os.O_APPEND))
            except OSError as error:
                raise UsageError(
                    f"{self.folder}: results could not be stored there: {error.strerror or error}; nothing was "
                    f"measured; make room or give another folder with --probes"
                ) from None
            yield

    def notes(self, machine: Machine | None = None) -> list[str]:
        """Return notes about ignored rows, one line each.

        There is a note for each file with damaged lines and, for one machine, for each other set of properties (power
        limit, driver, software ...) that rows of its card were measured with.
        """
        notes = [note for path in self._paths(machine) for note in _read(path, machine is not None)[1]]
        if machine is None:
            return notes
        counts: dict[str, int] = {}
        for row in self._all(machine):
            if differences := _differences(machine, row):
                counts[differences] = counts.get(differences, 0) + 1
        path = self.path(machine.card)
        for differences, count in counts.items():
            rows = "1 row was" if count == 1 else f"{count} rows were"
            notes.append(
                f"{path}: {rows} measured with {differences}, and not used; measure again with: "
                f"{probe_command(machine)}"
            )
        return notes

    def require(self, machine: Machine) -> list[Row]:
        """Return the rows of this machine, an empty list if its card was never measured.

        Raises UsageError if the card was measured, but only with other software, another driver or power limit.
        """
        rows = self.rows(machine)
        if not rows and (others := self._all(machine)):
            differences = _differences(machine, others[-1])
            raise UsageError(
                f"{self.path(machine.card)}: no row is valid for this machine; the last one was measured with "
                f"{differences}; measure again with: {probe_command(machine)} --probes {self.folder}"
            )
        return rows

    def _paths(self, machine: Machine | None) -> list[Path]:
        if machine is not None:
            return [self.path(machine.card)]
        return sorted(self.folder.glob("*.jsonl")) if self.folder.is_dir() else []

    def _all(self, machine: Machine | None) -> list[Row]:
        return [row for path in self._paths(machine) for row in _read(path, machine is not None)[0]]


def _differences(machine: Machine, row: Row) -> str:
    """Describe how a row's machine differs from this one: "driver 570.1 (here 580.2)"; "" if it does not."""

    def text(value: Any) -> str:
        return "none" if value is None else str(value)

    measured = row["key"]["machine"]
    return ", ".join(
        f"{name.replace('_', ' ')} {text(measured.get(name))} (here {text(value)})"
        for name, value in machine.key().items()
        if measured.get(name) != value
    )


def _read(path: Path, required: bool = True) -> tuple[list[Row], list[str]]:
    """Return (rows, notes) of one file.

    Raises UsageError if the file is `required` and is unreadable, or has complete lines but no valid row.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], []
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror or error}"
        if required:
            raise UsageError(message) from None
        return [], [message]
    rows: list[Row] = []
    damaged: list[tuple[int, str]] = []
    damaged_complete_lines = 0
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
            damaged_complete_lines += 1
    if damaged_complete_lines and not rows and required:
        number, reason = damaged[0]
        raise UsageError(
            f"{path}:{number}: {reason}, and no other line is valid; move the file away, then measure again with: "
            f"deskside probe"
        )
    if not damaged:
        return rows, []
    described = "; ".join(f"line {number}: {reason}" for number, reason in damaged[:MAX_DESCRIBED_LINES])
    if len(damaged) > MAX_DESCRIBED_LINES:
        described += f"; and {len(damaged) - MAX_DESCRIBED_LINES} more"
    skipped = "1 line is" if len(damaged) == 1 else f"{len(damaged)} lines are"
    return rows, [f"{path}: {skipped} skipped ({described})"]


def _parse(line: bytes) -> Row | str:
    """Return the row in a line, or the reason why the line is invalid."""
    from deskside.measurements.schema import row_error, short_json  # pydantic is a slow import

    try:
        row = json_value(line, finite=True)
    except ValueError:  # not UTF-8, not JSON, NaN, or nested too deeply
        return "this is not JSON"
    if not isinstance(row, dict) or "schema" not in row:
        return "this is not a probe result"
    if row["schema"] != SCHEMA:
        return f"this is a probe result of schema {short_json(row['schema'])}; this version of deskside reads {SCHEMA}"
    key = row.get("key")
    has_all_fields = (
        row.get("kind") in KINDS
        and row.get("status") in STATUSES
        and isinstance(row.get("hash"), str)
        and isinstance(row.get("result"), dict)
        and isinstance(key, dict)
        and isinstance(key.get("machine"), dict)
        and isinstance(key.get("spec"), dict)
    )
    if not has_all_fields:
        return "a field of this probe result is missing or has the wrong type"
    if row["hash"] != hash_of(row["key"]):
        return f"damaged: field hash: {short_json(row['hash'])} does not match the key"
    error = row_error(row)
    return f"damaged: {error}" if error else row


def _check_free_space(descriptor: int) -> None:
    """Write more bytes than a probe will need to the lock file, then shrink it to the process id of this process."""
    process_id = f"{os.getpid()}\n".encode()
    try:
        if os.pwrite(descriptor, process_id.ljust(TEST_WRITE_BYTES), 0) < TEST_WRITE_BYTES:
            raise OSError(errno.ENOSPC, "no space left")
        os.fsync(descriptor)
    finally:
        os.ftruncate(descriptor, len(process_id))


def _append(path: Path, line: bytes) -> None:
    """Append a line in one write and sync it to disk. After an error the file is as before."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            # The last line is truncated; without a newline this row would be lost as well.
            line = b"\n" + line
        try:
            written = os.write(descriptor, line)
            if written < len(line):
                raise OSError(errno.ENOSPC, "no space left")
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value
