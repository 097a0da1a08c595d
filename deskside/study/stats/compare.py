"""From the numbers of trials to what a study says: estimates, differences to the baseline, interactions, fronts.

- An arm's estimate of a metric is the mean over its finished trials.
- A difference is paired: over the seeds that both the arm and its baseline finished, so what failed in one is left out
  of both. It is taken between logarithms, since what changes a speed or a loss changes it by a factor; a metric that is
  zero somewhere (no quantised parameters) has no relative difference, and is not compared.
- Every interval is Student's at 95 %, for this one number (statistics.py says why).
- A verdict has to stand among all comparisons of that metric in its group: with twenty arms that do nothing, one
  interval in twenty leaves out zero. So the interval says how large the difference is, and Benjamini and Hochberg's
  rule whether it is called one. "higher" and "lower" therefore always have an interval without zero; the reverse does
  not hold. Nothing is adjusted across metrics or groups, which are questions of their own.
- "exact": no seed changes the number in either arm, to the last digit (parameters, often peak memory).
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from deskside.study.results import Arm, Comparison, Estimate, Results
from deskside.study.stats.equal_tokens import with_equal_tokens
from deskside.study.stats.interaction import interactions
from deskside.study.stats.metrics import METRICS
from deskside.study.stats.pairing import by_seed, is_exact, log_ratio, pairs, relative
from deskside.study.stats.pareto import fronts
from deskside.study.stats.statistics import shown, student

TOO_FEW, NO_DIFFERENCE, EXACT = "too few seeds", "no difference shown", "exact"


def compare(results: Results) -> Results:
    """The same study with its estimates, comparisons, interactions and fronts; those that it had are replaced.

    Computed from the trials alone, so it may be called as often as one likes, and while a study runs.
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
        values = list(by_seed(arm, metric.key).values())
        if values:
            mean = student(values)
            # Nothing that is measured can be below zero unless it was seen there.
            low = max(0.0, mean.low) if mean.low is not None and min(values) >= 0 else mean.low
            found[metric.key] = Estimate(mean.mean, low, mean.high, mean.n)
    return found


def _comparison(arm: Arm, baseline: Arm, metric: str) -> tuple[Comparison, float | None] | None:
    """(without a verdict, p), or with its verdict and no p where none has to be judged; None: nothing to compare."""
    ours, theirs = pairs(arm, baseline, metric)
    if not ours or min(*ours, *theirs) <= 0:
        return None
    n = len(ours)
    if is_exact(metric, ours, theirs):
        difference, ratio = ours[0] - theirs[0], ours[0] / theirs[0] - 1
        exactly = Comparison(
            metric, baseline.id, n, difference, difference, difference, ratio, ratio, ratio, "exact", EXACT
        )
        return exactly, None
    units = student([a - b for a, b in zip(ours, theirs, strict=True)])
    logs = log_ratio(ours, theirs)
    drafted = Comparison(
        metric=metric,
        baseline=baseline.id,
        n=n,
        difference=units.mean,
        low=units.low,
        high=units.high,
        relative=relative(logs.mean),
        relative_low=None if logs.low is None else relative(logs.low),
        relative_high=None if logs.high is None else relative(logs.high),
        method="one seed" if n == 1 else "paired t",
        verdict=TOO_FEW,
    )
    return drafted, logs.p


def _verdicts(drafts: Sequence[tuple[Hashable, float, float | None]]) -> list[str]:
    """One for each (family, size, p): judged within its family. Those without p are passed over."""
    families: dict[Hashable, list[int]] = {}
    for place, (family, _, p) in enumerate(drafts):
        if p is not None:
            families.setdefault(family, []).append(place)
    verdicts = [NO_DIFFERENCE] * len(drafts)
    for places in families.values():
        for place, called in zip(places, shown([drafts[i][2] or 0.0 for i in places]), strict=True):
            if called:
                verdicts[place] = "higher" if drafts[place][1] > 0 else "lower"
    return verdicts
