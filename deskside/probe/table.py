"""The tables of a probe: what was measured at each point, and what a day at that speed comes to. 80 columns suffice."""

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
from deskside.probe.grid import Point
from deskside.probe.sweep import Finding
from deskside.utils.format import count, gib_digits, hours

TOKENS_PER_PARAMETER = (
    20  # the rule of thumb of Hoffmann et al. 2022 (arXiv 2203.15556), all parameters counted
)
DAY = 86400.0
GIB = 2**30
SPEED_COLUMNS = (
    "shape", "param", "seq", "micro\nx acc", "tokens\nper s", "±\n%", "step\nms", "MFU",
    "GiB alloc\n/reserved", "W", "",
)  # fmt: skip


def derived(point: Point, row: Row) -> dict[str, float]:
    """What follows from a measured speed: tokens per 24 h, and the hours for 20 tokens per parameter."""
    speed = float(row["result"]["tokens_per_second"])
    tokens = TOKENS_PER_PARAMETER * num_params(point.model)
    return {
        "tokens_per_24h": speed * DAY,
        "tokens_for_20_per_parameter": float(tokens),
        "hours_for_20_tokens_per_parameter": tokens / speed / 3600,
    }


def tables(findings: Sequence[Finding]) -> RenderableType:
    """Both tables, one pair of blocks for each combination of options, and the reasons of what did not come out ok."""
    parts: list[RenderableType] = []
    ordered = sorted(
        findings, key=lambda f: (f.point.options, num_params(f.point.model), f.point.sequence_length)
    )
    for options, same in groupby(ordered, key=lambda f: f.point.options):
        parts += [_speed(list(same), options), Text("")]
    if any(finding.status == "ok" for finding in findings):
        parts += [_days(ordered), Text("")]
    parts += [Text(line, style="dim") for line in reasons(ordered)]
    return Group(*parts)


def reasons(findings: Sequence[Finding]) -> list[str]:
    """One line for each kind of result that is none, and for each that should not be trusted."""
    lines = []
    for finding in findings:
        title, row = finding.point.title(), finding.row
        if row is not None and finding.status in ("failed", "timeout"):
            lines.append(f"{finding.status}: {title}: {row['error']}")
        if row is not None and finding.status == "ok" and not row["result"].get("finite", True):
            lines.append(
                f"unstable: {title}: a loss or gradient was not finite; a run with this would not stand"
            )
    if any(
        f.row is not None and f.status == "ok" and f.row["result"].get("device") == "cpu" for f in findings
    ):
        lines.append(
            "GiB: all memory of the process, libraries included, since a CPU has no allocator of its own"
        )
    if any(finding.status == "oom" for finding in findings):
        lines.append("oom: not even a micro-batch of one row fits; measured")
    skipped = Counter(f.row["error"] for f in findings if f.row is not None and f.status == "skipped")
    lines += [f"skipped: {_points(number)}: {reason}" for reason, number in skipped.items()]
    if missing := sum(finding.row is None for finding in findings):
        lines.append(f"no time: {_points(missing)}; the same command goes on with what is missing")
    return lines


def _speed(findings: Sequence[Finding], options: tuple[str, str, str]) -> Table:
    precision, optimizer, checkpointing = options
    recipes = {str(f.row["result"]["precision"]) for f in findings if f.row and f.status == "ok"}
    number = "/".join(sorted(recipes)) or precision
    kept = "no activation checkpointing" if checkpointing == "none" else f"checkpointing {checkpointing}"
    table = _table(f"measured here: {number}, {optimizer}, {kept}")
    for name in SPEED_COLUMNS:
        table.add_column(name, justify="left" if name in ("shape", "") else "right", no_wrap=True)
    for finding in findings:
        point = finding.point
        head = (point.shape, count(num_params(point.model)), str(point.sequence_length))
        if finding.row is None or finding.status != "ok":
            table.add_row(*head, *[""] * 7, Text(finding.status, style="yellow"))
            continue
        table.add_row(*head, *_measured(finding.row["result"]), Text(_state(finding)))
    return table


def _state(finding: Finding) -> str:
    if finding.row is not None and not finding.row["result"].get("finite", True):
        return "unstable"
    return "stored" if finding.origin == "stored" else "ok"


def _measured(result: dict[str, Any]) -> tuple[str, ...]:
    speed = result["tokens_per_second"]
    return (
        f"{result['micro_tokens']}x{result['accumulation']}",
        f"{speed:,.0f}" if speed < 999_999.5 else f"{speed / 1e6:.3f}M",
        f"{100 * spread(result):.0f}",
        f"{1e3 * result['step_seconds']['median']:.0f}",
        f"{100 * result['mfu']:.0f}%",
        memory(result),
        "" if result["watts"] is None else f"{result['watts']:.0f}",
    )


def _days(findings: Sequence[Finding]) -> Table:
    table = _table("modelled: a day at the measured speed")
    for name in (
        "shape",
        "params",
        "seq",
        "options",
        "tokens\nin 24 h",
        "hours for 20\ntokens per parameter",
    ):
        table.add_column(name, justify="left" if name in ("shape", "options") else "right", no_wrap=True)
    for finding in findings:
        if finding.row is None or finding.status != "ok":
            continue
        point = finding.point
        numbers = derived(point, finding.row)
        precision, optimizer, checkpointing = point.options
        options = [optimizer, *([precision] if precision != "auto" else [])]
        options += [checkpointing] if checkpointing != "none" else []
        table.add_row(
            point.shape,
            count(num_params(point.model)),
            str(point.sequence_length),
            ", ".join(options),
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
    """Half of the way from the 10th to the 90th percentile of a step's time, as a share of the median."""
    seconds = result["step_seconds"]
    return float((seconds["p90"] - seconds["p10"]) / 2 / seconds["median"])


def memory(result: dict[str, Any]) -> str:
    """GiB: peak allocated / peak reserved; of a CPU the resident set alone."""
    allocated, reserved = result["peak_allocated_bytes"], result["peak_reserved_bytes"]
    return gib_digits(allocated) + ("" if reserved is None else f"/{gib_digits(reserved)}")


def _points(number: int) -> str:
    return "1 point" if number == 1 else f"{number} points"
