"""Verdicts on claims: what an interval, a value or a model decides about what was claimed.

The measured change is the mean log-ratio over the seeds that both arms finished, with Student's interval of 95 %, as in
every comparison of a study (pairs.py). A claim of "-30 %, tolerance 0.5" accepts half to one and a half of its effect
on that scale; a claim of "no change" accepts its tolerance on both sides. With the interval in hand:

    holds               the interval leaves out zero, and meets what the claim accepts; without a claimed size, it
                        leaves out zero on the claimed side; for "no change", it lies within the tolerance
    holds in direction  it leaves out zero on the claimed side, and misses the claimed size
    contradicted        it leaves out zero on the other side, or holds zero and leaves out all that the claim accepts,
                        or ends before a twentieth of the claimed effect; for "no change", it lies beyond the tolerance
    not shown           it holds both zero and what the claim accepts (for "no change", it reaches over the tolerance),
                        there are too few seeds to give one, no pair of trials was finished, two peaks of memory are
                        of different micro-batches, or the decision does not stand among all measured claims (below)
    needs other hardware  the claim needs what this machine lacks (a claim about memory: a GPU), or it is about speed
                        and an arm was emulated here
    not measured        its arms are in none of the studies, or nothing here can speak to it

"Not shown" is not "contradicted": an interval that holds the claimed effect and none at all speaks for neither.

Many claims are judged at once, so a decision must also stand among all measured claims by the rule of Benjamini and
Hochberg (statistics.py): of those that are decided, one in twenty is expected to be decided wrongly. Each claim brings
the p-value of the hypothesis that its decision rejects: no effect, or the nearest effect that the claim accepts.

Memory and loss of emulated arms are judged: the numbers are the format's own, and what emulation allocates beyond
native products is below 1 % of a step's peak (budget/memory.py).

A claim that compares nothing (450 W) is answered by arithmetic.py. Arithmetic, data sheets and published prices decide
it: it holds where the answer's range meets it, and is contradicted where it does not. A model decides nothing, because
its range is wide and meets nearly anything: such a claim is "consistent with the model" or "not consistent with the
model", whatever the model says of it.
"""

import math
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtr, stdtrit

from deskside.facts.claims import Claim
from deskside.study.claims.answers import Answer
from deskside.study.stats.statistics import CONFIDENCE

Verdict = Literal[
    "holds",
    "holds in direction",
    "not shown",
    "contradicted",
    "consistent with the model",
    "not consistent with the model",
    "needs other hardware",
    "not measured",
]
LEAST_SHARE = 0.05  # of a claimed effect, in logarithms: -0.3 % of memory for a claimed -60 % is no agreement


@dataclass(frozen=True)
class Change:
    """A measured or computed change, in logarithms. low, high: None where there are too few seeds."""

    log: float
    low: float | None
    high: float | None
    n: int


def verdict_of_change(claim: Claim, change: Change) -> Verdict:
    """The verdict on a claimed change by the rules at the head of this file."""
    if change.low is None or change.high is None:
        return "not shown"
    if claim.direction == "none":
        low, high = accepted(claim)
        if low <= change.low and change.high <= high:
            return "holds"
        return "contradicted" if change.high < low or change.low > high else "not shown"
    if change.low <= 0 <= change.high:
        return "not shown" if claim.size is None or meets(claim, change) else "contradicted"
    if (change.low > 0) != (claim.direction == "higher"):
        return "contradicted"
    if meets(claim, change):
        return "holds"
    assert claim.size is not None  # a direction alone is met by now
    least = LEAST_SHARE * min(abs(math.log1p(end)) for end in claim.size)
    return "holds in direction" if max(abs(change.low), abs(change.high)) >= least else "contradicted"


def verdict_of_value(claim: Claim, found: Answer) -> Verdict:
    """The verdict on a claimed value: whether the answer's range meets it."""
    assert claim.value is not None  # it is what such a claim has
    low, high = claim.value[0] * (1 - claim.tolerance), claim.value[1] * (1 + claim.tolerance)
    if found.source == "modelled":
        reaches = claim.direction == "at least" or found.low <= high
        return by_model(reaches and (claim.direction == "at most" or found.high >= low))
    if claim.direction == "at most":
        met, sure = found.low <= high, found.value <= high
    elif claim.direction == "at least":
        met, sure = found.high >= low, found.value >= low
    else:
        met = sure = found.low <= high and found.high >= low
    return ("holds" if sure else "not shown") if met else "contradicted"


def accepted(claim: Claim) -> tuple[float, float]:
    """The log-ratios that a claim of a change accepts."""
    if claim.direction == "none":
        return math.log1p(-claim.tolerance), math.log1p(claim.tolerance)
    if claim.size is None:
        return (0.0, math.inf) if claim.direction == "higher" else (-math.inf, 0.0)
    near, far = sorted((math.log1p(end) for end in claim.size), key=abs)
    less, more = near * max(0.0, 1 - claim.tolerance), far * (1 + claim.tolerance)
    return min(less, more), max(less, more)


def meets(claim: Claim, change: Change) -> bool:
    """Return whether the interval overlaps what the claim accepts."""
    low, high = accepted(claim)
    assert change.low is not None and change.high is not None  # the caller has seen to it
    return change.low <= high and change.high >= low


def by_model(met: bool) -> Verdict:
    """Return the verdict on a claim that only a model answers."""
    return "consistent with the model" if met else "not consistent with the model"


def decision_p(claim: Claim, change: Change) -> float | None:
    """The two-sided p-value of the hypothesis that the verdict on a change rejects; None without an interval.

    That is no effect where the interval leaves out zero, and otherwise the nearest effect that the claim accepts. A
    claim of no change rejects both ends of its tolerance, or the end that it lies beyond.
    """
    if change.low is None or change.high is None or change.n == 0:
        return None
    low, high = accepted(claim)
    if claim.direction == "none":
        if low < change.log < high:
            return max(_p_against(change, low), _p_against(change, high))
        return _p_against(change, low if change.log <= low else high)
    none = _p_against(change, 0.0)
    if not change.low <= 0 <= change.high or claim.size is None or meets(claim, change):
        return none
    return _p_against(change, low if change.log < low else high)


def _p_against(change: Change, effect: float) -> float:
    assert change.low is not None and change.high is not None  # the caller has seen to it
    half = (change.high - change.low) / 2
    if half == 0:
        return 1.0 if change.log == effect else 0.0
    error = half / float(stdtrit(change.n - 1, (1 + CONFIDENCE) / 2))
    return 2 * float(stdtr(change.n - 1, -abs(change.log - effect) / error))
