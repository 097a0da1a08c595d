"""The best trial at the edge of a searched range, and the search that goes on from there."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deskside.config.run import RunConfig
from deskside.study.search.search_folder import SearchPlan
from deskside.study.search.space import Dimension, dimension
from deskside.utils.errors import UsageError
from deskside.utils.format import value_text

MARGIN = 0.05  # of a range on its scale: a best value this near to an end is at the edge


@dataclass(frozen=True)
class Edge:
    """A range whose edge the best trial is at. range: as text; end: low or high; further: whether it can be moved."""

    key: str
    value: Any
    range: str
    end: str
    further: bool


@dataclass(frozen=True)
class Edges:
    """The ranges whose edge the best trial is at.

    Attributes:
        over: The `--over` with these ranges moved; "" if there are none that can be.
        command: Of a search with it, without the name of the program; "" likewise.
    """

    edges: tuple[Edge, ...] = ()
    over: str = ""
    command: str = ""

    def text(self) -> str:
        """Return the report's sentences about these edges, or ""."""
        if not self.edges:
            return ""
        found = [
            f"{one.key} {value_text(one.value)} (the {one.end} end of {one.range})" for one in self.edges
        ]
        text = f"The best trial is at the edge of what was searched: {', '.join(found)}; better settings may be beyond."
        fixed = [one.key for one in self.edges if not one.further]
        if fixed:
            text += f" The range of {' and '.join(fixed)} cannot go further."
        return f"{text} To search there: --over {self.over}" if self.over else text


def find_edges(
    plan: SearchPlan, parameters: Mapping[str, Any], settings: Mapping[str, Any], folder: Path
) -> Edges:
    """Return the edges that the best trial is at. settings: its values by key; folder: of the search."""
    config = plan.trial()
    edges, over = list[Edge](), list[str]()
    for one in plan.space:
        end = _end(one, parameters[one.name])
        moved = None if end is None else _moved(one, end == "high", config)
        over.append(_over(one if moved is None else moved, config))
        if end is not None:
            edges.append(Edge(one.key, settings[one.key], one.range_text, end, moved is not None))
    if not any(one.further for one in edges):
        return Edges(tuple(edges))
    option = ",".join(over)
    return Edges(tuple(edges), option, _command(plan, option, folder))


def _end(one: Dimension, parameter: Any) -> str | None:
    """Return the end of its range that a value is at: "low", "high" or None. Choices have no order."""
    if one.kind == "choice" or one.low == one.high:
        return None
    position = one.position(parameter)
    if one.kind == "one minus":
        position = 1 - position
    if position <= MARGIN:
        return "low"
    return "high" if position >= 1 - MARGIN else None


def _moved(one: Dimension, up: bool, config: RunConfig) -> Dimension | None:
    """Return the dimension moved by half of its range, but not past the default; None if it cannot be moved.

    If that is not possible, only the end is moved, to 0 or 1 of what must not be beyond.
    """
    start = 0 if one.kind == "doublings" else one.default
    low, high = one.low, one.high
    if one.kind in ("log", "layers"):
        factor = math.sqrt(high / low) if up else math.sqrt(low / high)
        low, high = low * factor, high * factor
    elif one.kind == "one minus":
        factor = math.sqrt((1 - high) / (1 - low)) if up else math.sqrt((1 - low) / (1 - high))
        low, high = 1 - (1 - low) * factor, 1 - (1 - high) * factor
    else:
        step = (high - low) / 2 if up else (low - high) / 2
        low, high = low + step, high + step
    if one.kind in ("doublings", "layers", "integer"):
        low, high = math.floor(low), math.ceil(high)
    low, high = (min(low, start), high) if up else (low, max(high, start))
    limits = [1.0 if up else 0.0]
    if one.kind == "doublings":
        limits = [-math.floor(math.log2(one.default / config.batch.sequence_length))]
    elif one.kind in ("layers", "integer"):
        limits = [1, 0]
    for low_end, high_end in [(low, high), *((low, end) if up else (end, high) for end in limits)]:
        if (high_end <= one.high) if up else (low_end >= one.low):
            continue
        try:
            return dimension(one.key, _ends(one, low_end, high_end), config)
        except UsageError:
            continue
    return None


def _ends(one: Dimension, low: float, high: float) -> tuple[float, float]:
    """Return the ends as `--over` takes them, rounded outwards to three digits."""
    if one.kind == "doublings":
        return replace(one, low=low, high=high).ends
    if one.kind == "one minus":
        return 1 - _rounded(1 - low, up=True), 1 - _rounded(1 - high, up=False)
    return _rounded(low, up=False), _rounded(high, up=True)


def _rounded(value: float, up: bool) -> float:
    near = float(f"{value:.3g}")
    if math.isclose(near, value, rel_tol=1e-9) or (near > value) == up:
        return near
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return float(f"{near + step if up else near - step:.3g}")


def _over(one: Dimension, config: RunConfig) -> str:
    """Return the part of `--over` for a dimension: its key, with the range if that is not the usual one."""
    try:
        usual = dimension(one.key, None, config)
    except UsageError:
        usual = None
    if one == usual:
        return one.key
    low, high = one.ends
    return f"{one.key}={low:.10g}:{high:.10g}"


def _command(plan: SearchPlan, over: str, folder: Path) -> str:
    """Return the command of this search with another `--over` and directory."""
    words, kept = iter(shlex.split(plan.command)[1:]), list[str]()
    for word in words:
        if word in ("--over", "--out"):
            next(words, None)
        elif not word.startswith(("--over=", "--out=")):
            kept.append(word)
    return shlex.join([*kept, "--out", f"{folder}-further", "--over", over])
