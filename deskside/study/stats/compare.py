"""Statistical comparison of a study's arms: estimates, differences to the baseline, interactions, Pareto fronts.

- The estimate of a metric is the mean over the arm's finished trials.
- A difference is paired: it uses the seeds that both the arm and its baseline finished. It is a difference of
  logarithms, because changes act on speed and loss as factors. A metric that is zero in some trial (no quantized
  parameters) is not compared.
- Every interval is Student's 95 % interval of that one number (statistics.py gives the reason).
- Verdicts are corrected for multiple comparisons: among twenty arms without any effect, one interval in twenty excludes
  zero. The interval gives the size of the difference, and the Benjamini-Hochberg rule over all comparisons of that
  metric in the group decides whether it is significant. So "higher" and "lower" imply an interval without zero, but not
  the reverse. There is no correction across metrics or groups, which are separate questions.
- "exact": the seed does not change the number in either arm (parameters, often peak memory).
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from deskside.study.results import EXACT, NO_DIFFERENCE, TOO_FEW, Arm, Comparison, Estimate, Results
from deskside.study.stats.equal_tokens import with_equal_tokens
from deskside.study.stats.interaction import interactions
from deskside.study.stats.metrics import METRICS
from deskside.study.stats.pareto import fronts
from deskside.study.stats.statistics import (
    is_exact,
    log_ratio,
    mean_interval,
    paired_values,
    relative_difference,
    significant,
    values_by_seed,
)


def compare(results: Results) -> Results:
    """Return the study with estimates, comparisons, interactions and fronts computed anew from its trials.

    It may be called at any time, also while the study runs.
    """
    arms = [replace(arm, estimates=_estimates(arm)) for arm in with_equal_tokens(results.arms)]
    by_id = {arm.id: arm for arm in arms}
    found: list[tuple[Arm, Comparison, float | None]] = []
    for arm in arms:
        baseline = by_id.get(arm.baseline, arm)
        for metric in METRICS if baseline is not arm else ():
            if (drafted := _comparison(arm, baseline, metric.key)) is not None:
                found.append((arm, *drafted))
    verdicts = _verdicts([((arm.group, c.metric), c.relative, p) for arm, c, p in found])
    told: dict[str, list[Comparison]] = {arm.id: [] for arm in arms}
    for (arm, comparison, p), verdict in zip(found, verdicts, strict=True):
        told[arm.id].append(comparison if p is None else replace(comparison, verdict=verdict))
    compared = replace(results, arms=[replace(arm, comparisons=told[arm.id]) for arm in arms])
    crossed = interactions(compared)
    verdicts = _verdicts([((i.group, i.metric), i.effect, p) for i, p in crossed])
    return replace(
        compared,
        interactions=[
            i if p is None else replace(i, verdict=verdict)
            for (i, p), verdict in zip(crossed, verdicts, strict=True)
        ],
        fronts=fronts(compared),
    )


def _estimates(arm: Arm) -> dict[str, Estimate]:
    found = {}
    for metric in METRICS:
        values = list(values_by_seed(arm, metric.key).values())
        if values:
            mean = mean_interval(values)
            # All metrics are non-negative, so the interval is clipped at zero, unless a value below zero was measured.
            low = max(0.0, mean.low) if mean.low is not None and min(values) >= 0 else mean.low
            found[metric.key] = Estimate(mean.mean, low, mean.high, mean.n)
    return found


def _comparison(arm: Arm, baseline: Arm, metric: str) -> tuple[Comparison, float | None] | None:
    """Return a comparison with its p-value, or None if there is nothing to compare.

    A comparison with a p-value gets its verdict later, among all of its family; one without has its final verdict.
    """
    ours, theirs = paired_values(arm, baseline, metric)
    if not ours or min(*ours, *theirs) <= 0:
        return None
    n = len(ours)
    if is_exact(metric, ours, theirs):
        difference, ratio = ours[0] - theirs[0], ours[0] / theirs[0] - 1
        exactly = Comparison(
            metric, baseline.id, n, difference, difference, difference, ratio, ratio, ratio, "exact", EXACT
        )
        return exactly, None
    units = mean_interval([a - b for a, b in zip(ours, theirs, strict=True)])
    logs = log_ratio(ours, theirs)
    drafted = Comparison(
        metric=metric,
        baseline=baseline.id,
        n=n,
        difference=units.mean,
        low=units.low,
        high=units.high,
        relative=relative_difference(logs.mean),
        relative_low=None if logs.low is None else relative_difference(logs.low),
        relative_high=None if logs.high is None else relative_difference(logs.high),
        method="one seed" if n == 1 else "paired t",
        verdict=TOO_FEW,
    )
    return drafted, logs.p


def _verdicts(drafts: Sequence[tuple[Hashable, float, float | None]]) -> list[str]:
    """Return the verdict of each (family, effect, p), corrected within its family. Entries without p are skipped."""
    families: dict[Hashable, list[int]] = {}
    for place, (family, _, p) in enumerate(drafts):
        if p is not None:
            families.setdefault(family, []).append(place)
    verdicts = [NO_DIFFERENCE] * len(drafts)
    for places in families.values():
        for place, called in zip(places, significant([drafts[i][2] or 0.0 for i in places]), strict=True):
            if called:
                verdicts[place] = "higher" if drafts[place][1] > 0 else "lower"
    return verdicts
