"""From right and wrong items to an accuracy, how far it can be trusted, and one number for many tasks."""

import math
from collections.abc import Sequence

Z = 1.959963984540054  # 95 %


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share (Wilson 1927, Journal of the American Statistical Association 22).

    It stays inside of 0..1 and has a width also where all items are right or all are wrong.
    """
    share, spread = right / n, Z * Z / n
    middle = (share + spread / 2) / (1 + spread)
    half = Z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    # Exactly 0 and 1 at the ends, which rounding misses.
    return 0.0 if right == 0 else middle - half, 1.0 if right == n else middle + half


def centred(accuracy: float, chance: float) -> float:
    """0 for guessing, 1 for all right, as in the CORE metric (DataComp-LM, Li et al. 2024, arXiv:2406.11794)."""
    return (accuracy - chance) / (1 - chance)


def mean_centred(results: Sequence[tuple[float, int, float]]) -> tuple[float, float, float]:
    """Mean of the centred accuracies of (accuracy, items, chance), and its 95 % interval.

    The interval is that of independent tasks. A task's variance is taken between right and wrong answers with one more
    of each, so that tasks that are all right or all wrong have some.
    """
    total = variance = 0.0
    for accuracy, n, chance in results:
        total += centred(accuracy, chance)
        share = (accuracy * n + 1) / (n + 2)
        variance += share * (1 - share) / n / (1 - chance) ** 2
    mean, half = total / len(results), Z * math.sqrt(variance) / len(results)
    return mean, mean - half, mean + half
