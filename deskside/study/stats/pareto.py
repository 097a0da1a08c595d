"""Pareto fronts of a study's arms, and the arms whose exclusion from a front is uncertain.

By the means of its metrics, an arm dominates another if it is as good in every metric and better in at least one. An
arm is on the front if no other arm dominates it. Means are noisy, so an arm off the front is `unclear` unless another
arm dominates it by the 95 % intervals of their paired differences as well. With one seed there are no intervals, so
every arm off the front is unclear. If two arms differ in a metric only by noise, the interval usually includes zero
with any number of seeds, and then neither dominates the other by intervals.
"""

from collections.abc import Sequence

from deskside.study.metrics import BY_KEY
from deskside.study.results import Arm, Front, Results
from deskside.study.stats.statistics import is_exact, log_ratio, paired_values

# Speed, memory and loss together; then without memory, and without speed.
AXES = (
    ("tokens_per_second", "peak_memory_gib", "val_bpb"),
    ("tokens_per_second", "val_bpb"),
    ("peak_memory_gib", "val_bpb"),
)


def fronts(results: Results) -> list[Front]:
    """Return the fronts of every group. A front considers the arms that have estimates of all its metrics."""
    result = []
    for group in results.groups:
        for axes in AXES:
            arms = [arm for arm in results.arms_in(group) if all(key in arm.estimates for key in axes)]
            if arms:
                front = [arm for arm in arms if not any(_dominates(other, arm, axes) for other in arms)]
                unclear = [
                    arm.id
                    for arm in arms
                    if arm not in front and not any(_surely_dominates(other, arm, axes) for other in arms)
                ]
                result.append(Front(group.name, list(axes), [arm.id for arm in front], unclear))
    return result


def _dominates(arm: Arm, other: Arm, axes: Sequence[str]) -> bool:
    """Return True if `arm` dominates `other` by the means."""
    gains = [_sign(key) * (arm.estimates[key].mean - other.estimates[key].mean) for key in axes]
    return all(gain >= 0 for gain in gains) and any(gain > 0 for gain in gains)


def _surely_dominates(arm: Arm, other: Arm, axes: Sequence[str]) -> bool:
    """Return True if `arm` dominates `other` by the intervals."""
    if arm is other:
        return False
    gains = [_least_gain(arm, other, key) for key in axes]
    return all(gain is not None and gain >= 0 for gain in gains) and any(gain for gain in gains)


def _least_gain(arm: Arm, other: Arm, metric: str) -> float | None:
    """Return the lower bound of the log-ratio by which `arm` is better than `other`, or None if it is unknown."""
    ours, theirs = paired_values(arm, other, metric)
    if not ours or min(*ours, *theirs) <= 0:
        return None
    ratio = log_ratio(ours, theirs)
    low, high = ratio.low, ratio.high
    if is_exact(metric, ours, theirs):
        low = high = ratio.mean
    if low is None or high is None:
        return None
    return low if _sign(metric) > 0 else -high


def _sign(metric: str) -> int:
    return 1 if BY_KEY[metric].better == "higher" else -1
