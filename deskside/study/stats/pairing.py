"""Trials as numbers that can be compared: one per seed, and pairs of the same seed."""

import math
from collections.abc import Sequence

from deskside.study.results import Arm
from deskside.study.stats.statistics import LOG_ROUNDING, Interval, student

# What the configuration decides and no seed changes: one trial knows it exactly.
DETERMINISTIC = ("parameters", "parameters_quantized")


def by_seed(arm: Arm, metric: str) -> dict[int, float]:
    """seed -> its finished trial's number, where it was measured and is finite."""
    found = {trial.seed: trial.metrics[metric] for trial in arm.finished() if metric in trial.metrics}
    return {seed: found[seed] for seed in sorted(found) if math.isfinite(found[seed])}


def pairs(arm: Arm, baseline: Arm, metric: str) -> tuple[list[float], list[float]]:
    """The numbers of both arms for the seeds that both have, in the order of the seeds."""
    ours, theirs = by_seed(arm, metric), by_seed(baseline, metric)
    common = [seed for seed in ours if seed in theirs]
    return [ours[seed] for seed in common], [theirs[seed] for seed in common]


def log_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Mean of log(ours / theirs) over the pairs, at least one, with its interval. All are positive."""
    logs = [math.log(a) - math.log(b) for a, b in zip(ours, theirs, strict=True)]
    return student(logs, LOG_ROUNDING)


def relative(log: float) -> float:
    """A log-ratio in parts of what it is compared with: 0.05 is 5 % more. What no float holds is the largest one."""
    return math.expm1(min(log, 709.0))


def is_exact(metric: str, *arms: Sequence[float]) -> bool:
    """Whether no seed changes it: every arm has one number alone, to the last digit, in two seeds or more."""
    if any(len(set(values)) != 1 for values in arms):
        return False
    return metric in DETERMINISTIC or all(len(values) > 1 for values in arms)
