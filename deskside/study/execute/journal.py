"""journal.jsonl: when each trial started and how it ended, one line per event, append-only.

A resume replays it: a trial that started and did not end was running when the study died. A kill leaves at most one
half-written last line, which is cut off when the journal is opened again.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deskside.study.results import STATUSES
from deskside.utils import strict_json
from deskside.utils.errors import RunError
from deskside.utils.files import append_line
from deskside.utils.parsing import json_value

FILE = "journal.jsonl"
# A trial with one of these statuses is done; --resume runs the others.
FINAL = tuple(status for status in STATUSES if status not in ("running", "pending"))
Key = tuple[str, int]  # arm, seed


@dataclass(frozen=True)
class Past:
    """The history of a trial.

    status: "running" if it started and did not end. seconds: lifetime of its processes since it last started
    afresh, None if one of them was not seen to end.
    """

    status: str = "pending"
    reason: str = ""
    attempts: int = 0
    device: str = ""
    started: str = ""
    ended: str = ""
    seconds: float | None = 0.0


def after(before: Past, event: Mapping[str, Any]) -> Past:
    """Apply an event to a trial's history. Raises KeyError, TypeError or ValueError if it is invalid."""
    spent = before.seconds
    if event["event"] == "started":
        if not event["resumed"]:
            spent = 0.0
        elif before.status == "running":
            spent = None  # that process was not seen to end
        attempts, device, time = before.attempts + 1, str(event["device"]), str(event["time"])
        return Past("running", "", attempts, device, time, "", spent)
    if event["event"] != "ended" or event["status"] not in STATUSES:
        raise KeyError(f"{event['event']} {event.get('status', '')}")
    lasted = event["seconds"]
    spent = None if spent is None or lasted is None else spent + float(lasted)
    status, reason, time = str(event["status"]), str(event["reason"]), str(event["time"])
    return replace(before, status=status, reason=reason, ended=time, seconds=spent)


class StudyJournal:
    """The journal of one study. Raises RunError for a damaged line, and when it cannot be written."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.past = replay_file(self.path)
        if self.path.exists():  # drop a half-written last line
            whole = self.path.read_bytes().rfind(b"\n") + 1
            os.truncate(self.path, whole)

    def started(self, arm: str, seed: int, device: str, pid: int, resumed: bool) -> None:
        """Record the start of a trial's process. resumed: it continues from a checkpoint."""
        self._append(arm, seed, "started", device=device, pid=pid, resumed=resumed)

    def ended(self, arm: str, seed: int, status: str, reason: str, seconds: float | None) -> None:
        """Record its end. seconds: lifetime of the process, None if it was not seen to end."""
        self._append(arm, seed, "ended", status=status, reason=reason, seconds=seconds)

    def of(self, arm: str, seed: int) -> Past:
        """Return the history of a trial."""
        return self.past.get((arm, seed), Past())

    def _append(self, arm: str, seed: int, event: str, **more: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        entry = {"time": time, "arm": arm, "seed": seed, "event": event, **more}
        append_line(self.path, strict_json.dumps(entry))
        self.past[arm, seed] = after(self.of(arm, seed), entry)


def replay_file(path: Path) -> dict[Key, Past]:
    """Return the history of every trial, from the complete lines of a journal.

    Raises RunError naming a damaged line.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    past: dict[Key, Past] = {}
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            event = json_value(line)
            key = (str(event["arm"]), int(event["seed"]))
            past[key] = after(past.get(key, Past()), event)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path}: line {number} is damaged ({error}); delete that line") from None
    return past
