"""Plots of the parity benchmark, readable in black and white: lines differ in dashes, markers and end labels."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from benchmarks.parity_results import Arm
from deskside.utils.errors import UsageError

WIDTH, HEIGHT, DPI = 8.0, 4.6, 150  # inches, inches, dots per inch
SHADES = ("#000000", "#4a4a4a", "#787878")
DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)))
MARKERS, LABEL_MARKERS = "os^Dv<>PX*", "●■▲◆▼◀▶✚✖★"
TARGETS = (0.3, 1.0)  # largest acceptable gaps of FP8 and of the best NVFP4, in percent
LABEL_GAP = 0.055  # minimum distance between labels, as a share of the height

Line = tuple[str, list[tuple[float, float]]]


def draw(arms: Sequence[Arm], reference: str, folder: Path) -> list[tuple[Path, str]]:
    """Write parity_bpb.png and parity_gap.png and return each with its title. Raises UsageError without curves."""
    curves = [(arm.name, arm.curve) for arm in arms if arm.curve]
    gaps = [(arm.name, arm.gap_curve) for arm in arms if arm.gap_curve and arm.name != reference]
    if not curves:
        raise UsageError("there is nothing to draw: no arm was evaluated")
    folder.mkdir(parents=True, exist_ok=True)
    images = []
    canvas, axes = _axes("Validation bits per byte", "bits per byte of validation text (lower is better)")
    _lines(axes, curves, {name: number for number, (name, _) in enumerate(curves)}, _zoom(curves))
    images.append(
        (_save(canvas, folder / "parity_bpb.png"), "Validation bits per byte against training tokens")
    )
    if gaps:
        title = f"Gap to {reference}"
        canvas, axes = _axes(title, f"validation loss above {reference} with the same seed (%)")
        spread = next((arm.spread for arm in arms if arm.name == reference), None)
        _levels(axes, reference, spread)
        _lines(axes, gaps, {name: number for number, (name, _) in enumerate(curves)}, _bounds(gaps))
        images.append((_save(canvas, folder / "parity_gap.png"), f"{title} against training tokens, percent"))
    return images


def _axes(title: str, label: str) -> tuple[Figure, Axes]:
    canvas = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_title("measured", loc="right", fontsize=9, color="#555555")
    axes.set_xlabel("training tokens")
    axes.set_ylabel(label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return canvas, axes


def _levels(axes: Axes, reference: str, spread: float | None) -> None:
    """Draw zero, the two targets, and the spread of the reference's seeds."""
    axes.axhline(0, color="#000000", linewidth=1.0)
    if spread is not None:
        label = f"seeds of {reference}: {spread:.2f} % apart"
        axes.axhspan(-spread / 2, spread / 2, color="#ececec", zorder=0, label=label)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    for level in TARGETS:
        axes.axhline(level, color="#999999", linewidth=0.9, linestyle=(0, (1, 3)))
        axes.text(0, level, f" target {level} %", fontsize=7, color="#666666", va="bottom")


def _lines(axes: Axes, lines: Sequence[Line], styles: dict[str, int], bounds: tuple[float, float]) -> None:
    """Draw the curves, each with its name at the end. Overlapping names are moved apart."""
    low, high = bounds
    axes.set_ylim(low, high)
    last = max(points[-1][0] for _, points in lines)
    axes.set_xlim(0, last * 1.01)
    for name, points in lines:
        number = styles[name]
        axes.plot(
            *zip(*points, strict=True),
            color=SHADES[number % len(SHADES)],
            linestyle=DASHES[number % len(DASHES)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=4.5,
            linewidth=1.3,
        )
    ends = [(min(max(points[-1][1], low), high), points[-1][0], name) for name, points in lines]
    ends.sort(key=lambda end: end[0])
    heights = apart([(y - low) / (high - low) for y, _, _ in ends], LABEL_GAP)
    for (y, x, name), height in zip(ends, heights, strict=True):
        axes.annotate(
            f"{LABEL_MARKERS[styles[name] % len(MARKERS)]} {name}",
            (x, y),
            xytext=(1.04, height),
            textcoords="axes fraction",
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "#aaaaaa", "linewidth": 0.6, "relpos": (0, 0.5)},
        )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move ascending heights (0 to 1) as little as needed to be `gap` apart. The highest is at most 1 if they fit."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    ceiling = 1.0
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], ceiling)
        ceiling = moved[number] - gap
    return moved


def _zoom(lines: Sequence[Line]) -> tuple[float, float]:
    """Return axis limits that contain all curves after the first sixth of the run, whose steep drop is cut off."""
    last = max(points[-1][0] for _, points in lines)
    late_values = [y for _, points in lines for x, y in points if x >= last / 6]
    values = late_values or [y for _, points in lines for _, y in points]
    return _padded(min(values), max(values))


def _bounds(lines: Sequence[Line]) -> tuple[float, float]:
    """Return axis limits that also contain zero and the targets."""
    low, high = _zoom(lines)
    return min(low, -0.1), max(high, TARGETS[1] + 0.1)


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or 0.01 * abs(high) or 0.01
    return low - margin, high + margin


def _save(canvas: Figure, path: Path) -> Path:
    canvas.savefig(path, format="png", metadata={"Software": None})
    return path
