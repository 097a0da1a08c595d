"""Heat maps of relative differences: factor by factor if there are two, else arms by metrics."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from deskside.report.canvas import DARK, MIDDLE, Plot, new_canvas, one_line, wrapped
from deskside.report.chart_data import most_different
from deskside.report.charts import MAX_ROWS, left_out, row_names
from deskside.report.study_text import reason_missing
from deskside.run.record import number
from deskside.study.results import Arm, Factor, Group, Results
from deskside.study.stats.metrics import ENERGY, PRIMARY, QUALITY, SPEED, metric_named
from deskside.utils.format import percent, percent_digits

LEGEND = (
    "Light is better, dark is worse. In brackets: no difference shown, or too few seeds to say. Measured."
)
Cell = tuple[float | None, str]  # how much worse it is (None: no number), and its text


def heat_maps(results: Results, group: Group) -> list[Plot | str]:
    """Draw the heat maps of a group, or return why there is none."""
    arms = results.arms_in(group)
    factors = [f for f in group.factors if len({arm.levels.get(f.name) for arm in arms}) > 1]
    keys = [key for key in (*PRIMARY, ENERGY) if any(_relative(arm, key) is not None for arm in arms)]
    if not set(keys) & set(PRIMARY):
        return ["No heat map: no arm could be compared with its baseline."]
    if len(factors) == 2 and group.design == "full":
        # Factors whose levels each have their own baseline become the columns.
        rows, columns = sorted(factors, key=lambda f: f.name in group.within)
        return [_two_factors(arms, rows, columns, key) for key in keys if key in PRIMARY]
    return [_by_metric(results, arms, keys)]


def _two_factors(arms: Sequence[Arm], rows: Factor, columns: Factor, key: str) -> Plot:
    at = {(arm.levels.get(rows.name), arm.levels.get(columns.name)): arm for arm in reversed(arms)}

    def cell(down: str, across: str) -> Cell:
        arm = at.get((down, across))
        if arm is None:
            return None, "no arm"
        amount, text = _cell(arm, key)
        return amount, f"{text} emulated" if key == SPEED and amount is not None and arm.emulated else text

    metric = metric_named(key)
    cells = [[cell(down, across) for across in columns.levels] for down in rows.levels]
    names = [wrapped(level, 26, 2) for level in rows.levels]
    title = f"{metric.label.capitalize()} against the baseline"
    figure = _draw(title, cells, names, columns.levels, own_scales=False)
    caption = f"Difference in {metric.label} against each arm's baseline, in %. {LEGEND}"
    directions = one_line(f"down: {rows.label}; across: {columns.label}", 75)
    figure.axes[0].set_title(directions, loc="left", fontsize=8.5)
    return Plot(f"heat_{key}", f"Heat map: {metric.label}", caption, figure)


def _by_metric(results: Results, arms: Sequence[Arm], keys: Sequence[str]) -> Plot:
    compared = [arm for arm in arms if arm.id != arm.baseline]
    kept = most_different(compared, QUALITY, MAX_ROWS)
    cells = [[_cell(arm, key) for key in keys] for arm in kept]
    names = row_names(results, kept, [arm.emulated for arm in kept])
    heads = [f"{metric_named(key).label} ({metric_named(key).better} is better)" for key in keys]
    figure = _draw("All arms against their baselines", cells, names, heads, own_scales=True)
    caption = f"Differences against each arm's baseline, in %, each column with its own shades. {LEGEND}"
    return Plot("heat", "Heat map", caption + left_out(len(compared), len(compared) - len(kept)), figure)


def _relative(arm: Arm, key: str) -> float | None:
    found = arm.comparison(key)
    return None if found is None else number(found.relative)


def _cell(arm: Arm, key: str) -> Cell:
    if arm.id == arm.baseline:
        return (0.0, "baseline") if key in arm.estimates else (None, reason_missing(arm))
    found, relative = arm.comparison(key), _relative(arm, key)
    if found is None or relative is None:
        return None, reason_missing(arm)
    text = percent(relative, percent_digits(relative), signed=True)
    sure = found.verdict in ("lower", "higher", "exact")
    return -relative if metric_named(key).better == "higher" else relative, text if sure else f"({text})"


def _draw(
    title: str, cells: list[list[Cell]], rows: list[str], columns: list[str], own_scales: bool
) -> Figure:
    """Draw the shaded table. With `own_scales` each column is shaded by its own largest value (a metric each)."""
    wide = len(columns) > 5
    figure, axes = new_canvas(title, 1.1 + 0.34 * max(len(rows), 2) + (0.5 if wide else 0.0))
    worse = np.array([[np.nan if amount is None else amount for amount, _ in line] for line in cells])
    top = np.nanmax(np.abs(worse), axis=0 if own_scales else None, initial=0.0)
    shades = 0.5 + 0.5 * np.divide(worse, top, out=np.zeros_like(worse), where=top > 0)
    shades[np.isnan(worse)] = np.nan
    # Greys survive printing, colors do not.
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
