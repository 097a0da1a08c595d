"""Arms against their baselines: the forest plot, which is a study's most important picture, and the heat map."""

import statistics
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter

from deskside.report import intervals
from deskside.report.study_canvas import (
    DARK,
    MIDDLE,
    MOST_ROWS,
    Drawn,
    canvas,
    label,
    left_out,
    row_names,
    telling,
    why_missing,
    wrapped,
)
from deskside.report.study_words import (
    ENERGY,
    NO_DIFFERENCE,
    PRIMARY,
    QUALITY,
    SPEED,
    arms_of,
    comparison,
    metric,
    short_labels,
    strata,
)
from deskside.run.record import number
from deskside.study.results import Arm, Comparison, Factor, Group, Results
from deskside.utils.format import percent, percent_digits


def forest(results: Results, group: Group, key: str) -> Drawn | str:
    """Relative differences in one metric with intervals: a row per arm, under its baseline."""
    shown = metric(key)
    compared = [arm for arm in arms_of(results, group) if arm.id != arm.baseline]
    if not any(_found(arm, key) for arm in compared):
        return f"No forest plot of {shown.label}: no arm could be compared with its baseline."
    kept = telling(compared, key, MOST_ROWS)
    rows: list[Arm | str] = []
    blocks = strata(kept)
    for base, members in blocks:
        if len(blocks) > 1:
            named = results.arm(base)
            rows.append(f"against {named.label if named else base}")
        ordered: list[Arm] = sorted(members, key=_by_quality)
        rows += ordered
    figure, axes = canvas(
        f"{shown.label.capitalize()} against the baseline", 0.95 + 0.25 * max(len(rows), 2) + 0.1
    )
    found = [c for arm in rows if isinstance(arm, Arm) and (c := _found(arm, key))]
    limit = _scale(axes, found)
    names = short_labels(results, kept)
    decimals = percent_digits(max((abs(c.relative) for c in found), default=0.0))
    places, written = [], []
    for place, row in enumerate(rows):
        if isinstance(row, str):
            axes.text(0.0, place, label(row, 60), transform=axes.get_yaxis_transform(), fontsize=8,
                      fontweight="bold", va="center", backgroundcolor="white")  # fmt: skip
            continue
        _row(axes, place, row, _found(row, key), limit, decimals)
        emulated = " (emulated)" if row.emulated and key in (SPEED, ENERGY) else ""
        places.append(place)
        written.append(wrapped(names[row.id] + emulated, 28, 2))
    axes.axvline(0, color=DARK, linewidth=1.0)
    axes.set_yticks(places, written, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    better = {"lower": ("better", "worse"), "higher": ("worse", "better"), None: ("less", "more")}[
        shown.better
    ]
    axes.set_xlabel(
        f"\u2190 {better[0]}      difference in {shown.label} (%)      {better[1]} \u2192", fontsize=8
    )
    counts = sorted({c.n for c in found})
    n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    caption = (
        f"Relative difference in {shown.label}, paired by seed ({n} seed{'' if n == '1' else 's'}). Line: interval; "
        "filled mark: a difference is shown; hollow: no difference shown; cross: one seed, no interval; square: exact. "
        ""
        f"{intervals.CUT} Measured." + left_out(compared, kept)
    )
    return Drawn(f"forest_{key}", f"Forest plot: {shown.label}", caption, figure)


def _by_quality(arm: Arm) -> tuple[bool, float]:
    found = _found(arm, QUALITY)
    return found is None, found.relative if found else 0.0


def _found(arm: Arm, key: str) -> Comparison | None:
    found = comparison(arm, key)
    return found if found is not None and number(found.relative) is not None else None


def _scale(axes: Axes, found: list[Comparison]) -> float:
    """Set the axis of percentages; returns where it ends. One arm far away would press all others onto the zero."""
    middles = [abs(100 * c.relative) for c in found]
    ends = (number(end) for c in found for end in (c.relative_low, c.relative_high))
    limit = intervals.reach(middles, [100 * end for end in ends if end is not None])
    largest = max(middles)
    typical = statistics.median(middles)
    if largest > 12 * typical > 0 and len(found) >= 3:
        axes.set_xscale("symlog", linthresh=2 * typical, linscale=1.0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:+g}" if abs(x) > 1e-9 else "0"))
    axes.set_xlim(-limit, limit)
    return limit


def _row(axes: Axes, place: int, arm: Arm, found: Comparison | None, limit: float, decimals: int) -> None:
    beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "va": "center"}
    if found is None:
        axes.text(1.02, place, why_missing(arm), color=MIDDLE, **beside)
        return
    low, high = number(found.relative_low), number(found.relative_high)
    if low is not None and high is not None and found.verdict != "exact":
        drawn = [max(-limit, 100 * low), min(limit, 100 * high)]
        axes.plot(drawn, [place, place], color=DARK, linewidth=1.6, label="interval")
        for end, real, arrow in ((drawn[0], 100 * low, "<"), (drawn[1], 100 * high, ">")):
            cut = end != real
            axes.plot([end], [place], marker=arrow if cut else "|", markersize=6, color=DARK, clip_on=not cut)
    hollow = found.verdict == NO_DIFFERENCE
    shape = "x" if low is None and found.verdict != "exact" else "s" if found.verdict == "exact" else "o"
    axes.plot([100 * found.relative], [place], marker=shape, markersize=6, color=DARK, label="difference",
              markerfacecolor="white" if hollow else DARK, markeredgewidth=1.4, linestyle="", zorder=4)  # fmt: skip
    axes.text(1.02, place, percent(found.relative, decimals, signed=True), **beside)


def heat(results: Results, group: Group) -> list[Drawn | str]:
    """Relative differences as shaded numbers: factor x factor where there are two, else arms x metrics."""
    arms = arms_of(results, group)
    factors = [f for f in group.factors if len({arm.levels.get(f.name) for arm in arms}) > 1]
    if not any(_found(arm, key) for arm in arms for key in PRIMARY):
        return ["No heat map: no arm could be compared with its baseline."]
    if len(factors) == 2 and group.design == "full":
        # Factors along which there are baselines of their own make the columns.
        rows, columns = sorted(factors, key=lambda f: f.name in group.within)
        return [
            _crossed(arms, rows, columns, key) for key in PRIMARY if any(_found(arm, key) for arm in arms)
        ]
    return [_by_metric(results, arms)]


def _crossed(arms: list[Arm], rows: Factor, columns: Factor, key: str) -> Drawn:
    cells: list[list[tuple[float | None, str]]] = []
    for down in rows.levels:
        line: list[tuple[float | None, str]] = []
        for across in columns.levels:
            here = [
                a for a in arms if a.levels.get(rows.name) == down and a.levels.get(columns.name) == across
            ]
            amount, said = _cell(here[0], key) if here else (None, "no arm")
            emulated = key == SPEED and amount is not None and here[0].emulated
            line.append((amount, f"{said} emulated" if emulated else said))
        cells.append(line)
    shown = metric(key)
    title = f"{shown.label.capitalize()} against the baseline"
    drawn = _map(title, cells, [wrapped(level, 26, 2) for level in rows.levels], columns.levels, alone=False)
    axes = drawn.axes[0]
    axes.set_title(label(f"down: {rows.label}; across: {columns.label}", 75), loc="left", fontsize=8.5)
    caption = f"Difference in {shown.label} against each arm's baseline, in %. {_LEGEND}"
    return Drawn(f"heat_{key}", f"Heat map: {shown.label}", caption, drawn)


def _by_metric(results: Results, arms: list[Arm]) -> Drawn:
    keys = [key for key in (*PRIMARY, ENERGY) if any(_found(arm, key) for arm in arms)]
    compared = [arm for arm in arms if arm.id != arm.baseline]
    kept = telling(compared, QUALITY, MOST_ROWS)
    cells = [[_cell(arm, key) for key in keys] for arm in kept]
    names = row_names(results, kept, emulated=True)
    heads = [f"{metric(key).label} ({metric(key).better} is better)" for key in keys]
    drawn = _map("All arms against their baselines", cells, names, heads, alone=True)
    caption = f"Differences against each arm's baseline, in %, each column shaded on its own. {_LEGEND}"
    return Drawn("heat", "Heat map", caption + left_out(compared, kept), drawn)


_LEGEND = (
    "Light is better, dark is worse. In brackets: no difference shown, or too few seeds to say. Measured."
)


def _cell(arm: Arm, key: str) -> tuple[float | None, str]:
    """(how much worse in parts of the largest, yet to be scaled; the text)."""
    if arm.id == arm.baseline:
        return (0.0, "baseline") if key in arm.estimates else (None, why_missing(arm))
    found = _found(arm, key)
    if found is None:
        return None, why_missing(arm)
    worse = -found.relative if metric(key).better == "higher" else found.relative
    text = percent(found.relative, percent_digits(found.relative), signed=True)
    sure = found.verdict in ("lower", "higher", "exact")
    return worse, text if sure else f"({text})"


def _map(
    title: str, cells: list[list[tuple[float | None, str]]], rows: list[str], columns: list[str], alone: bool
) -> Canvas:
    """The shaded table. alone: each column has a scale of its own (they are different metrics)."""
    wide = len(columns) > 5
    figure, axes = canvas(title, 1.1 + 0.34 * max(len(rows), 2) + (0.5 if wide else 0.0))
    worse = np.array([[np.nan if amount is None else amount for amount, _ in line] for line in cells])
    top = np.nanmax(np.abs(worse), axis=0 if alone else None, initial=0.0)
    shades = 0.5 + 0.5 * np.divide(worse, top, out=np.zeros_like(worse), where=top > 0)
    shades[np.isnan(worse)] = np.nan
    # White to dark grey: what a colour would add is lost on paper, and a scale of greys is not.
    axes.imshow(shades, cmap="Greys", vmin=-0.15, vmax=1.25, aspect="auto")
    for down, line in enumerate(cells):
        for across, (amount, text) in enumerate(line):
            dark = amount is not None and shades[down][across] > 0.62
            axes.text(across, down, wrapped(text, 14, 2), linespacing=0.95, ha="center", va="center", fontsize=8,
                      color="white" if dark else MIDDLE if amount is None else DARK)  # fmt: skip
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    turned: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if wide else {}
    axes.set_xticks(range(len(columns)), [wrapped(head, 15, 3) for head in columns], fontsize=8, **turned)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure
