"""The answer of a group in one metric: the best arm, its difference from the baseline, and whether that is shown."""

from dataclasses import dataclass
from typing import Literal

from deskside.study.metrics import Metric
from deskside.study.narrative.findings import describe, estimate_text, family_size, undecided_arms
from deskside.study.results import EXACT, NO_DIFFERENCE, TOO_FEW, Arm, Comparison, Group, Results, best_first
from deskside.utils.format import plural

# "shown": the best arm is shown to be better. "not shown": the seeds leave it open. "one seed": there is no interval.
# "the same": exactly equal. "alone": there is nothing to compare with.
Outcome = Literal["shown", "not shown", "one seed", "the same", "alone"]


@dataclass(frozen=True)
class Headline:
    """The best arm among the arms that share a baseline, in one metric.

    Attributes:
        best: The arm with the best mean.
        value: Its mean with interval and unit.
        difference: Difference between `best` and the baseline as a clause, with its interval; if the baseline is the
            best, that of the next best arm. "" if nothing can be compared.
        reason: Why the outcome is what it is, as a clause.
        undecided: Other arms that may be as good: the interval of their difference from `best` includes zero.
    """

    baseline: Arm
    best: Arm
    value: str
    difference: str
    outcome: Outcome
    reason: str
    undecided: tuple[Arm, ...]


def headlines(results: Results, group: Group, metric: Metric) -> list[Headline]:
    """Return a headline for each baseline of a group, in the study's order. Arms without the metric are left out."""
    if metric.better is None:
        raise ValueError(f"{metric.key} has no better direction")
    measured = [arm for arm in results.arms_in(group) if arm.estimate(metric.key) is not None]
    found = []
    for baseline_id in dict.fromkeys(arm.baseline for arm in measured):
        family = [arm for arm in measured if arm.baseline == baseline_id]
        found.append(_headline(results, metric, family, results.arm(baseline_id) or family[0]))
    return found


def _headline(results: Results, metric: Metric, family: list[Arm], baseline: Arm) -> Headline:
    ranked = best_first(family, metric)
    best = ranked[0]
    compared = best if best.id != baseline.id else next(iter(ranked[1:]), best)
    comparison = compared.comparison(metric.key)
    value = estimate_text(best, metric, interval=True)
    if comparison is None:
        return Headline(baseline, best, value, "", "alone", "nothing to compare with", ())
    undecided = undecided_arms(best, family, metric.key) if comparison.n > 1 else []
    outcome, reason = _outcome(comparison, compared, results)
    open_arms = [arm for arm in family if (c := arm.comparison(metric.key)) and c.verdict == NO_DIFFERENCE]
    if best.id == baseline.id and outcome == "shown" and open_arms:
        outcome, reason = "not shown", f"{plural(len(open_arms), 'other')} may be as good as the baseline"
    difference = describe(comparison, compared, results)
    if compared is not best:
        difference = f"next best is {compared.label}: {difference}"
    return Headline(baseline, best, value, difference, outcome, reason, tuple(undecided))


def _outcome(comparison: Comparison, arm: Arm, results: Results) -> tuple[Outcome, str]:
    """Return whether a comparison shows a difference, and why."""
    low, high = comparison.relative_low, comparison.relative_high
    if comparison.verdict == EXACT:
        return ("the same" if comparison.relative == 0 else "shown"), "the same in every seed"
    if comparison.verdict == TOO_FEW or low is None or high is None:
        return "one seed", f"{plural(comparison.n, 'seed')}, so no interval"
    count = family_size(comparison, arm, results)
    among = f"among {plural(count, 'comparison')}"
    if comparison.verdict != NO_DIFFERENCE:
        return "shown", "the interval excludes zero" + (f", also {among}" if count > 1 else "")
    if low > 0 or high < 0:
        return "not shown", f"the interval excludes zero, but not by enough {among}"
    return "not shown", "the interval includes zero"
