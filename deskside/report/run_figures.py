"""Draws the plots of a run as PNG files in plots/, readable in black and white."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from deskside.report.canvas import DARK, new_figure, save
from deskside.report.curve_data import running_median
from deskside.report.document import Image
from deskside.run.record import RunRecord, number, series

HEIGHT = 3.2  # inches
LIGHT_GREY = "#9a9a9a"
# Metrics that only DPO and GRPO log: (key, title, unit).
OBJECTIVE_METRICS = (
    ("reward", "Mean reward of a step's answers", "reward"),
    ("answer_tokens", "Length of answers", "tokens"),
    ("entropy", "Entropy of the policy", "nats per token"),
    ("accuracy", "Preference accuracy of a step", "share of pairs"),
    ("margin", "Margin between chosen and rejected answers", "implicit reward"),
)


def draw(record: RunRecord, folder: Path) -> tuple[list[Image], list[str]]:
    """Draw each plot for which the record has data, as a PNG file in `folder`.

    Returns the images in reading order, and a sentence for each plot without data. Raises OSError if the folder cannot
    be written.
    """

    def metric_plotter(key: str, label: str, noisy: bool = True) -> Callable[[Axes], str]:
        # A noisy metric gets a running median. The axis of a smooth one starts at 0.
        return lambda axes: _draw_metric(record, axes, key, label, smooth=noisy, from_zero=not noisy)

    plots: list[tuple[str, str, str, Callable[[Axes], str]]] = [
        ("loss", "Training loss", "loss", metric_plotter("loss", "loss (nats per token)")),
        ("val_bpb", "Validation bits per byte", "val_bpb", lambda axes: _draw_validation(record, axes)),
        ("throughput", "Throughput", "tokens_per_second", lambda axes: _draw_throughput(record, axes)),
        (
            "memory",
            "Peak memory",
            "memory_gib",
            metric_plotter("memory_gib", "peak memory (GiB)", noisy=False),
        ),
        ("learning_rate", "Learning rate", "lr", metric_plotter("lr", "learning rate", noisy=False)),
    ]
    logged_metrics = [metric for metric in OBJECTIVE_METRICS if record.series(metric[0])[0]]
    if logged_metrics:  # DPO and GRPO have no bits per byte; their metrics replace that plot
        plots[1:2] = [(key, title, key, metric_plotter(key, unit)) for key, title, unit in logged_metrics]
    images, missing = [], []
    for name, title, key, draw_plot in plots:
        path = folder / f"{name}.png"
        if not record.series(key)[0] and not (name == "val_bpb" and _final_validation(record)):
            missing.append(f"No plot of {title.lower()}: it was not logged.")
            path.unlink(missing_ok=True)  # left over from an earlier report
            continue
        figure, axes = new_figure(title, HEIGHT)
        caption = draw_plot(axes)
        _label_axes(axes, record)
        save(figure, path)
        images.append(Image(path, title, f"{title}{caption}. All values are measured."))
    return images, missing


def _label_axes(axes: Axes, record: RunRecord) -> None:
    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    final_point = _final_validation(record)
    last_tokens = [*record.series("step")[0], *([final_point[0]] if final_point else [])]
    axes.set_xlim(0, max(last_tokens, default=0) * 1.02 or 1)  # one range for all plots of a run
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)


def _draw_line(axes: Axes, x: list[float], y: list[float], label: str | None = None) -> None:
    """Draw a line, with markers if it has fewer than three points."""
    marker = "o" if len(x) < 3 else ""
    axes.plot(x, y, color=DARK, linewidth=1.6, marker=marker, markersize=5, label=label)


def _draw_metric(record: RunRecord, axes: Axes, key: str, label: str, smooth: bool, from_zero: bool) -> str:
    """Draw one metric, with its running median if `smooth`. Return the text to append to the title as caption."""
    x, y = record.series(key)
    axes.set_ylabel(label)
    median = running_median(y) if smooth else None
    if median is None:
        _draw_line(axes, x, y)
    else:
        axes.plot(x, y, color=LIGHT_GREY, linewidth=0.8, label="each logged step")
        _draw_line(axes, x, median, "running median")
    if from_zero:
        axes.set_ylim(0, max(y) * 1.15 or 1)
    if key == "lr":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    if key == "loss":
        _clip_start(axes, y)
    return "" if median is None else ", with its running median"


def _clip_start(axes: Axes, values: list[float]) -> None:
    """Clip the y axis if the high losses of the first steps would flatten the rest of the curve.

    This is the case if the highest 2 % of the losses make the axis more than 2.5 times as long.
    """
    if len(values) < 20:
        return
    low, high = min(values), max(values)
    quantile_98 = float(np.quantile(values, 0.98))
    if high - low > 2.5 * (quantile_98 - low) > 0:
        axes.set_ylim(low - 0.05 * (quantile_98 - low), quantile_98 + 0.3 * (quantile_98 - low))


def _draw_throughput(record: RunRecord, axes: Axes) -> str:
    """Draw tokens per second and mark throttled steps. Return the text to append to the title as caption."""
    caption = _draw_metric(
        record, axes, "tokens_per_second", "tokens per second", smooth=True, from_zero=True
    )
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    throttled = [row for row in record.metrics if row.get("throttled") is True]
    x, y = series(throttled, "tokens_per_second", "tokens")
    if not x:
        return caption
    axes.plot(x, y, "x", color=DARK, markersize=7, markeredgewidth=1.6, label="throttled")
    return f"{caption}; crosses where the GPU throttled"


def _draw_validation(record: RunRecord, axes: Axes) -> str:
    """Draw bits per byte and the gzip and unigram baselines. Return the text to append to the title as caption."""
    x, y = record.series("val_bpb")
    if x:
        axes.plot(x, y, color=DARK, linewidth=1.6, marker="o", markersize=4.5, label="during training")
    final = _final_validation(record)
    if final is not None:
        axes.plot([final[0]], [final[1]], color=DARK, linestyle="", label="at the end", marker="s", markersize=7,
                  markerfacecolor="white", markeredgewidth=1.6)  # fmt: skip
        x, y = [*x, final[0]], [*y, final[1]]
    drawn_baselines = []
    for key, name, dashes in (("gzip_bpb", "gzip", (0, (6, 3))), ("unigram_bpb", "unigram", (0, (1, 2)))):
        bpb = number(record.summary.get(key))
        if bpb is not None and bpb <= 1.25 * max(y):  # a higher line would flatten the curve
            axes.axhline(bpb, color=DARK, linewidth=1.1, linestyle=dashes, label=f"{name} {bpb:.3f}")
            drawn_baselines.append(name)
    axes.set_ylabel("bits per byte of text")
    axes.margins(y=0.1)
    axes.annotate(
        f"{y[-1]:.3f}", (x[-1], y[-1]), xytext=(-2, 9), textcoords="offset points", ha="right", fontsize=9
    )
    baselines = f", compared with {' and '.join(drawn_baselines)} on the same text" if drawn_baselines else ""
    return f", lower is better{baselines}"


def _final_validation(record: RunRecord) -> tuple[float, float] | None:
    """Return (tokens, bits per byte) of the final evaluation, which covers the whole validation split."""
    tokens, bpb = (number(record.summary.get(key)) for key in ("tokens", "val_bpb"))
    return None if tokens is None or bpb is None else (tokens, bpb)
