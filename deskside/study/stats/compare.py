"""Statistical comparison of a study's arms: estimates, differences to the baseline, interactions, Pareto fronts.

- The estimate of a metric is the mean over the arm's finished trials.
- A difference is paired: it uses the seeds that both the arm and its baseline finished. Relative differences and
  verdicts are computed from logarithms, because a change multiplies speed and loss by a factor. A metric that is zero
  in a trial, such as the number of quantized parameters, is not compared.
- Every interval is a Student's 95 % interval (statistics.py gives the reason).
- Verdicts are corrected for multiple comparisons: even without any effect, about one interval in twenty excludes
  zero. The interval gives the size of the difference, and the Benjamini-Hochberg rule over all comparisons of that
  metric in the group decides whether it is significant. So "higher" and "lower" imply an interval without zero, but not
  the reverse. There is no correction across metrics or groups, which are separate questions.
- "exact": the seed does not change the number in either arm (parameters, often peak memory).
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from deskside.study.metrics import METRICS
from deskside.study.results import EXACT, NO_DIFFERENCE, TOO_FEW, Arm, Comparison, Estimate, Results, Verdict
from deskside.study.stats.equal_tokens import with_equal_tokens
from deskside.study.stats.interaction import interactions
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
    """Return the study with estimates, comparisons, interactions and fronts recomputed from its trials.

    The study may still be running.
    """
    arms = [replace(arm, estimates=_estimates(arm)) for arm in with_equal_tokens(results.arms)]
    by_id = {arm.id: arm for arm in arms}
    drafts: list[tuple[Arm, Comparison, float | None]] = []
    for arm in arms:
        baseline = by_id.get(arm.baseline, arm)
        if baseline is arm:
            continue
        for metric in METRICS:
            draft = _comparison(arm, baseline, metric.key)
            if draft is not None:
                drafts.append((arm, *draft))
    verdicts = _verdicts([((arm.group, c.metric), c.relative, p) for arm, c, p in drafts])
    comparisons: dict[str, list[Comparison]] = {arm.id: [] for arm in arms}
    for (arm, comparison, p), verdict in zip(drafts, verdicts, strict=True):
        comparisons[arm.id].append(comparison if p is None else replace(comparison, verdict=verdict))
    compared = replace(results, arms=[replace(arm, comparisons=comparisons[arm.id]) for arm in arms])
    all_interactions = interactions(compared)
    verdicts = _verdicts([((i.group, i.metric), i.effect, p) for i, p in all_interactions])
    return replace(
        compared,
        interactions=[
            i if p is None else replace(i, verdict=verdict)
            for (i, p), verdict in zip(all_interactions, verdicts, strict=True)
        ],
        fronts=fronts(compared),
    )


def _estimates(arm: Arm) -> dict[str, Estimate]:
    """Return the estimate of every metric that was measured, by its key."""
    estimates = {}
    for metric in METRICS:
        values = list(values_by_seed(arm, metric.key).values())
        if values:
            mean = mean_interval(values)
            # All metrics are non-negative, so the interval is clipped at zero, unless a value below zero was measured.
            low = max(0.0, mean.low) if mean.low is not None and min(values) >= 0 else mean.low
            estimates[metric.key] = Estimate(mean.mean, low, mean.high, mean.n)
    return estimates


def _comparison(arm: Arm, baseline: Arm, metric: str) -> tuple[Comparison, float | None] | None:
    """Return (comparison, p-value), or None if there is nothing to compare.

    If there is a p-value, the verdict is preliminary: `_verdicts` decides it together with the other comparisons of
    its family. If the p-value is None, the verdict is final.
    """
    ours, theirs = paired_values(arm, baseline, metric)
    if not ours or min(*ours, *theirs) <= 0:
        return None
    n = len(ours)
    if is_exact(metric, ours, theirs):
        difference, ratio = ours[0] - theirs[0], ours[0] / theirs[0] - 1
        exact = Comparison(
            metric, baseline.id, n, difference, difference, difference, ratio, ratio, ratio, "exact", EXACT
        )
        return exact, None
    differences = mean_interval([a - b for a, b in zip(ours, theirs, strict=True)])
    logs = log_ratio(ours, theirs)
    draft = Comparison(
        metric=metric,
        baseline=baseline.id,
        n=n,
        difference=differences.mean,
        low=differences.low,
        high=differences.high,
        relative=relative_difference(logs.mean),
        relative_low=None if logs.low is None else relative_difference(logs.low),
        relative_high=None if logs.high is None else relative_difference(logs.high),
        method="one seed" if n == 1 else "paired t",
        verdict=TOO_FEW,
    )
    return draft, logs.p


def _verdicts(effects: Sequence[tuple[Hashable, float, float | None]]) -> list[Verdict]:
    """Return the verdict of each (family, effect, p), corrected for multiple comparisons within its family.

    The verdict of an entry without p is meaningless, because it is decided already.
    """
    families: dict[Hashable, list[tuple[int, float]]] = {}
    for index, (family, _, p) in enumerate(effects):
        if p is not None:
            families.setdefault(family, []).append((index, p))
    verdicts: list[Verdict] = [NO_DIFFERENCE] * len(effects)
    for members in families.values():
        decisions = significant([p for _, p in members])
        for (index, _), is_significant in zip(members, decisions, strict=True):
            if is_significant:
                verdicts[index] = "higher" if effects[index][1] > 0 else "lower"
    return verdicts
