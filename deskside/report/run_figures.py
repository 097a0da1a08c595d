"""Draws the charts of a run as SVG files in plots/, readable in black and white."""

import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, NullFormatter, StrMethodFormatter

from deskside.report.canvas import new_figure
from deskside.report.chart_data import LOG_RATIO
from deskside.report.colors import BLUE, INK, PALE, PAPER, VERMILION
from deskside.report.curve_data import running_median
from deskside.report.document import Image
from deskside.report.svg import save
from deskside.run.record import RunRecord, number, series

HEIGHT = 2.7  # inches
MAX_CROSSES = (
    0.2  # throttled steps are marked if they are at most this share, because more would hide the curve
)


@dataclass(frozen=True)
class RunChart:
    """A chart of one metric of a run against the training tokens.

    Attributes:
        name: Of its file, without the extension.
        key: Of the metric in metrics.jsonl.
        noisy: True if it changes so much from step to step that its running median is drawn, too.
        from_zero: True if the axis begins at zero.
    """

    name: str
    title: str
    key: str
    label: str
    noisy: bool = True
    from_zero: bool = False


LOSS = RunChart("loss", "Training loss", "loss", "nats per token")
VALIDATION = RunChart("val_bpb", "Validation loss", "val_bpb", "bits per byte of text")
# Metrics that only DPO and GRPO log. Those objectives have no bits per byte.
OBJECTIVE_CHARTS = (
    RunChart("reward", "Mean reward of a step's answers", "reward", "reward"),
    RunChart("answer_tokens", "Length of answers", "answer_tokens", "tokens"),
    RunChart("entropy", "Entropy of the policy", "entropy", "nats per token"),
    RunChart("accuracy", "Preference accuracy of a step", "accuracy", "share of pairs"),
    RunChart("margin", "Margin between chosen and rejected answers", "margin", "implicit reward"),
)
OTHER_CHARTS = (
    RunChart("learning_rate", "Learning rate", "lr", "learning rate", noisy=False, from_zero=True),
    RunChart("gradient_norm", "Gradient norm", "grad_norm", "norm before clipping"),
    RunChart("throughput", "Speed", "tokens_per_second", "tokens/s", from_zero=True),
    RunChart("memory", "Peak memory", "memory_gib", "GiB", noisy=False, from_zero=True),
    RunChart("power", "Power of the GPU", "watts", "W", from_zero=True),
)


def draw(record: RunRecord, folder: Path) -> tuple[list[Image], list[str]]:
    """Draw each chart for which the record has data, as an SVG file in `folder`.

    Returns the images in reading order, and a sentence for each chart without data. Raises OSError if the folder cannot
    be written.
    """
    logged = [chart for chart in OBJECTIVE_CHARTS if record.series(chart.key)[0]]
    images, missing = [], []
    for chart in (LOSS, *(logged or [VALIDATION]), *OTHER_CHARTS):
        if not record.series(chart.key)[0] and not (chart is VALIDATION and _final_validation(record)):
            missing.append(f"No chart of {chart.title.lower()}: it was not logged.")
            continue
        figure, axes = new_figure(chart.title, HEIGHT)
        axes.set_ylabel(chart.label, fontsize=10.5)
        caption = _draw_validation(record, axes) if chart is VALIDATION else _draw_metric(record, axes, chart)
        _label_axes(axes, record)
        path = folder / f"{chart.name}.svg"
        save(figure, path)
        images.append(Image(path, chart.title, caption))
    return images, missing


def _label_axes(axes: Axes, record: RunRecord) -> None:
    axes.set_xlabel("training tokens", fontsize=10.5)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    final_point = _final_validation(record)
    last_tokens = [*record.series("step")[0], *([final_point[0]] if final_point else [])]
    axes.set_xlim(0, max(last_tokens, default=0) * 1.02 or 1)  # one range for all plots of a run
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=10.5)


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
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    if chart.key == "grad_norm" and min(y) > 0 and max(y) > LOG_RATIO * statistics.median(y):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        sentences.append("Logarithmic axis.")
    if chart.key == "loss":
        sentences += _clip_start(axes, y)
    return " ".join(sentences)


def _clip_start(axes: Axes, values: list[float]) -> list[str]:
    """Clip the y axis if the high losses of the first steps would flatten the rest of the curve, and say so.

    This is the case if the highest 2 % of the losses make the axis more than 2.5 times as long.
    """
    if len(values) < 20:
        return []
    low, high = min(values), max(values)
    quantile_98 = float(np.quantile(values, 0.98))
    if not high - low > 2.5 * (quantile_98 - low) > 0:
        return []
    axes.set_ylim(low - 0.05 * (quantile_98 - low), quantile_98 + 0.3 * (quantile_98 - low))
    return ["The first steps are cut off above."]


def _draw_validation(record: RunRecord, axes: Axes) -> str:
    """Draw bits per byte and the gzip and unigram baselines. Return the caption."""
    x, y = record.series("val_bpb")
    if x:
        axes.plot(x, y, color=BLUE, linewidth=1.6, marker="o", markersize=4.5, label="during training")
    final = _final_validation(record)
    if final is not None:
        axes.plot([final[0]], [final[1]], color=BLUE, linestyle="", label="at the end", marker="s", markersize=7,
                  markerfacecolor=PAPER, markeredgewidth=1.6)  # fmt: skip
        x, y = [*x, final[0]], [*y, final[1]]
    drawn_baselines = []
    for key, name, dashes in (("gzip_bpb", "gzip", (0, (6, 3))), ("unigram_bpb", "unigram", (0, (1, 2)))):
        bpb = number(record.summary.get(key))
        if bpb is not None and bpb <= 1.25 * max(y):  # a higher line would flatten the curve
            axes.axhline(bpb, color=INK, linewidth=1.1, linestyle=dashes, label=f"{name} {bpb:.3f}")
            drawn_baselines.append(name)
    axes.margins(y=0.1)
    axes.annotate(
        f"{y[-1]:.3f}", (x[-1], y[-1]), xytext=(-2, 9), textcoords="offset points", ha="right", fontsize=10.5
    )
    baselines = f", beside {' and '.join(drawn_baselines)} on the same text" if drawn_baselines else ""
    return f"Lower is better{baselines}."


def _final_validation(record: RunRecord) -> tuple[float, float] | None:
    """Return (tokens, bits per byte) of the final evaluation, which covers the whole validation split."""
    tokens, bpb = (number(record.summary.get(key)) for key in ("tokens", "val_bpb"))
    return None if tokens is None or bpb is None else (tokens, bpb)
