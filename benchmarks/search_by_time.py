"""Compare two searches by time: the best loss so far of each, and when the first reaches the best of the second.

    deskside search 124m --data.path D --hours 0.42 --minutes-per-trial 0.5 --out searches/tpe
    deskside search 124m --data.path D --hours 0.42 --minutes-per-trial 0.5 --sampler random --out searches/random
    python -m benchmarks.search_by_time searches/tpe searches/random

Losses are those of trials that finished, on one seed each. The default and the first random trials are the same in
both. Both searches must have the same hours and trial length.
"""

import argparse
import math
from pathlib import Path

from deskside.study.search.outcome import Outcome, read_outcome
from deskside.study.search.search_folder import SearchFolder

ROWS = 10


def best_at(outcome: Outcome, seconds: float) -> float:
    """Return the lowest loss until a time, infinity before the first trial has finished."""
    return min((loss for elapsed, loss in outcome.best_so_far if elapsed <= seconds), default=math.inf)


def time_to(outcome: Outcome, loss: float) -> float | None:
    """Return the seconds until a search has found this loss or a lower one; None if it has not."""
    return next((elapsed for elapsed, best in outcome.best_so_far if best <= loss), None)


def table(first: Outcome, second: Outcome) -> list[str]:
    """Return the comparison as lines of text."""
    end = max(elapsed for outcome in (first, second) for elapsed, _ in outcome.best_so_far)
    lines = [f"{'seconds':>8} {first.name:>12} {second.name:>12}"]
    for row in range(1, ROWS + 1):
        at = end * row / ROWS
        lines.append(f"{at:8.0f} {best_at(first, at):12.4f} {best_at(second, at):12.4f}")
    goal, needed = second.best_so_far[-1]
    reached = time_to(first, needed)
    took = "never" if reached is None else f"after {reached:.0f} s, {reached / goal:.2f} of its time"
    lines.append(f"best of {second.name}: {needed:.4f} after {goal:.0f} s; {first.name} reached it {took}")
    for outcome in (first, second):
        lines.append(f"{outcome.name}: {outcome.counts()}; {outcome.answer}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    given = parser.parse_args()
    plans = [SearchFolder(path).read() for path in (given.first, given.second)]
    if (plans[0].hours, plans[0].trial_seconds) != (plans[1].hours, plans[1].trial_seconds):
        parser.error("the searches differ in their hours or the length of their trials")
    print("\n".join(table(read_outcome(given.first), read_outcome(given.second))))


if __name__ == "__main__":
    main()
