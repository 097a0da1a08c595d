"""Draws the charts of a run (run_chart_data.py) as SVG files in plots/, readable in black and white."""

import statistics
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, NullFormatter, StrMethodFormatter

from deskside.report.canvas import new_figure
from deskside.report.chart_data import LOG_RATIO
from deskside.report.colors import BLUE, INK, PALE, PAPER, VERMILION
from deskside.report.curve_data import running_median
from deskside.report.document import Image
from deskside.report.run_answer import loss_unit
from deskside.report.run_chart_data import CHARTS, RunChart, clipped_top
from deskside.report.svg import save
from deskside.run.record import RunRecord, number, series

HEIGHT = 2.7  # inches
MAX_CROSSES = (
    0.2  # throttled steps are marked if they are at most this share, because more would hide the curve
)


# Names of the files of metrics whose keys are abbreviations.
FILE_NAMES = {
    "lr": "learning_rate",
    "grad_norm": "gradient_norm",
    "tokens_per_second": "throughput",
    "memory_gib": "memory",
    "watts": "power",
}


def draw(record: RunRecord, folder: Path) -> tuple[list[Image], list[str]]:
    """Draw each chart for which the record has data, as an SVG file in `folder`.

    Returns the images in reading order, and a sentence for each chart without data. Raises OSError if the folder cannot
    be written.
    """
    logged = {chart.key for chart in CHARTS if record.series(chart.key)[0] or _at_end(record, chart)}
    has_objective = any(chart.objective and chart.key in logged for chart in CHARTS)
    images, missing = [], []
    for chart in CHARTS:
        if chart.key not in logged:
            if not chart.objective and not (chart.key == "val_bpb" and has_objective):
                missing.append(f"No chart of {chart.title[0].lower()}{chart.title[1:]}: it was not logged.")
            continue
        figure, axes = new_figure(chart.title, HEIGHT)
        axes.set_ylabel(loss_unit(record) if chart.key == "loss" else chart.unit, fontsize=10.5)
        caption = (_draw_evaluations if chart.rare else _draw_metric)(record, axes, chart)
        _label_axes(axes, record, "lower left" if chart.key == "val_bpb" else "best")
        path = folder / f"{FILE_NAMES.get(chart.key, chart.key)}.svg"
        save(figure, path)
        images.append(Image(path, chart.title, caption))
    return images, missing


def _label_axes(axes: Axes, record: RunRecord, legend_place: str) -> None:
    axes.set_xlabel("training tokens", fontsize=10.5)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    end = number(record.summary.get("tokens"))
    last_tokens = [*record.series("step")[0], *([end] if end is not None else [])]
    axes.set_xlim(0, max(last_tokens, default=0) * 1.02 or 1)  # one range for all plots of a run
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=legend_place, frameon=True, framealpha=0.9, edgecolor="none", fontsize=10.5)


def _draw_line(axes: Axes, x: list[float], y: list[float]) -> None:
    """Draw a line, with markers if it has fewer than three points."""
    marker = "o" if len(x) < 3 else ""
    axes.plot(x, y, color=BLUE, linewidth=1.6, marker=marker, markersize=5)


def _draw_metric(record: RunRecord, axes: Axes, chart: RunChart) -> str:
    """Draw one metric, with its running median if it is noisy. Return the caption."""
    x, y = record.series(chart.key)
    median = running_median(y) if chart.noisy else None
    if median is None:
        _draw_line(axes, x, y)
    else:
        axes.plot(x, y, color=PALE, linewidth=0.8)
        _draw_line(axes, x, median)
    sentences = [] if median is None else ["Pale: each logged step; blue: running median."]
    if chart.key == "tokens_per_second":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        throttled = [row for row in record.metrics if row.get("throttled") is True]
        at, speeds = series(throttled, chart.key, "tokens")
        if len(at) <= MAX_CROSSES * len(x):
            axes.plot(at, speeds, "x", color=VERMILION, markersize=4, markeredgewidth=1.0)
        if at:
            crosses = "Orange crosses: the" if len(at) <= MAX_CROSSES * len(x) else "The"
            sentences.append(f"{crosses} GPU throttled in {len(at):,} of {len(x):,} logged steps.")
    if chart.from_zero:
        axes.set_ylim(0, max(y) * 1.15 or 1)
    if chart.key == "lr":
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if chart.key == "grad_norm" and min(y) > 0 and max(y) > LOG_RATIO * statistics.median(y):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        sentences.append("Logarithmic axis.")
    if chart.key == "loss" and (top := clipped_top(y)) is not None:
        axes.set_ylim(min(y) - 0.05 * (top - min(y)), top)
        sentences.append("The first steps are cut off above.")
    return " ".join(sentences)


def _draw_evaluations(record: RunRecord, axes: Axes, chart: RunChart) -> str:
    """Draw the evaluations on held-out data, bits per byte with its baselines. Return the caption."""
    x, y = record.series(chart.key)
    if x:
        axes.plot(x, y, color=BLUE, linewidth=1.6, marker="o", markersize=4.5, label="during training")
    final = _at_end(record, chart)
    if final is not None:
        axes.plot([final[0]], [final[1]], color=BLUE, linestyle="", label="at the end", marker="s", markersize=7,
                  markerfacecolor=PAPER, markeredgewidth=1.6)  # fmt: skip
        x, y = [*x, final[0]], [*y, final[1]]
    drawn_baselines = _draw_baselines(record, axes, 1.25 * max(y)) if chart.key == "val_bpb" else []
    axes.margins(y=0.2)
    # On the side of the last point from which the curve does not come.
    offset = (-2, -15) if y[-1] < y[0] else (-2, 9)
    axes.annotate(
        f"{y[-1]:.3f}", (x[-1], y[-1]), xytext=offset, textcoords="offset points", ha="right", fontsize=10.5
    )
    baselines = f", beside {' and '.join(drawn_baselines)} on the same text" if drawn_baselines else ""
    return f"{'Lower' if chart.key == 'val_bpb' else 'Higher'} is better{baselines}."


def _draw_baselines(record: RunRecord, axes: Axes, highest: float) -> list[str]:
    """Draw the bits per byte of gzip and of a unigram model up to `highest`. Return the names of those drawn."""
    drawn = []
    for key, name, dashes in (("gzip_bpb", "gzip", (0, (6, 3))), ("unigram_bpb", "unigram", (0, (1, 2)))):
        bpb = number(record.summary.get(key))
        if bpb is not None and bpb <= highest:  # a higher line would flatten the curve
            axes.axhline(bpb, color=INK, linewidth=1.1, linestyle=dashes)
            axes.annotate(
                f"{name} {bpb:.3f}", (0.99, bpb), xycoords=axes.get_yaxis_transform(), xytext=(0, 4),
                textcoords="offset points", ha="right", fontsize=10.5,
            )  # fmt: skip
            drawn.append(name)
    return drawn


def _at_end(record: RunRecord, chart: RunChart) -> tuple[float, float] | None:
    """Return (tokens, value) of the evaluation at the end of the run; None without one."""
    tokens, value = (number(record.summary.get(key)) for key in ("tokens", chart.key))
    return None if not chart.rare or tokens is None or value is None else (tokens, value)
