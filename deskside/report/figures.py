"""The plots of a run, drawn so that they read in black and white: by line style, marker and direct label.

Matplotlib is used through its object interface with the Agg canvas, so no global state and no display is touched.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import EngFormatter

from deskside.report.document import Figure
from deskside.run.record import RunRecord, number

WIDTH, HEIGHT, DPI = 5.2, 3.2, 170  # inches, inches, dots per inch: letters stay readable on a phone
DARK, PALE = "#111111", "#9a9a9a"
# What objectives other than the next token log: drawn where it is there, in place of bits per byte.
GOALS = (
    ("reward", "Mean reward of a step's answers", "reward"),
    ("answer_tokens", "Length of answers", "tokens"),
    ("entropy", "Entropy of the policy", "nats per token"),
    ("accuracy", "Pairs of a step the right way round", "share"),
    ("margin", "Margin between chosen and rejected answers", "implicit reward"),
)


def draw(record: RunRecord, folder: Path) -> tuple[list[Figure], list[str]]:
    """Draw every plot that the record has points for into `folder` as PNG.

    Returns the figures in reading order, and a sentence for each plot that could not be drawn. Raises OSError when
    the folder cannot be written.
    """
    plots: list[tuple[str, str, str, Callable[[RunRecord, Axes], str], str]] = [
        ("loss", "Training loss", "loss", _loss, "no training loss was logged"),
        ("val_bpb", "Validation bits per byte", "val_bpb", _validation, "no validation was logged"),
        ("throughput", "Throughput", "tokens_per_second", _throughput, "no throughput was logged"),
        ("memory", "Memory", "memory_gib", _memory, "no memory was logged"),
        ("learning_rate", "Learning rate", "lr", _learning_rate, "no learning rate was logged"),
    ]
    goals = [goal for goal in GOALS if record.series(goal[0])[0]]
    if goals:
        plots[1:2] = [(key, title, key, partial(_goal, key, title, unit), "") for key, title, unit in goals]
    figures, absent = [], []
    for name, title, key, plot, excuse in plots:
        path = folder / f"{name}.png"
        if not record.series(key)[0] and not (name == "val_bpb" and _final(record)):
            absent.append(f"No plot of {title.lower()}: {excuse}.")
            path.unlink(missing_ok=True)  # one of an earlier report would not be this run's any more
            continue
        canvas = Canvas(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
        caption = plot(record, axes)
        _dress(axes, title, record)
        folder.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, format="png", metadata={"Software": None})
        figures.append(Figure(path, title, caption))
    return figures, absent


def _dress(axes: Axes, title: str, record: RunRecord) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_title("measured", loc="right", fontsize=9, color="#555555")
    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    final = _final(record)
    ends = [*record.series("step")[0], *([final[0]] if final else [])]
    axes.set_xlim(0, max(ends, default=0) * 1.02 or 1)  # the same for all, so that they can be read together
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)


def _line(axes: Axes, x: list[float], y: list[float], label: str | None = None) -> None:
    """A line; a point where there is too little for a line."""
    marker = "o" if len(x) < 3 else ""
    axes.plot(x, y, color=DARK, linewidth=1.6, marker=marker, markersize=5, label=label)


def _curve(axes: Axes, x: list[float], y: list[float]) -> str:
    """A line with its running median where there are enough points; returns the words for the caption."""
    smooth = smoothed(y)
    if smooth is None:
        _line(axes, x, y)
        return ""
    axes.plot(x, y, color=PALE, linewidth=0.8, label="each logged step")
    _line(axes, x, smooth, "running median")
    return ", with its running median"


def _loss(record: RunRecord, axes: Axes) -> str:
    x, y = record.series("loss")
    also = _curve(axes, x, y)
    axes.set_ylabel("loss (nats per token)")
    _focus(axes, y)
    return f"Loss of the training batches{also}. Measured."


def _goal(key: str, title: str, unit: str, record: RunRecord, axes: Axes) -> str:
    x, y = record.series(key)
    also = _curve(axes, x, y)
    axes.set_ylabel(unit)
    return f"{title}{also}. Measured."


def _validation(record: RunRecord, axes: Axes) -> str:
    x, y = record.series("val_bpb")
    if x:
        axes.plot(x, y, color=DARK, linewidth=1.6, marker="o", markersize=4.5, label="during training")
    final = _final(record)
    if final is not None:
        style: dict[str, Any] = {
            "marker": "s",
            "markersize": 7,
            "markerfacecolor": "white",
            "markeredgewidth": 1.6,
        }
        axes.plot(*final, color=DARK, linestyle="", label="at the end", **style)
        x, y = [*x, final[0]], [*y, final[1]]
    shown = []
    for key, name, dashes in (("gzip_bpb", "gzip", (0, (6, 3))), ("unigram_bpb", "unigram", (0, (1, 2)))):
        level = number(record.summary.get(key))
        if level is not None and level <= 1.25 * max(y):  # farther off, it would flatten the curve
            axes.axhline(level, color=DARK, linewidth=1.1, linestyle=dashes, label=f"{name} {level:.3f}")
            shown.append(name)
    axes.set_ylabel("bits per byte of text")
    axes.margins(y=0.1)
    place: dict[str, Any] = {"xytext": (-2, 9), "textcoords": "offset points", "ha": "right", "fontsize": 9}
    axes.annotate(f"{y[-1]:.3f}", (x[-1], y[-1]), **place)
    beside = f", beside {' and '.join(shown)} on the same text" if shown else ""
    return f"Bits per byte of validation text, lower is better{beside}. Measured."


def _final(record: RunRecord) -> tuple[float, float] | None:
    """(tokens, bits per byte) of the evaluation at the end, on the whole validation split."""
    tokens, bpb = (number(record.summary.get(key)) for key in ("tokens", "val_bpb"))
    return None if tokens is None or bpb is None else (tokens, bpb)


def _throughput(record: RunRecord, axes: Axes) -> str:
    x, y = record.series("tokens_per_second")
    also = _curve(axes, x, y)
    hot = [line for line in record.metrics if line.get("throttled") is True]
    points = [(number(line.get("tokens")), number(line.get("tokens_per_second"))) for line in hot]
    known = [(a, b) for a, b in points if a is not None and b is not None]
    if known:
        axes.plot(
            *zip(*known, strict=True), "x", color=DARK, markersize=7, markeredgewidth=1.6, label="throttled"
        )
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_ylim(0, max(y) * 1.15 or 1)
    crosses = "; crosses where the card throttled" if known else ""
    return f"Training tokens per second{also}{crosses}. Measured."


def _memory(record: RunRecord, axes: Axes) -> str:
    x, y = record.series("memory_gib")
    _line(axes, x, y)
    axes.set_ylabel("memory (GiB)")
    axes.set_ylim(0, max(y) * 1.15 or 1)
    return "Peak memory, of the GPU where the run used one. Measured."


def _learning_rate(record: RunRecord, axes: Axes) -> str:
    x, y = record.series("lr")
    _line(axes, x, y)
    axes.set_ylabel("learning rate")
    axes.set_ylim(0, max(y) * 1.08 or 1)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    return "Learning rate that each step was taken with. Measured."


def smoothed(values: list[float]) -> list[float] | None:
    """Running median over about a fortieth of the run (at least 5 points); None for less than 20 points."""
    if len(values) < 20:
        return None
    half = max(2, len(values) // 80)
    return [float(np.median(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def _focus(axes: Axes, values: list[float]) -> None:
    """Cut the view at the top when the first steps would flatten everything after them."""
    if len(values) < 20:
        return
    low, high = min(values), max(values)
    useful = float(np.quantile(values, 0.98))
    if high - low > 2.5 * (useful - low) > 0:
        axes.set_ylim(low - 0.05 * (useful - low), useful + 0.3 * (useful - low))
