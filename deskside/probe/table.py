"""Tables of a sweep in 80 columns: the measurements of each point, and the tokens per day at the measured speed."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deskside.budget.shape import num_params
from deskside.measurements.store import Row
from deskside.probe.grid import Point, option_words
from deskside.probe.sweep import PointResult
from deskside.utils.format import count, gib_digits, hours, plural

# About compute-optimal (Hoffmann et al. 2022, arXiv 2203.15556); all parameters count.
TOKENS_PER_PARAMETER = 20
DAY = 86400.0
SPEED_COLUMNS = (
    "shape", "param", "seq", "micro\nx acc", "tokens\nper s", "±\n%", "step\nms", "MFU",
    "GiB alloc\n/reserved", "W", "",
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


def tables(point_results: Sequence[PointResult]) -> RenderableType:
    """Return a table of speeds per combination of options, the table of tokens per day, and reasons of failures."""
    parts: list[RenderableType] = []
    ordered = sorted(
        point_results, key=lambda f: (f.point.options, num_params(f.point.model), f.point.sequence_length)
    )
    for options, group in groupby(ordered, key=lambda f: f.point.options):
        parts += [_speed(list(group), options), Text("")]
    if any(point_result.status == "ok" for point_result in point_results):
        parts += [_tokens_per_day(ordered), Text("")]
    parts += [Text(line, style="dim") for line in reasons(ordered)]
    return Group(*parts)


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


def _speed(point_results: Sequence[PointResult], options: tuple[str, str, str]) -> Table:
    precision, optimizer, checkpointing = options
    recipes = {str(f.row["result"]["precision"]) for f in point_results if f.row and f.status == "ok"}
    recipe = "/".join(sorted(recipes)) or precision
    checkpointing_text = (
        "no activation checkpointing" if checkpointing == "none" else f"checkpointing {checkpointing}"
    )
    table = _table(f"measured here: {recipe}, {optimizer}, {checkpointing_text}")
    for name in SPEED_COLUMNS:
        table.add_column(name, justify="left" if name in ("shape", "") else "right", no_wrap=True)
    for point_result in point_results:
        point = point_result.point
        head = (point.shape, count(num_params(point.model)), str(point.sequence_length))
        if point_result.row is None or point_result.status != "ok":
            table.add_row(*head, *[""] * 7, Text(point_result.status, style="yellow"))
            continue
        table.add_row(*head, *_measured(point_result.row["result"]), Text(_state(point_result)))
    return table


def _state(point_result: PointResult) -> str:
    if point_result.row is not None and not point_result.row["result"].get("finite", True):
        return "unstable"
    return "stored" if point_result.origin == "stored" else "ok"


def _measured(result: dict[str, Any]) -> tuple[str, ...]:
    speed = result["tokens_per_second"]
    return (
        f"{result['micro_tokens']}x{result['accumulation']}",
        count(speed),
        f"{100 * spread(result):.0f}",
        f"{1e3 * result['step_seconds']['median']:.0f}",
        f"{100 * result['mfu']:.0f}%",
        memory(result),
        "" if result["watts"] is None else f"{result['watts']:.0f}",
    )


def _tokens_per_day(point_results: Sequence[PointResult]) -> Table:
    table = _table("modelled: a day at the measured speed")
    names = ("shape", "params", "seq", "options", "tokens\nin 24 h", "hours for 20\ntokens per parameter")
    for name in names:
        table.add_column(name, justify="left" if name in ("shape", "options") else "right", no_wrap=True)
    for point_result in point_results:
        if point_result.row is None or point_result.status != "ok":
            continue
        point = point_result.point
        numbers = derived(point, point_result.row)
        table.add_row(
            point.shape,
            count(num_params(point.model)),
            str(point.sequence_length),
            option_words(point.options),
            count(numbers["tokens_per_24h"]),
            hours(numbers["hours_for_20_tokens_per_parameter"]),
        )
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        pad_edge=False,
    )


def spread(result: dict[str, Any]) -> float:
    """Return half the distance between the 10th and 90th percentile of the step time, relative to the median."""
    seconds = result["step_seconds"]
    return float((seconds["p90"] - seconds["p10"]) / 2 / seconds["median"])


def memory(result: dict[str, Any]) -> str:
    """Return peak allocated / peak reserved memory in GiB; only the resident set on a CPU."""
    allocated, reserved = result["peak_allocated_bytes"], result["peak_reserved_bytes"]
    return gib_digits(allocated) + ("" if reserved is None else f"/{gib_digits(reserved)}")
