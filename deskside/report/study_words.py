"""Arms, numbers and verdicts of a study as a table or a plot writes them. Nothing is computed here but units.

How sentences say the same stands in study/phrases.py, and what both need only there.
"""

from collections.abc import Iterable

from deskside.report.document import clean
from deskside.run.record import number
from deskside.study.narrative import phrases
from deskside.study.results import Arm, Comparison, Estimate, Group, Results
from deskside.study.stats.metrics import BY_KEY, Metric
from deskside.utils.format import percent, percent_digits, percent_range

QUALITY, SPEED, MEMORY, ENERGY = "val_bpb", "tokens_per_second", "peak_memory_gib", "joules_per_token"
PRIMARY = (QUALITY, SPEED, MEMORY)
NOT_MEASURED = "not measured"
NO_DIFFERENCE, TOO_FEW = "no difference shown", "too few seeds"
STATUSES = {"oom": "out of memory", "pending": "not run yet", "running": "still running"}


def status(name: str) -> str:
    """A trial's status as a person says it."""
    return STATUSES.get(name, name)


def state(arm: Arm) -> str:
    """How an arm's trials ended: "3 of 3", "2 of 3; 1 out of memory", "out of memory"."""
    counts: dict[str, int] = {}
    for trial in arm.trials:
        counts[trial.status] = counts.get(trial.status, 0) + 1
    done = counts.pop("finished", 0)
    if not arm.trials:
        return "not run yet"
    if not done and len(counts) == 1:
        return status(next(iter(counts)))
    rest = ", ".join(f"{count} {status(name)}" for name, count in counts.items())
    return f"{done} of {len(arm.trials)}" + (f"; {rest}" if rest else "")


def value(metric: Metric, stored: float) -> str:
    """A stored number as it is shown, without its unit."""
    return f"{stored * metric.scale:,.{metric.digits}f}"


def unit(metric: Metric) -> str:
    """The heading of a column: the metric and its unit."""
    return f"{metric.label}, {metric.unit}" if metric.unit else metric.label


def estimate(metric: Metric, found: Estimate | None, interval: bool = True) -> str:
    """1.3001 (1.2950 to 1.3052); without an interval where one trial cannot give any."""
    if found is None or number(found.mean) is None:
        return NOT_MEASURED
    mean, low, high = value(metric, found.mean), number(found.low), number(found.high)
    if not interval or low is None or high is None or found.n < 2:
        return mean
    return f"{mean} ({value(metric, low)} to {value(metric, high)})"


def relative(middle: float, low: float | None, high: float | None, verdict: str) -> str:
    """+0.52 % (+0.11 to +0.93 %), or in words what could not be shown, or that it is exact."""
    # The middle says how many decimals mean anything, not the far end of a wide interval.
    decimals = percent_digits(middle)
    told = percent(middle, decimals, signed=True)
    if verdict == "exact":
        return "the same, exactly" if middle == 0 else f"{told}, exactly"
    if low is None or high is None:
        return f"{told}; {TOO_FEW}" if verdict == TOO_FEW else told
    decimals = min(decimals, 2) if verdict == NO_DIFFERENCE or abs(low) + abs(high) > 0.002 else decimals
    ends = percent_range(low, high, decimals, signed=True)
    if verdict == NO_DIFFERENCE:
        return f"{NO_DIFFERENCE} ({ends})"
    return f"{told} ({ends})" + (f"; {TOO_FEW}" if verdict == TOO_FEW else "")


def difference(arm: Arm, key: str) -> str:
    """An arm against its baseline in one metric, in words; empty for a baseline, and where the arm has no number."""
    found = comparison(arm, key)
    if found is None or number(found.relative) is None:
        missing = arm.id != arm.baseline and known(arm, key) is not None
        return "cannot be compared" if missing else ""
    return relative(found.relative, number(found.relative_low), number(found.relative_high), found.verdict)


def comparison(arm: Arm, key: str) -> Comparison | None:
    """An arm's comparison in one metric; None where there is none, or it is its own baseline."""
    return next((c for c in arm.comparisons if c.metric == key and c.baseline != arm.id), None)


def known(arm: Arm, key: str) -> Estimate | None:
    """An arm's estimate of one metric; None where it was not measured, or is no finite number."""
    found = arm.estimates.get(key)
    return found if found is not None and number(found.mean) is not None else None


def measured(arms: Iterable[Arm], key: str) -> list[Arm]:
    """The arms that have this metric."""
    return [arm for arm in arms if known(arm, key) is not None]


def seeds(arms: Iterable[Arm], key: str) -> str:
    """How many seeds stand behind a metric of these arms: "3 seeds", "2 to 3 seeds", "1 seed, so no interval"."""
    counts = sorted({found.n for arm in arms if (found := known(arm, key)) is not None})
    if not counts:
        return "no finished trial"
    if counts == [1]:
        return "1 seed, so no interval"
    plain = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{plain} seeds"


def arms_of(results: Results, group: Group) -> list[Arm]:
    """The arms of a group, in the study's order."""
    return [arm for arm in results.arms if arm.group == group.name]


def strata(arms: list[Arm]) -> list[tuple[str, list[Arm]]]:
    """(id of a baseline, it and the arms that are compared with it), in the study's order; the baseline is first."""
    order: dict[str, list[Arm]] = {}
    for arm in arms:
        order.setdefault(arm.baseline, []).append(arm)
    return [
        (base, [arm for arm in members if arm.id == base] + [arm for arm in members if arm.id != base])
        for base, members in order.items()
    ]


def short(arm: Arm, base: Arm | None) -> str:
    """What tells an arm from its baseline, in the words of its label; the baseline is called so."""
    if base is None:
        return arm.label
    if arm.id == base.id:
        return "baseline"
    return ", ".join(phrases.own_parts(arm, base)) or arm.label


def short_labels(results: Results, arms: list[Arm]) -> dict[str, str]:
    """id -> a short name; the whole label where two arms of one baseline would be called the same."""
    names = {arm.id: short(arm, results.arm(arm.baseline)) for arm in arms}
    for _, members in strata(arms):
        taken = [names[arm.id] for arm in members]
        names |= {arm.id: arm.label for arm in members if taken.count(names[arm.id]) > 1}
    return names


def group_title(group: Group) -> str:
    """A group's title, or its name where it has none."""
    return clean(group.title or group.name)


def metric(key: str) -> Metric:
    """A metric of the list; one that this version does not know is shown as it is stored."""
    return BY_KEY.get(key) or Metric(key, key.replace("_", " "), "", None, 4)


def several(count: int, noun: str) -> str:
    """1 trial, 2 trials."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
