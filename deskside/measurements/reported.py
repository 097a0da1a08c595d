"""The table of card reports that the planner reads: files that owners shared, each checked when it was added.

The table has two parts with one line of JSON per report:

- facts/reported.jsonl, which comes with deskside. In a checkout, `deskside facts add` writes there, so that a
  maintainer can commit the line.
- reported.jsonl in the user's data folder (`utils.files.data_folder`), where `deskside facts add` of an installed
  package writes. $DESKSIDE_DATA sets this folder, and is then written in a checkout too.

A line is {"gpu": name in facts/gpus.csv, "digest": of the report, "added": date, "report": {...}}. A line that is
damaged or was edited, so that its digest or its card is wrong, is an error that names the line.
"""

import datetime
import fcntl
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deskside
from deskside.facts.gpus import Gpu, find_device, gpus
from deskside.measurements.card_report import CardReport, ReportedPoint, parse_report, read_report
from deskside.measurements.plausible import check_report
from deskside.utils import strict_json
from deskside.utils.errors import UsageError
from deskside.utils.files import append_line, data_folder, write_error
from deskside.utils.parsing import Unreadable, json_value

FILE = "reported.jsonl"
PACKAGE = Path(deskside.__file__).parent
MAX_REPORTS = 100  # of one card

Part = Literal["deskside", "user"]


@dataclass(frozen=True)
class Reported:
    """A report in the table.

    Attributes:
        gpu: Name of the card in facts/gpus.csv.
        digest: Digest of the report.
        added: Date when it was added.
        part: The part of the table that holds it.
    """

    gpu: str
    digest: str
    added: str
    part: Part
    report: CardReport


def reported_for(gpu: str) -> tuple[Reported, ...]:
    """Return the reports of a card, by its name in facts/gpus.csv, in the order in which they were added.

    Raises UsageError for a damaged table.
    """
    found: dict[str, Reported] = {}  # by digest: a user may have added what deskside brings since
    for part, path in _parts():
        for number, line in _lines(path):
            if line.get("gpu") == gpu:
                reported = _reported(path, number, line, part)
                found.setdefault(reported.digest, reported)
    return tuple(found.values())


def reported_cards() -> tuple[str, ...]:
    """Return the names of the cards that have reports, in alphabetical order. Raises UsageError for a damaged table."""
    return tuple(sorted({str(line["gpu"]) for _, path in _parts() for _, line in _lines(path)}))


def add_report(file: Path, today: datetime.date) -> tuple[Reported, Path]:
    """Check a report and add it to the table. Returns its entry and the table's file.

    Raises UsageError for a file that is not a plausible new report, and RunError if the table cannot be written.
    """
    report = read_report(file)
    path = table_path()
    try:
        gpu = check_report(report, today)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _check_new(report, gpu)
            part: Part = "deskside" if path.parent == PACKAGE / "facts" else "user"
            entry = Reported(gpu.name, report.digest, today.isoformat(), part, report)
            content = path.read_bytes()
            lost_newline = bool(content) and not content.endswith(b"\n")  # an editor left it out
            append_line(path, "\n" * lost_newline + _line(entry))
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    except OSError as error:
        raise write_error(path, error) from None
    return entry, path


def table_path() -> Path:
    """Return the file that `add_report` writes."""
    if "DESKSIDE_DATA" not in os.environ and is_checkout(PACKAGE.parent):
        return PACKAGE / "facts" / FILE
    return data_folder() / FILE


def is_checkout(folder: Path) -> bool:
    """Return True if a folder is a clone of deskside's repository, not a place where packages are installed."""
    return (folder / ".git").exists() and (folder / "pyproject.toml").is_file()


def _parts() -> tuple[tuple[Part, Path], tuple[Part, Path]]:
    return ("deskside", PACKAGE / "facts" / FILE), ("user", data_folder() / FILE)


def _line(entry: Reported) -> str:
    fields = {"gpu": entry.gpu, "digest": entry.digest, "added": entry.added}
    return strict_json.dumps({**fields, "report": entry.report.to_json()})


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each line of a table, whose reports are not checked yet."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    names = {gpu.name for gpu in gpus()}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            value = json_value(line, finite=True)
        except Unreadable as error:
            raise _damaged(path, number, str(error)) from None
        if not isinstance(value, dict):
            raise _damaged(path, number, "it is not an object")
        if not isinstance(value.get("gpu"), str) or value["gpu"] not in names:
            raise _damaged(path, number, "its gpu is not in the table of GPUs")
        yield number, value


def _reported(path: Path, number: int, line: dict[str, Any], part: Part) -> Reported:
    try:
        report = parse_report(line.get("report"))
    except ValueError as error:
        raise _damaged(path, number, str(error)) from None
    if line.get("digest") != report.digest:
        raise _damaged(path, number, "the digest does not match the report")
    card = find_device(report.card, report.memory_bytes)
    if card is None or card.name != line["gpu"]:
        raise _damaged(path, number, f"the report is not about its gpu, {line['gpu']}")
    return Reported(card.name, report.digest, str(line.get("added", "")), part, report)


def _damaged(path: Path, number: int, reason: str) -> UsageError:
    return UsageError(f"{path}:{number}: is damaged ({reason}); delete this line, and add the report again")


def _check_new(report: CardReport, gpu: Gpu) -> None:
    """Raise UsageError if the table has this report, or one of its points, or no room for this card."""
    known = reported_for(gpu.name)
    if report.digest in {entry.digest for entry in known}:
        raise UsageError(f"is in the table already ({gpu.name}, {report.digest})")
    points = {point.model_dump_json(): entry.digest for entry in known for point in entry.report.points}
    for index, point in enumerate(report.points):
        if same := points.get(point.model_dump_json()):
            raise UsageError(
                f"points.{index}: is in the table already, in report {same}; measure again with: deskside probe --again"
            )
    if len(known) >= MAX_REPORTS:
        raise UsageError(f"the table has {len(known)} reports of {gpu.name} already, which is enough")


@dataclass(frozen=True)
class ReportedSpeed:
    """Speed of one setting in the reports of a card. tokens_per_second: lowest, median and highest of the reports;
    point: the setting, with the result of the first report."""

    point: ReportedPoint
    reports: int
    tokens_per_second: tuple[float, float, float]


def reported_speeds(entries: Sequence[Reported]) -> tuple[ReportedSpeed, ...]:
    """Return the speed of every setting in these reports, those with the most reports first."""
    by_setting: dict[str, list[ReportedPoint]] = {}
    for entry in entries:
        for point in entry.report.points:
            by_setting.setdefault(json.dumps(point.setting(), sort_keys=True), []).append(point)
    speeds = []
    for points in sorted(by_setting.values(), key=len, reverse=True):
        values = [point.tokens_per_second for point in points]
        speeds.append(
            ReportedSpeed(points[0], len(points), (min(values), statistics.median(values), max(values)))
        )
    return tuple(speeds)
