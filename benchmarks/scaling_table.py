"""The table of the scaling run: each case, measured beside the forecast."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.scaling_cases import Case
from deskside.budget.shape import num_params
from deskside.config.merge import build
from deskside.config.presets import for_pretraining


def table(
    rows: Sequence[dict[str, Any]],
    forecasts: Sequence[dict[str, Any]],
    bandwidths: Sequence[dict[str, Any]] = (),
) -> list[str]:
    """Return the lines of a Markdown table: each case, measured beside the forecast."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    expected = {row["case"]: row for row in forecasts}
    heads = ("case", "tokens/s", "p10 to p90", "efficiency", "slowest", "longer ms", "exposed ms")
    heads += ("bus GB/s", "watts", "GiB", "forecast", "error", "forecast GiB")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, of_case in sorted(by_case.items(), key=lambda item: _order(item[1][0])):
        row = _median_card(of_case)
        case = Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)})
        efficiency = slowest = longer = ""
        if case.gpus > 1 and (alone := by_case.get(case.alone.name)):
            cards = str(row.get("card")).split(",")
            alone = [one for one in alone if one.get("card") in cards] or alone
            one = _median_card(alone)["p50"]
            efficiency = f"{row['p50'] / (case.gpus * one):.1%}"
            if len(alone) > 1:
                slowest = f"{row['p50'] / (case.gpus * min(card['p50'] for card in alone)):.1%}"
            longer = f"{1000 * case.tokens * (1 / row['p50'] - 1 / (case.gpus * one)):.2f}"
        guess = expected.get(name)
        speed = guess and guess["tokens_per_second"]["expected"]
        cells = [
            name,
            f"{row['p50']:,.0f}",
            f"{row['p10']:,.0f} to {row['p90']:,.0f}",
            efficiency,
            slowest,
            longer,
            _exposed(row) if case.gpus > 1 else "",
            _bus(case, bandwidths),
            f"{sum(row['watts']):,.0f}" if row["watts"] else "",
            f"{max(row['peak_gib']):.1f}",
            f"{speed:,.0f}" if speed else "",
            f"{speed / row['p50'] - 1:+.1%}" if speed else "",
            f"{guess['needed_gib']['expected']:.1f}" if guess else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    per_gpu = row["tokens"] // row["gpus"]
    return row["preset"], row["optimizer"], row["precision"], not row["p2p"], -per_gpu, row["gpus"]


def _median_card(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of one card with the median speed of all."""
    speeds = {name: statistics.median(row[name] for row in rows) for name in ("p10", "p50", "p90")}
    watts = [sum(row["watts"]) for row in rows if row["watts"]]  # none without NVML
    return {**rows[0], **speeds, "watts": [statistics.fmean(watts)] if watts else []}


def _exposed(row: dict[str, Any]) -> str:
    """Return the exposed communication of the rank that waits least. Old rows have the profile of rank 0 only."""
    profiles = row.get("profile") or []
    profiles = profiles if isinstance(profiles, list) else [profiles]
    # Not of the rank that computes longest: where all compute alike, one whose trace began earlier waits for others.
    return f"{min(profile['exposed_ms'] for profile in profiles):.2f}" if profiles else ""


def _bus(case: Case, rows: Sequence[dict[str, Any]]) -> str:
    """Return the bandwidth of an all-reduce of the size that is closest to that of the case's gradients."""
    size = 4 * num_params(build(for_pretraining(case.preset)).model)
    found = [row for row in rows if row["gpus"] == case.gpus and row["p2p"] == case.p2p]
    nearest = min(found, key=lambda row: abs(row["bytes"] - size), default=None)
    return "" if nearest is None else f"{nearest['bus_bandwidth'] / 1e9:.1f}"
