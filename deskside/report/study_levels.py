"""What the arms of a study reach: bars of speed and memory, the bubble plot, the Pareto front."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

from deskside.report import intervals
from deskside.report.study_canvas import (
    DARK,
    HATCH,
    MIDDLE,
    MOST_ROWS,
    PALE,
    Drawn,
    canvas,
    ends,
    label,
    left_out,
    row_names,
    telling,
    why_missing,
)
from deskside.report.study_words import (
    ENERGY,
    MEMORY,
    QUALITY,
    SPEED,
    arms_of,
    known,
    measured,
    metric,
    seeds,
    unit,
    value,
)
from deskside.study.results import Arm, Front, Group, Results

SMALLEST, LARGEST = 40.0, 700.0  # areas of bubbles, in square points
AT_ONCE = 24  # arms in a plot where every one has a number


def bars(results: Results, group: Group, key: str) -> Drawn | str:
    """One metric of every arm as bars with intervals; arms without it say why."""
    arms, shown = arms_of(results, group), metric(key)
    have = measured(arms, key)
    if not have:
        return f"No bars of {shown.label}: it was not measured in any arm."
    kept = telling(arms, key, MOST_ROWS)
    figure, axes = canvas(shown.label.capitalize(), 0.95 + 0.27 * max(len(kept), 2))
    speed = key in (SPEED, ENERGY)
    for place, arm in enumerate(kept):
        found = ends(arm, key)
        beside: dict[str, Any] = {
            "fontsize": 8,
            "va": "center",
            "xytext": (4, 0),
            "textcoords": "offset points",
        }
        if found is None:
            axes.annotate(why_missing(arm), (0, place), color=MIDDLE, **beside)
            continue
        mean, down, up = (end * shown.scale for end in found)
        emulated = speed and arm.emulated
        face = "white" if emulated else MIDDLE if arm.id == arm.baseline else PALE
        interval: dict[str, Any] = (
            {"xerr": [[down], [up]], "capsize": 3, "ecolor": DARK} if down or up else {}
        )
        axes.barh(place, mean, height=0.68, color=face, edgecolor=DARK, linewidth=0.8,
                  hatch=HATCH if emulated else None, **interval)  # fmt: skip
        axes.annotate(value(shown, found[0]), (mean + up, place), **beside)
    axes.set_yticks(range(len(kept)), row_names(results, kept, speed), fontsize=8)
    axes.set_ylim(len(kept) - 0.4, -0.6)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.2)
    axes.grid(False, axis="y")
    axes.set_xlabel(f"{shown.label} ({shown.unit})", fontsize=9)
    if key == SPEED:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    hatched = (
        " Hatched: the number format is emulated, so its speed is not that of hardware that has it."
        if speed and any(arm.emulated for arm in kept)
        else ""
    )
    what = f"{unit(shown)[0].upper()}{unit(shown)[1:]}{f' ({shown.about})' if shown.about else ''}"
    caption = (
        f"{what}: mean and interval over seeds ({seeds(kept, key)}). Dark bars: baselines.{hatched} Measured."
    )
    return Drawn(f"bars_{key}", f"Bars: {shown.label}", caption + left_out(arms, kept), figure)


def bubbles(results: Results, group: Group) -> Drawn | str:
    """Peak memory against speed, the area of a bubble in proportion to the parameters."""
    arms = arms_of(results, group)
    have = [arm for arm in measured(arms, SPEED) if known(arm, MEMORY) and known(arm, "parameters")]
    if not have:
        return "No bubble plot: no arm has speed, memory and parameters."
    kept = telling(have, SPEED, AT_ONCE)
    figure, axes = _keyed("Memory, speed and size", kept, results)
    plot, cut = _windows(axes, kept, MEMORY, SPEED), False
    sizes = [known(arm, "parameters") for arm in kept]
    largest = max(size.mean for size in sizes if size is not None) or 1.0
    for arm, size in zip(kept, sizes, strict=True):
        x, y = known(arm, MEMORY), known(arm, SPEED)
        if x is None or y is None or size is None:
            continue
        area = max(SMALLEST, LARGEST * min(1.0, 10 / len(kept)) * size.mean / largest)
        face = "white" if arm.emulated else PALE
        axes.scatter([x.mean], [y.mean], s=area, facecolor=face, edgecolor=DARK, alpha=0.85,
                     hatch=HATCH if arm.emulated else None, linewidth=0.8, zorder=2)  # fmt: skip
        cut |= _cross(axes, arm, (MEMORY, SPEED), plot)
    _numbers(axes, [(arm, MEMORY, SPEED) for arm in kept], arms)
    axes.set_xlabel("peak memory (GiB), less is better", fontsize=9)
    axes.set_ylabel("speed (tokens/s), more is better", fontsize=9)
    shown = metric("parameters")
    low, high = (value(shown, end(size.mean for size in sizes if size is not None)) for end in (min, max))
    millions = f"{low} M" if low == high else f"{low} to {high} M"
    emulated = " Hatched: emulated, its speed is not the hardware's." if any(a.emulated for a in kept) else ""
    caption = (
        f"Area: parameters ({millions}; very small ones are drawn larger). Crosses: intervals over seeds "
        f"({seeds(kept, SPEED)}).{_told(cut)}{emulated} Measured."
    )
    return Drawn("bubbles", "Memory, speed and parameters", caption + left_out(have, kept), figure)


def front(results: Results, group: Group, found: Front) -> Drawn | str:
    """The Pareto front of a group, drawn in speed and loss where it has these, else in two of its metrics."""
    arms = arms_of(results, group)
    across, down = axes_of(found)
    names = " x ".join(metric(key).label for key in found.metrics)
    have = [arm for arm in measured(arms, across) if known(arm, down)]
    if not have:
        return f"No Pareto front of {names}: no arm has these numbers."
    members = [arm for arm in have if arm.id in found.arms]
    rest = telling([arm for arm in have if arm.id not in found.arms], across, max(0, AT_ONCE - len(members)))
    kept = [arm for arm in have if arm in members or arm in rest]
    figure, axes = _keyed(f"Pareto front: {names}", kept, results)
    plot, cut = _windows(axes, kept, across, down), False
    for arm in kept:
        x, y = _scaled(arm, across), _scaled(arm, down)
        if x is None or y is None:
            continue
        cut |= _cross(axes, arm, (across, down), plot)
        on, unclear = arm.id in found.arms, arm.id in found.unclear
        axes.plot([x[0]], [y[0]], marker="s" if on else "D" if unclear else "o", markersize=7 if on else 6, color=DARK,
                  markerfacecolor=DARK if on else PALE if unclear else "white", linestyle="")  # fmt: skip
    if len(found.metrics) == 2:
        line = sorted((s[0], t[0]) for a in members if (s := _scaled(a, across)) and (t := _scaled(a, down)))
        # Between two arms of the front nothing was tried: steps, not a slope that promises something.
        higher = metric(across).better == "higher"
        axes.step(
            *zip(*line, strict=True),
            where="pre" if higher else "post",
            color=DARK,
            linewidth=1.2,
            linestyle="--",
            zorder=1,
        )
    _numbers(axes, [(arm, across, down) for arm in kept], arms)
    for key, said in ((across, axes.set_xlabel), (down, axes.set_ylabel)):
        shown = metric(key)
        said(label(f"{shown.label} ({shown.unit}), {shown.better} is better", 60), fontsize=9)
    third = [metric(key).label for key in found.metrics if key not in (across, down)]
    also = f" The front also weighs {' and '.join(third)}, which is not drawn." if third else ""
    open_ = " Grey diamonds: the intervals leave open whether they belong to it." if found.unclear else ""
    emulated = [arm for arm in kept if arm.emulated] if SPEED in found.metrics else []
    caption = (
        f"Filled squares: no other arm is better in all of {', '.join(metric(k).label for k in found.metrics)} "
        f"at once.{also}"
        f"{open_} Crosses: intervals over seeds ({seeds(kept, across)}).{_told(cut)}"
        f"{' Arms marked emulated do not have the speed of the hardware format.' if emulated else ''} Measured."
    )
    return Drawn(
        f"pareto_{'_'.join(found.metrics)}", f"Pareto front: {names}", caption + left_out(have, kept), figure
    )


def axes_of(found: Front) -> tuple[str, str]:
    """The two metrics that a front is drawn in, across and down."""
    down = QUALITY if QUALITY in found.metrics else found.metrics[-1]
    others = [key for key in found.metrics if key != down]
    return SPEED if SPEED in others else others[0], down


def _scaled(arm: Arm, key: str) -> tuple[float, float, float] | None:
    found, scale = ends(arm, key), metric(key).scale
    return None if found is None else (found[0] * scale, found[1] * scale, found[2] * scale)


def _keyed(title: str, arms: Sequence[Arm], results: Results) -> tuple[Canvas, Axes]:
    """A canvas with the plot above and the key of the numbered arms beneath it, in two columns."""
    everywhere = arms_of(results, next(g for g in results.groups if g.name == arms[0].group))
    lines = [
        f"{everywhere.index(arm) + 1}  {label(arm.label, 30)}{' (emulated)' if arm.emulated else ''}"
        for arm in arms
    ]
    half = -(-len(lines) // 2)
    room = 0.165 * half + 0.15
    figure, axes = canvas(title, 3.5 + room)
    figure.set_layout_engine("constrained", rect=(0, room / (3.5 + room), 1, 1 - room / (3.5 + room)))
    for column, part in enumerate((lines[:half], lines[half:])):
        figure.text(0.02 + 0.5 * column, (room - 0.05) / (3.5 + room), "\n".join(part), va="top", fontsize=7.5,
                    linespacing=1.45)  # fmt: skip
    return figure, axes


Window = tuple[float, float]


def _told(cut: bool) -> str:
    return f" {intervals.CUT}" if cut else ""


def _cross(axes: Axes, arm: Arm, keys: tuple[str, str], plot: tuple[Window, Window]) -> bool:
    """An arm's intervals in two metrics, as far as the plot goes; returns whether one goes on beyond it."""
    found = [known(arm, key) for key in keys]
    x, y = found
    if x is None or y is None:
        return False
    middle = [one.mean * metric(key).scale for one, key in zip((x, y), keys, strict=True)]
    arrows = []
    for place, (one, key) in enumerate(zip((x, y), keys, strict=True)):
        shown, scale = intervals.cut(one, plot[place]), metric(key).scale
        ends_ = (shown.low * scale, shown.high * scale)
        reach = [[middle[place] - ends_[0]], [ends_[1] - middle[place]]]
        if any(part[0] > 0 for part in reach):
            error: dict[str, Any] = {"xerr" if place == 0 else "yerr": reach}
            axes.errorbar([middle[0]], [middle[1]], **error, color=DARK, linewidth=0.9, capsize=2, fmt="none",
                          zorder=3)  # fmt: skip
        for goes_on, end, mark in zip(
            (shown.goes_on_below, shown.goes_on_above), ends_, ("<>", "v^")[place], strict=True
        ):
            if goes_on:
                arrows.append(((end, middle[1]) if place == 0 else (middle[0], end), mark))
    for at, mark in arrows:
        axes.plot(*([value] for value in at), marker=mark, markersize=5, color=DARK, clip_on=False, zorder=4)
    return bool(arrows)


def _windows(axes: Axes, arms: Sequence[Arm], across: str, down: str) -> tuple[Window, Window]:
    """Set both axes to where the means are, in stored units; logarithmic where those lie far apart."""
    windows: list[Window] = []
    for key, axis in ((across, "x"), (down, "y")):
        found = [one for arm in arms if (one := known(arm, key)) is not None]
        scale, log = metric(key).scale, intervals.wide(found)
        start, stop = intervals.window(found, log)
        named = axes.xaxis if axis == "x" else axes.yaxis
        if log:
            axes.set(**{f"{axis}scale": "log"})
            named.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            named.set_minor_formatter(NullFormatter())
        if max(one.mean for one in found) * scale >= 10_000:
            named.set_major_formatter(EngFormatter(sep=""))
        else:
            named.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set(**{f"{axis}lim": (start * scale, stop * scale)})
        windows.append((start, stop))
    return windows[0], windows[1]


def _numbers(axes: Axes, places: Sequence[tuple[Arm, str, str]], arms: Sequence[Arm]) -> None:
    """Each arm's number beside its mark, moved around it until it covers no other number and no other mark."""
    axes.figure.canvas.draw()  # the layout, and so every place in pixels, is known after drawing
    points = []
    for arm, across, down in places:
        x, y = _scaled(arm, across), _scaled(arm, down)
        if x is not None and y is not None:
            points.append((arm, (x[0], y[0]), axes.transData.transform((x[0], y[0]))))
    pixel = axes.figure.dpi / 72
    taken: list[tuple[float, float]] = [(at[0], at[1]) for _, _, at in points]
    for arm, where, at in points:

        def crowd(shift: tuple[float, float], at: Any = at) -> float:
            x, y = at[0] + shift[0] * pixel, at[1] + shift[1] * pixel
            return sum(abs(x - a) < 11 * pixel and abs(y - b) < 9 * pixel for a, b in taken)

        reach = (11, 19, 27)
        tries = [
            (dx * r, dy * r)
            for r in reach
            for dx, dy in ((1, 0.6), (-1, 0.6), (1, -0.6), (-1, -0.6), (0, 1), (0, -1))
        ]
        shift = min(tries, key=crowd)
        taken.append((at[0] + shift[0] * pixel, at[1] + shift[1] * pixel))
        leader = {"arrowstyle": "-", "linewidth": 0.4, "color": MIDDLE, "shrinkA": 4, "shrinkB": 0}
        axes.annotate(str(arms.index(arm) + 1), where, xytext=shift, textcoords="offset points", ha="center",
                      va="center", fontsize=8, fontweight="bold", zorder=5, arrowprops=leader,
                      path_effects=[withStroke(linewidth=2, foreground="white")])  # fmt: skip
