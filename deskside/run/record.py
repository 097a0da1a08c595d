"""Tolerant reader of run directories, for code that shows, compares or measures runs.

A run may be unfinished, killed while it wrote a line, or written by an older version. No function here raises for a
file that is missing or damaged: callers get what could be read, and a list of problems. Only a path that is not a run
directory at all is an error. Code that continues a run uses `RunDirectory`, which is strict.
"""

import itertools
import math
import os
import re
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deskside.utils.errors import UsageError
from deskside.utils.format import plural
from deskside.utils.parsing import Unreadable, json_value

MAX_NUMBER = 1e200  # a larger value must be damage, and would overflow the arithmetic of a plot
TAIL_BYTES = 2**16  # about 200 rows of metrics.jsonl
SAMPLE_BYTES = 2**10  # read for one row of a sample of metrics.jsonl; a row has about 300
SAMPLE_TAIL_BYTES = 2**12
LANGUAGE_METRIC = "val_bpb/"  # before a language's name: the metric of its validation bits per byte
MISSING = "is missing"
DAMAGED = "damaged"  # the state of a run whose summary is there, but cannot be read
FILES = {  # each file, and the consequence if it is missing
    "run.json": "the configuration is unknown",
    "environment.json": "the machine is unknown",
    "summary.json": "the run has not finished",
    "plan.json": "nothing can be compared with the plan",
}


@dataclass(frozen=True)
class MetricsLog:
    """The rows of metrics.jsonl in order of their step. If a step occurs more than once, only its last row is kept.

    Attributes:
        damaged: Number of damaged lines, without a partial last line.
        partial: True if the last line is incomplete, because the run was killed or is writing it.
        modified: Time of the last write in seconds since 1970, 0 if the file could not be read.
        end: Bytes of the file up to the end of its last complete line.
        error: Why the file could not be read, or the empty string.
    """

    rows: list[dict[str, Any]]
    damaged: int = 0
    partial: bool = False
    modified: float = 0.0
    error: str = ""
    end: int = 0

    @property
    def problem(self) -> str:
        """The problem with the file as one phrase for lists of runs, or the empty string."""
        if self.error and self.error != MISSING:
            return f"metrics.jsonl {self.error}"
        return f"metrics.jsonl: {left_out_lines(self.damaged)}" if self.damaged else ""


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run directory. Dicts and lists are empty where a file is missing, damaged or was not read."""

    path: Path
    run: dict[str, Any]  # run.json
    environment: dict[str, Any]  # environment.json
    plan: dict[str, Any]  # plan.json
    summary: dict[str, Any]  # summary.json
    metrics: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl, in order of step
    events: list[str] = field(default_factory=list)  # events.log
    problems: list[str] = field(default_factory=list)  # messages about missing and damaged files
    damaged: frozenset[str] = frozenset()  # names of the files that are there, but cannot be read
    long_context: dict[str, Any] = field(default_factory=dict)  # long_context.json of `eval --long-context`

    @property
    def name(self) -> str:
        """The name in run.json, or the directory's."""
        return text(self.run.get("name")) or self.path.resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return mapping(self.run.get("config"))

    @property
    def finished(self) -> bool:
        """True if the summary says that the run finished."""
        return text(self.summary.get("status")) in ("finished", "done", "complete", "completed")

    @property
    def state(self) -> str:
        """The status in the summary, "not finished" without one, or `DAMAGED`."""
        return (
            DAMAGED if "summary.json" in self.damaged else text(self.summary.get("status")) or "not finished"
        )

    @property
    def precision(self) -> str:
        """Name of the precision recipe: the one that was used, or else the configured one."""
        return (
            text(self.summary.get("precision"))
            or text(mapping(self.plan.get("precision")).get("chosen"))
            or text(mapping(self.config.get("precision")).get("name"))
        )

    @property
    def emulated(self) -> bool:
        """True if the number format was emulated."""
        return self.summary.get("emulated") is True or emulated(mapping(self.plan.get("precision"))) is True

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run according to the last revision of its plan, or None."""
        revisions = objects(self.plan.get("revisions"))
        total = planned_steps(revisions[-1]) if revisions else None
        return None if total is None else int(total)

    def series(self, y_key: str, x_key: str = "tokens") -> tuple[list[float], list[float]]:
        """Return the x values and the y values of the logged steps that have finite values of both metrics."""
        return series(self.metrics, y_key, x_key)

    def language_series(self) -> dict[str, tuple[list[float], list[float]]]:
        """Return (tokens, bits per byte) of the evaluations of each language, including the final one.

        It is empty if the validation data is in one language only, or its languages are unknown.
        """
        final_tokens, final = number(self.summary.get("tokens")), mapping(self.summary.get("val_languages"))
        logged = {key for row in self.metrics for key in row if key.startswith(LANGUAGE_METRIC)}
        curves = {}
        for language in sorted({key.removeprefix(LANGUAGE_METRIC) for key in logged} | final.keys()):
            x, y = self.series(LANGUAGE_METRIC + language)
            bpb = number(mapping(final.get(language)).get("bpb"))
            if bpb is not None and final_tokens is not None:
                x, y = [*x, final_tokens], [*y, bpb]
            if x:
                curves[language] = (x, y)
        return curves

    def last(self, key: str) -> float | None:
        """Return the newest finite value of a metric."""
        values = self.series(key)[1]
        return values[-1] if values else None

    def newest(self, summary_key: str, metric: str) -> float | None:
        """Return the number of a key of summary.json, or else the newest value of a metric."""
        value = number(self.summary.get(summary_key))
        return value if value is not None else self.last(metric)


def read_run(path: Path) -> RunRecord:
    """Read a whole run directory. Raises UsageError if `path` is not one."""
    if not path.exists():
        in_runs = Path("runs") / path
        hint = (
            f"did you mean {in_runs}?"
            if in_runs.is_dir()
            else "give the directory of a run, such as runs/demo"
        )
        raise UsageError(f"{path}: no such run; {hint}")
    if not path.is_dir():
        raise UsageError(f"{path}: is a file; give the directory of a run, such as runs/demo")
    if not any((path / name).is_file() for name in ("run.json", "metrics.jsonl", "summary.json")):
        raise UsageError(
            f"{path}: not a run directory (it has no run.json, metrics.jsonl or summary.json); "
            "give one that `deskside train` has written"
        )
    problems, damaged = list[str](), set[str]()
    contents = {}
    for name, consequence in FILES.items():
        contents[name], problem = read_object(path / name)
        if problem and problem != MISSING:
            damaged.add(name)
            consequence = "the results are unknown" if name == "summary.json" else consequence
        if problem:
            problems.append(f"{name} {problem}: {consequence}.")
    log = read_metrics(path)
    if log.error:
        problems.append(f"metrics.jsonl {log.error}: there is no curve to draw.")
    if log.partial:
        problems.append("The last line of metrics.jsonl is incomplete and was left out.")
    if log.damaged:
        problems.append(f"metrics.jsonl: {left_out_lines(log.damaged)}.")
    if not log.rows and not log.error:
        problems.append("metrics.jsonl has no logged step yet.")
    try:
        events = (path / "events.log").read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        events = []
        problem = MISSING if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        problems.append(f"events.log {problem}: skips, rollbacks and resumes are unknown.")
    long_context, problem = read_object(path / "long_context.json")
    if problem and problem != MISSING:
        problems.append(f"long_context.json {problem}: the long-context evaluation is unknown.")
    record = _record(path, contents, log.rows, [line for line in events if line.strip()], problems, damaged)
    return replace(record, long_context=long_context)


def read_brief(path: Path) -> RunRecord:
    """Read the small files of a run, without metrics and events, for lists of many runs.

    The plan of a finished run is not read, because its summary has the facts that lists show. Among missing files, only
    run.json counts as a problem, because the others are written later. Never raises.
    """
    contents, problems, damaged = dict[str, dict[str, Any]](), [], set[str]()
    for name in FILES:
        if name == "plan.json" and contents["summary.json"]:
            contents[name] = {}
            continue
        contents[name], problem = read_object(path / name)
        if problem and problem != MISSING:
            damaged.add(name)
        if name in damaged or (problem and name == "run.json"):
            problems.append(f"{name} {problem}")
    return _record(path, contents, [], [], problems, damaged)


def _record(
    path: Path,
    contents: Mapping[str, dict[str, Any]],
    metrics: list[dict[str, Any]],
    events: list[str],
    problems: list[str],
    damaged: Collection[str],
) -> RunRecord:
    run, environment, summary, plan = (contents[name] for name in FILES)
    return RunRecord(path, run, environment, plan, summary, metrics, events, problems, frozenset(damaged))


def read_object(path: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a file, and the problem with the file: the empty string, `MISSING` or another phrase.

    If there is a problem, the object is {}. Never raises.
    """
    try:
        value = json_value(path.read_bytes())
    except FileNotFoundError:
        return {}, MISSING
    except OSError as error:
        return {}, f"cannot be read ({error.strerror})"
    except Unreadable as error:
        return {}, f"is not valid JSON ({error})"
    return (value, "") if isinstance(value, dict) else ({}, "is not a JSON object")


def left_out_lines(number: int) -> str:
    """Return the phrase about damaged lines that were left out."""
    return f"{plural(number, 'damaged line')} left out"


def read_metrics(path: Path, tail: int | None = None, begin: int = 0) -> MetricsLog:
    """Read metrics.jsonl in the run directory `path`, or only the rows in its last `tail` bytes. Never raises.

    begin: offset of the line to begin with; a file that has become shorter is read whole.
    """
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            status = os.fstat(file.fileno())
            start = 0 if tail is None else max(0, status.st_size - tail)
            file.seek(begin if 0 < begin <= status.st_size else start)
            lines = file.read().split(b"\n")
            end = file.tell() - len(lines[-1])
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        return MetricsLog([], error=MISSING if missing else f"cannot be read ({error.strerror})")
    by_step: dict[float, dict[str, Any]] = {}
    damaged, partial = 0, False
    for index, line in enumerate(lines):
        if not line.strip() or (index == 0 and start > 0):  # empty, or begins before the tail
            continue
        try:
            row = json_value(line)
        except Unreadable:
            row = None
        step = number(row.get("step")) if isinstance(row, dict) else None
        if step is not None:
            by_step[step] = row  # a step that was repeated after a resume replaces the earlier one
        elif index == len(lines) - 1:
            partial = True
        else:
            damaged += 1
    rows = [by_step[step] for step in sorted(by_step)]
    return MetricsLog(rows, damaged, partial, status.st_mtime, end=end)


def read_new_metrics(path: Path, known: MetricsLog) -> MetricsLog:
    """Return the whole log of a run whose first part is `known`. Only the new part is read if the file just grew."""
    new = read_metrics(path, begin=known.end)
    steps = [number(log.rows[i].get("step")) or 0.0 for log, i in ((known, -1), (new, 0)) if log.rows]
    # After a resume, the file may be shorter, or repeat steps.
    if new.error or new.damaged or new.end < known.end or steps != sorted(set(steps)):
        return read_metrics(path)
    return replace(new, rows=known.rows + new.rows, damaged=known.damaged)


def sample_metrics(path: Path, samples: int) -> MetricsLog:
    """Read about `samples` evenly spaced rows of metrics.jsonl and its last ones, for lists of many runs. Never raises.

    Only `samples` blocks of `SAMPLE_BYTES` are read, whatever the length of the file. A line longer than a block is
    left out.
    """
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            lines = file.read().split(b"\n") if size <= samples * SAMPLE_BYTES else []
            if lines:
                lines = [lines[i * len(lines) // samples] for i in range(samples)]
            for index in range(0 if lines else samples):
                file.seek(index * (size - SAMPLE_BYTES) // samples)
                block = file.read(SAMPLE_BYTES).split(b"\n")
                lines += block[:1] if index == 0 else block[1:2] if len(block) > 2 else []
    except OSError as error:
        return MetricsLog([], error=f"cannot be read ({error.strerror})")
    newest = read_metrics(path, SAMPLE_TAIL_BYTES)
    rows = {number(row.get("step")): row for row in (*map(_row, lines), *newest.rows[-1:])}
    return replace(newest, rows=[rows[step] for step in sorted(step for step in rows if step is not None)])


def lowest_metric(path: Path, key: str) -> float | None:
    """Return the lowest value of a metric that metrics.jsonl has, None without any. Never raises.

    No row is parsed: 5,000 rows take a third of a millisecond. Rows that were repeated after a resume count too.
    """
    try:
        text = (path / "metrics.jsonl").read_bytes()
    except OSError:
        return None
    found = re.findall(rb'"%s": ?(-?[0-9][0-9.eE+-]*)[,}]' % re.escape(key.encode()), text)
    values = [value for word in found if (value := _finite(word)) is not None]
    return min(values, default=None)


def _finite(word: bytes) -> float | None:
    try:
        return number(float(word))
    except ValueError:  # such as "1.2.3", in a damaged line
        return None


def _row(line: bytes) -> dict[str, Any]:
    """Return the object in a line of metrics.jsonl, {} if it is damaged."""
    try:
        return mapping(json_value(line))
    except Unreadable:
        return {}


def series(rows: list[dict[str, Any]], y_key: str, x_key: str) -> tuple[list[float], list[float]]:
    """Return the x values and the y values of the rows that have finite values of both."""
    points = [(number(row.get(x_key)), number(row.get(y_key))) for row in rows]
    finite = [(x, y) for x, y in points if x is not None and y is not None]
    return [x for x, _ in finite], [y for _, y in finite]


def step_seconds(rows: list[dict[str, Any]]) -> float | None:
    """Return the median seconds per step. Unlike the mean, it ignores a resume or an evaluation between two rows."""
    points = zip(*series(rows, "seconds", "step"), strict=True)
    pairs = itertools.pairwise(points)
    times = [(t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in pairs if s1 > s0 and t1 > t0]
    return statistics.median(times) if times else None


def planned_steps(revision: Mapping[str, Any]) -> float | None:
    """Return the total steps of the run that a revision of its plan expects, or None."""
    step, remaining = number(revision.get("step")), first_number(revision, "remaining", "remaining_steps")
    return None if step is None or remaining is None else step + remaining


def emulated(precision: Mapping[str, Any]) -> bool | None:
    """Return True if products of layers or experts were emulated, None if that is unknown.

    precision: "precision" in plan.json.
    """
    native = [part["native"] for part in (precision, mapping(precision.get("experts"))) if "native" in part]
    return not all(native) if native else None


def first_number(values: Mapping[str, Any], *keys: str) -> float | None:
    """Return the value of the first of these keys that has a finite number, or None."""
    return next((value for key in keys if (value := number(values.get(key))) is not None), None)


def number(value: object) -> float | None:
    """Return `value` as a float if it is a number smaller than `MAX_NUMBER` in magnitude, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < MAX_NUMBER and math.isfinite(value) else None


def text(value: object) -> str:
    """Return `value` if it is a string, otherwise the empty string."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """Return `value` as a dict if it is a JSON object, otherwise an empty dict."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def objects(value: object) -> list[dict[str, Any]]:
    """Return the JSON objects in `value` if it is a list, otherwise an empty list."""
    if not isinstance(value, list):
        return []
    return [mapping(item) for item in value if isinstance(item, Mapping)]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested JSON objects by dotted keys, such as "optim.lr". An empty object is kept."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def has_known_peak(machine: Mapping[str, Any]) -> bool:
    """Return False for a CPU. Its measured peak depends on what else it does, so an MFU can be above 100 %."""
    return text(machine.get("device")) != "cpu"


def machine_name(machine: Mapping[str, Any], default: str = "unknown machine") -> str:
    """Return the name of the GPU, or else of the CPU. machine: environment.json, or the machine of a study."""
    gpu = machine.get("gpu")
    name = text(gpu) or text(mapping(gpu).get("name"))
    return name or text(machine.get("cpu")) or text(machine.get("device")) or default
