"""Text for the arms, metrics and verdicts of a study, as tables and charts show them.

Nothing is computed here except units. Full sentences are in `study.narrative`.
"""

from collections.abc import Iterable, Sequence

from deskside.run.record import number
from deskside.study.results import (
    NO_DIFFERENCE,
    TOO_FEW,
    Arm,
    Estimate,
    Results,
    differing_label_parts,
    status_text,
)
from deskside.study.stats.metrics import Metric
from deskside.utils.format import percent, percent_digits, percent_range

NOT_MEASURED = "not measured"


def trials(arm: Arm) -> str:
    """Return how an arm's trials ended: "3 of 3", "2 of 3; 1 out of memory", "out of memory"."""
    counts: dict[str, int] = {}
    for trial in arm.trials:
        counts[trial.status] = counts.get(trial.status, 0) + 1
    done = counts.pop("finished", 0)
    if not arm.trials:
        return "not run yet"
    if not done and len(counts) == 1:
        return status_text(next(iter(counts)))
    rest = ", ".join(f"{count} {status_text(name)}" for name, count in counts.items())
    return f"{done} of {len(arm.trials)}" + (f"; {rest}" if rest else "")


def reason_missing(arm: Arm) -> str:
    """Return the text in place of a number: how the arm ended."""
    return NOT_MEASURED if arm.status == "finished" else status_text(arm.status)


def estimate(metric: Metric, found: Estimate | None, interval: bool = True) -> str:
    """Return `1.3001 (1.2950 to 1.3052)`, or only the mean if one trial cannot give an interval."""
    if found is None or number(found.mean) is None:
        return NOT_MEASURED
    mean, low, high = metric.text(found.mean), number(found.low), number(found.high)
    if not interval or low is None or high is None or found.n < 2:
        return mean
    return f"{mean} ({metric.text(low)} to {metric.text(high)})"


def relative(middle: float, low: float | None, high: float | None, verdict: str) -> str:
    """Return `+0.52 % (+0.11 to +0.93 %)`, or that no difference is shown, or that it is exact."""
    # The decimals follow the difference itself and not the far end of a wide interval.
    decimals = percent_digits(middle)
    text = percent(middle, decimals, signed=True)
    if verdict == "exact":
        return "the same, exactly" if middle == 0 else f"{text}, exactly"
    if low is None or high is None:
        return f"{text}; {TOO_FEW}" if verdict == TOO_FEW else text
    decimals = min(decimals, 2) if verdict == NO_DIFFERENCE or abs(low) + abs(high) > 0.002 else decimals
    ends = percent_range(low, high, decimals, signed=True)
    if verdict == NO_DIFFERENCE:
        return f"{NO_DIFFERENCE} ({ends})"
    return f"{text} ({ends})" + (f"; {TOO_FEW}" if verdict == TOO_FEW else "")


def difference(arm: Arm, key: str) -> str:
    """Return an arm's difference from its baseline in one metric; empty for a baseline or a missing number."""
    found = arm.comparison(key)
    if found is None or number(found.relative) is None:
        missing = arm.id != arm.baseline and arm.estimate(key) is not None
        return "cannot be compared" if missing else ""
    return relative(found.relative, number(found.relative_low), number(found.relative_high), found.verdict)


def measured_arms(arms: Iterable[Arm], key: str) -> list[Arm]:
    """Return the arms that have a metric."""
    return [arm for arm in arms if arm.estimate(key) is not None]


def seeds(arms: Iterable[Arm], key: str) -> str:
    """Return the seeds behind a metric of these arms: "3 seeds", "2 to 3 seeds", "1 seed, so no interval"."""
    counts = sorted({found.n for arm in arms if (found := arm.estimate(key)) is not None})
    if not counts:
        return "no finished trial"
    return "1 seed, so no interval" if counts == [1] else seed_range(counts)


def seed_range(counts: Iterable[int]) -> str:
    """Return `1 seed`, `3 seeds` or `2 to 3 seeds`."""
    known = sorted(set(counts))
    if known == [1]:
        return "1 seed"
    return f"{known[0]} seeds" if len(known) == 1 else f"{known[0]} to {known[-1]} seeds"


def by_baseline(arms: Sequence[Arm]) -> list[tuple[str, list[Arm]]]:
    """Return (baseline id, the baseline and the arms compared with it) in the study's order."""
    order: dict[str, list[Arm]] = {}
    for arm in arms:
        order.setdefault(arm.baseline, []).append(arm)
    return [(base, sorted(members, key=lambda arm: arm.id != base)) for base, members in order.items()]


def short_labels(results: Results, arms: Sequence[Arm]) -> dict[str, str]:
    """Return id -> the parts of an arm's label that its baseline does not share.

    Two arms of one baseline that would get the same short label keep their full labels.
    """

    def short(arm: Arm) -> str:
        base = results.arm(arm.baseline)
        if base is None:
            return arm.label
        return "baseline" if arm.id == base.id else ", ".join(differing_label_parts(arm, base)) or arm.label

    names = {arm.id: short(arm) for arm in arms}
    for _, members in by_baseline(arms):
        taken = [names[arm.id] for arm in members]
        names |= {arm.id: arm.label for arm in members if taken.count(names[arm.id]) > 1}
    return names
