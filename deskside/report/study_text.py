"""Text for the arms, metrics and verdicts of a study, as tables and charts show them.

Full sentences about findings are in `study.narrative`.
"""

from collections.abc import Iterable, Sequence

from deskside.run.record import number
from deskside.study.metrics import Metric
from deskside.study.results import (
    NO_DIFFERENCE,
    TOO_FEW,
    Arm,
    Estimate,
    Results,
    differing_label_parts,
    status_text,
)
from deskside.utils.format import percent, percent_digits, percent_range

NOT_MEASURED = "not measured"
NOT_ENOUGH = "not enough among all comparisons"  # the verdict's reason if an interval excludes zero


def trials_text(arm: Arm) -> str:
    """Return how an arm's trials ended: "3 of 3", "2 of 3; 1 out of memory", "out of memory"."""
    counts: dict[str, int] = {}
    for trial in arm.trials:
        counts[trial.status] = counts.get(trial.status, 0) + 1
    finished = counts.pop("finished", 0)
    if not arm.trials:
        return "not run yet"
    if not finished and len(counts) == 1:
        return status_text(next(iter(counts)))
    rest = ", ".join(f"{count} {status_text(name)}" for name, count in counts.items())
    return f"{finished} of {len(arm.trials)}" + (f"; {rest}" if rest else "")


def reason_missing(arm: Arm) -> str:
    """Return the text to show in place of an arm's missing number: how the arm ended, or that it was not measured."""
    return NOT_MEASURED if arm.status == "finished" else status_text(arm.status)


def estimate_text(metric: Metric, estimate: Estimate | None, with_interval: bool = True) -> str:
    """Return `1.3001 (1.2950 to 1.3052)`, or the mean alone if there is no interval or it is not asked for."""
    if estimate is None or number(estimate.mean) is None:
        return NOT_MEASURED
    mean, low, high = metric.text(estimate.mean), number(estimate.low), number(estimate.high)
    if not with_interval or low is None or high is None or estimate.n < 2:
        return mean
    return f"{mean} ({metric.text(low)} to {metric.text(high)})"


def relative_text(mean: float, low: float | None, high: float | None, verdict: str) -> str:
    """Return `+0.52 % (+0.11 to +0.93 %)`, `no difference shown (-0.10 to +0.30 %)` or `+0.52 %, exactly`.

    `mean`, `low` and `high` are fractions: 0.05 is 5 %. If no difference is shown although the interval excludes zero,
    the text says why: among that many comparisons, some intervals exclude zero by chance (docs/statistics.md).
    """
    # The mean determines the number of decimals, not the ends of the interval, which may be far from it.
    decimals = percent_digits(mean)
    text = percent(mean, decimals, signed=True)
    if verdict == "exact":
        return "the same, exactly" if mean == 0 else f"{text}, exactly"
    if low is None or high is None:
        return f"{text}; {TOO_FEW}" if verdict == TOO_FEW else text
    decimals = min(decimals, 2) if verdict == NO_DIFFERENCE or abs(low) + abs(high) > 0.002 else decimals
    interval = percent_range(low, high, decimals, signed=True)
    if verdict == NO_DIFFERENCE:
        reason = f"; {NOT_ENOUGH}" if low > 0 or high < 0 else ""
        return f"{NO_DIFFERENCE} ({interval}{reason})"
    return f"{text} ({interval})" + (f"; {TOO_FEW}" if verdict == TOO_FEW else "")


def difference_text(arm: Arm, key: str) -> str:
    """Return an arm's difference from its baseline in one metric; "" for a baseline or if nothing was measured."""
    comparison = arm.comparison(key)
    if comparison is None or number(comparison.relative) is None:
        missing = arm.id != arm.baseline and arm.estimate(key) is not None
        return "cannot be compared" if missing else ""
    return relative_text(
        comparison.relative,
        number(comparison.relative_low),
        number(comparison.relative_high),
        comparison.verdict,
    )


def measured_arms(arms: Iterable[Arm], key: str) -> list[Arm]:
    """Return the arms in which a metric was measured."""
    return [arm for arm in arms if arm.estimate(key) is not None]


def seeds_text(arms: Iterable[Arm], key: str) -> str:
    """Return the number of seeds behind a metric of these arms: "3 seeds", "2 to 3 seeds", "1 seed, so no interval"."""
    counts = sorted({estimate.n for arm in arms if (estimate := arm.estimate(key)) is not None})
    if not counts:
        return "no finished trial"
    return "1 seed, so no interval" if counts == [1] else seed_range(counts)


def seed_range(counts: Iterable[int]) -> str:
    """Return `1 seed`, `3 seeds` or `2 to 3 seeds`."""
    distinct = sorted(set(counts))
    if distinct == [1]:
        return "1 seed"
    return f"{distinct[0]} seeds" if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]} seeds"


def by_baseline(arms: Sequence[Arm]) -> list[tuple[str, list[Arm]]]:
    """Group arms by baseline: a list of (baseline id, its arms), in the study's order with the baseline first."""
    members_of: dict[str, list[Arm]] = {}
    for arm in arms:
        members_of.setdefault(arm.baseline, []).append(arm)
    return [(base, sorted(members, key=lambda arm: arm.id != base)) for base, members in members_of.items()]


def short_labels(results: Results, arms: Sequence[Arm]) -> dict[str, str]:
    """Return arm id -> short label: the parts of the arm's label that differ from its baseline's.

    Arms with the same baseline whose short labels would be equal keep their full labels.
    """

    def short(arm: Arm) -> str:
        base = results.arm(arm.baseline)
        if base is None:
            return arm.label
        return "baseline" if arm.id == base.id else ", ".join(differing_label_parts(arm, base)) or arm.label

    names = {arm.id: short(arm) for arm in arms}
    for _, members in by_baseline(arms):
        labels = [names[arm.id] for arm in members]
        names |= {arm.id: arm.label for arm in members if labels.count(names[arm.id]) > 1}
    return names
