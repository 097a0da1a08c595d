"""Tables of a sweep: the measurements of each point, and the tokens per day at the measured speed."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.text import Text

from deskside.budget.shape import num_params
from deskside.measurements.store import Row
from deskside.probe.grid import Point, option_words
from deskside.probe.sweep import PointResult
from deskside.utils.format import count, gib_digits, hours, plural
from deskside.utils.printer import Cell, Printer

# About compute-optimal (Hoffmann et al. 2022, arXiv 2203.15556); all parameters count.
TOKENS_PER_PARAMETER = 20
DAY = 86400.0
SPEED_COLUMNS = (
    "shape", "size", "seq", "micro x acc", "tokens per s", "spread", "step ms", "MFU", "GiB alloc /reserved", "W", "",
)  # fmt: skip


def derived(point: Point, row: Row) -> dict[str, float]:
    """Return the tokens per 24 h, and the tokens and hours for 20 tokens per parameter, at the measured speed."""
    speed = float(row["result"]["tokens_per_second"])
    tokens = TOKENS_PER_PARAMETER * num_params(point.model)
    return {
        "tokens_per_24h": speed * DAY,
        "tokens_for_20_per_parameter": float(tokens),
        "hours_for_20_tokens_per_parameter": tokens / speed / 3600,
    }


def show(printer: Printer, point_results: Sequence[PointResult]) -> None:
    """Print a table of speeds per combination of options, the table of tokens per day, and reasons of failures."""
    ordered = sorted(
        point_results, key=lambda f: (f.point.options, num_params(f.point.model), f.point.sequence_length)
    )
    for options, group in groupby(ordered, key=lambda f: f.point.options):
        _show_speed(printer, list(group), options)
    if any(point_result.status == "ok" for point_result in point_results):
        _show_tokens_per_day(printer, ordered)
    lines = reasons(ordered)
    if lines:
        printer.text()
    for line in lines:
        printer.text(line, "quiet", hanging=2)


def reasons(point_results: Sequence[PointResult]) -> list[str]:
    """Return lines about missing and unreliable results, and one about memory on a CPU."""
    lines = []
    for point_result in point_results:
        title, row = point_result.point.title(), point_result.row
        if row is not None and point_result.status in ("failed", "timeout"):
            lines.append(f"{point_result.status}: {title}: {row['error']}")
        if row is not None and point_result.status == "ok" and not row["result"].get("finite", True):
            lines.append(
                f"unstable: {title}: a loss or gradient was not finite; a run with these settings would fail"
            )
    measured = [f.row["result"] for f in point_results if f.row is not None and f.status == "ok"]
    if any(result.get("device") == "cpu" for result in measured):
        lines.append(
            "GiB: all memory of the process, libraries included, since torch does not count CPU memory"
        )
    if any(point_result.status == "oom" for point_result in point_results):
        lines.append("oom: not even a micro-batch of one row fits; measured")
    skipped = Counter(f.row["error"] for f in point_results if f.row is not None and f.status == "skipped")
    lines += [f"skipped: {plural(number, 'point')}: {reason}" for reason, number in skipped.items()]
    if missing := sum(point_result.row is None for point_result in point_results):
        lines.append(f"no time: {plural(missing, 'point')}; run the same command again to measure them")
    return lines


def _show_speed(
    printer: Printer, point_results: Sequence[PointResult], options: tuple[str, str, str]
) -> None:
    precision, optimizer, checkpointing = options
    recipes = {str(f.row["result"]["precision"]) for f in point_results if f.row and f.status == "ok"}
    recipe = "/".join(sorted(recipes)) or precision
    checkpointing_text = (
        "no activation checkpointing" if checkpointing == "none" else f"checkpointing {checkpointing}"
    )
    printer.heading(f"measured here: {recipe}, {optimizer}, {checkpointing_text}")
    rows: list[Sequence[Cell]] = []
    for point_result in point_results:
        point = point_result.point
        head = (point.shape, count(num_params(point.model)), str(point.sequence_length))
        if point_result.row is None or point_result.status != "ok":
            rows.append([*head, *[""] * 7, Text(point_result.status, "attention")])
            continue
        rows.append([*head, *_measured(point_result.row["result"]), _state(point_result)])
    printer.table(SPEED_COLUMNS, rows, "lrrrrrrrrrl")


def _state(point_result: PointResult) -> Text:
    if point_result.row is not None and not point_result.row["result"].get("finite", True):
        return Text("unstable", "bad")
    return Text("stored" if point_result.origin == "stored" else "ok")


def _measured(result: dict[str, Any]) -> tuple[str, ...]:
    speed = result["tokens_per_second"]
    return (
        f"{result['micro_tokens']}x{result['accumulation']}",
        count(speed),
        f"{100 * spread(result):.0f}%",
        f"{1e3 * result['step_seconds']['median']:.0f}",
        f"{100 * result['mfu']:.0f}%",
        memory(result),
        "" if result["watts"] is None else f"{result['watts']:.0f}",
    )


def _show_tokens_per_day(printer: Printer, point_results: Sequence[PointResult]) -> None:
    rows = []
    for point_result in point_results:
        if point_result.row is None or point_result.status != "ok":
            continue
        point = point_result.point
        numbers = derived(point, point_result.row)
        rows.append(
            [
                point.shape,
                count(num_params(point.model)),
                str(point.sequence_length),
                option_words(point.options),
                count(numbers["tokens_per_24h"]),
                hours(numbers["hours_for_20_tokens_per_parameter"]),
            ]
        )
    printer.heading("modelled: a day at the measured speed")
    headings = ("shape", "size", "seq", "options", "tokens in 24 h", "hours for 20 tokens per parameter")
    printer.table(headings, rows, "lrrlrr")


def spread(result: dict[str, Any]) -> float:
    """Return half the distance between the 10th and 90th percentile of the step time, relative to the median."""
    seconds = result["step_seconds"]
    return float((seconds["p90"] - seconds["p10"]) / 2 / seconds["median"])


def memory(result: dict[str, Any]) -> str:
    """Return peak allocated / peak reserved memory in GiB; only the resident set on a CPU."""
    allocated, reserved = result["peak_allocated_bytes"], result["peak_reserved_bytes"]
    return gib_digits(allocated) + ("" if reserved is None else f"/{gib_digits(reserved)}")
