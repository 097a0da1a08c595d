"""The arms that no other arm beats in everything at once, and those of which the intervals leave that open.

An arm is on the front when there is none that is as good in every metric and better in one, going by the means. Means
have noise: an arm that is not on the front is `unclear` unless another arm is shown to be as good in every metric and
better in one, by the intervals of their paired differences (95 % each; they need not have a common baseline). With one
seed nothing is shown, so everything off the front is unclear. Two arms that are truly equal in one metric stay unclear
however many seeds there are: no interval excludes that one of them is a trace better.
"""

from collections.abc import Sequence

from deskside.study.results import Arm, Front, Results
from deskside.study.stats.metrics import BY_KEY
from deskside.study.stats.pairing import is_exact, log_ratio, pairs

# The front of a study, and what it is when memory, or speed, is no concern.
AXES = (
    ("tokens_per_second", "peak_memory_gib", "val_bpb"),
    ("tokens_per_second", "val_bpb"),
    ("peak_memory_gib", "val_bpb"),
)


def fronts(results: Results) -> list[Front]:
    """The fronts of every group, from the arms' estimates. Only arms that have all of a front's metrics take part."""
    found = []
    for group in results.groups:
        for axes in AXES:
            arms = [
                arm
                for arm in results.arms
                if arm.group == group.name and all(key in arm.estimates for key in axes)
            ]
            if arms:
                on = [arm for arm in arms if not any(_beats(other, arm, axes) for other in arms)]
                unclear = [
                    arm.id
                    for arm in arms
                    if arm not in on and not any(_surely_beats(other, arm, axes) for other in arms)
                ]
                found.append(Front(group.name, list(axes), [arm.id for arm in on], unclear))
    return found


def _beats(arm: Arm, other: Arm, axes: Sequence[str]) -> bool:
    gains = [_sign(key) * (arm.estimates[key].mean - other.estimates[key].mean) for key in axes]
    return all(gain >= 0 for gain in gains) and any(gain > 0 for gain in gains)


def _surely_beats(arm: Arm, other: Arm, axes: Sequence[str]) -> bool:
    if arm is other:
        return False
    least = [_least_gain(arm, other, key) for key in axes]
    return all(gain is not None and gain >= 0 for gain in least) and any(gain for gain in least)


def _least_gain(arm: Arm, other: Arm, metric: str) -> float | None:
    """By how much `arm` is better at the least, as a logarithm; None where that is not known."""
    ours, theirs = pairs(arm, other, metric)
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
