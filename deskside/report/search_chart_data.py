"""Chart data of a search, without a plotting library: the best so far, and the loss by each searched setting.

The report (matplotlib, `search_report.py`) and the dashboard (plotly, `dashboard/search_charts.py`) draw the same.
"""

from dataclasses import dataclass
from typing import Any

from deskside.report.curve_data import Curve
from deskside.study.search.outcome import Outcome, SearchTrial
from deskside.utils.format import value_text

MAX_TICKS = 5
LOG_RATIO = 5.0  # an axis is logarithmic if the largest value is at least so many times the smallest
X_KEYS = ("trial", "time")
MAX_MINUTES = 180.0  # longer times are in hours
LOSS_TITLE = "bits per byte"
ABOUT_IMPORTANCE = "Shares of the spread of the losses of the better trials (PED-ANOVA, arXiv 2304.10255)."


@dataclass(frozen=True)
class BestSoFar:
    """Finished trials in their order, and the lowest loss until each. Both are (x, bits per byte).

    numbers: of the trials at the points; x_title: what x is, with its unit.
    """

    points: Curve
    best: Curve
    numbers: list[int]
    x_title: str


@dataclass(frozen=True)
class SettingSlice:
    """The losses of the finished trials by one setting.

    Attributes:
        key: Of the setting.
        x: Values of the setting; positions in `choices` if there are any.
        choices: Texts of the values of a setting that is no number, else ().
        numbers: Of the trials.
        log: True if the axis of the setting is logarithmic.
        ticks: Of the axis if the values are few whole numbers, which have nothing between them; else ().
    """

    key: str
    x: list[float]
    losses: list[float]
    numbers: list[int]
    choices: tuple[str, ...] = ()
    log: bool = False
    ticks: tuple[float, ...] = ()


def finished(outcome: Outcome) -> list[SearchTrial]:
    """Return the trials that ran to their end."""
    return [one for one in outcome.trials if one.status == "finished" and one.loss is not None]


def best_so_far(outcome: Outcome, x_key: str) -> BestSoFar:
    """Return the best so far. x_key: "trial", the number of the trial, or "time" until its end (`time_unit`)."""
    ended = [(one, loss) for one in finished(outcome) if (loss := one.loss) is not None]
    unit, unit_seconds = time_unit(outcome)
    if x_key == "trial":
        placed = sorted((float(one.number), one.number, loss) for one, loss in ended)
    else:
        placed = sorted((one.elapsed / unit_seconds, one.number, loss) for one, loss in ended if one.elapsed)
    points = [(x, loss) for x, _, loss in placed]
    best: Curve = []
    for x, loss in points:
        best.append((x, min(loss, best[-1][1]) if best else loss))
    title = "trial" if x_key == "trial" else f"time of the search, {unit}"
    return BestSoFar(points, best, [number for _, number, _ in placed], title)


def time_unit(outcome: Outcome) -> tuple[str, float]:
    """Return the unit for the times of a search's trials, and its seconds: minutes, or hours for a long search."""
    longest = max((one.elapsed or 0.0 for one in outcome.trials), default=0.0)
    return ("min", 60.0) if longest <= 60 * MAX_MINUTES else ("h", 3600.0)


def importances(outcome: Outcome) -> list[tuple[str, float]]:
    """Return (setting, share of the spread of the losses), the largest first; [] with too few trials to say.

    The shares have Optuna's names, such as "log2(batch.tokens / 512)" for the setting batch.tokens.
    """
    keys = {key for one in outcome.trials for key in one.settings}
    shares = []
    for name, share in outcome.importances.items():
        words = name.replace("(", " ").split()
        shares.append((next((word for word in words if word in keys), name), share))
    return sorted(shares, key=lambda one: (-one[1], one[0]))


def slices(outcome: Outcome) -> list[SettingSlice]:
    """Return a slice for each setting, the most important first, then in the order in which they were given."""
    trials = finished(outcome)
    shares = dict(importances(outcome))
    keys = list(dict.fromkeys(key for one in trials for key in one.settings))
    keys.sort(key=lambda key: -shares.get(key, 0.0))
    return [_slice(key, [one for one in trials if key in one.settings]) for key in keys]


def _slice(key: str, trials: list[SearchTrial]) -> SettingSlice:
    values = [one.settings[key] for one in trials]
    losses, numbers = [one.loss or 0.0 for one in trials], [one.number for one in trials]
    if all(_is_number(value) for value in values):
        x = [float(value) for value in values]
        log = min(x) > 0 and max(x) >= LOG_RATIO * min(x)
        few = len(set(x)) <= MAX_TICKS and all(value.is_integer() for value in x)
        return SettingSlice(
            key, x, losses, numbers, log=log, ticks=tuple(sorted(set(x))) if few and not log else ()
        )
    texts = [value_text(value) for value in values]
    choices = tuple(sorted(set(texts)))
    return SettingSlice(key, [float(choices.index(text)) for text in texts], losses, numbers, choices)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
