"""Verdicts on claims: what an interval, a value or a model decides about what was claimed.

The measured change is the mean log-ratio over the seeds that both arms finished, with Student's 95 % interval, as in
every comparison of a study. A claim of "-30 %, tolerance 0.5" accepts half to one and a half of its effect on that
scale; a claim of "no change" accepts its tolerance on both sides. Verdicts by the interval:

    holds               it excludes zero and overlaps the accepted range; without a claimed size, it excludes zero on
                        the claimed side; for "no change", it lies within the tolerance
    holds in direction  it excludes zero on the claimed side, but misses the accepted range
    contradicted        it excludes zero on the other side; or includes zero but nothing of the accepted range; or ends
                        before a twentieth of the claimed effect; for "no change", it lies beyond the tolerance
    not shown           it includes zero and part of the accepted range (for "no change", it crosses the tolerance);
                        or there are too few seeds, no finished pair of trials, or peaks of memory with different
                        micro-batches; or the decision does not pass the correction below
    needs other hardware  the machine lacks something that the claim needs (for memory: a GPU), or the claim is about
                        speed and an arm was emulated
    not measured        no study has its arms, or nothing here can test it

"Not shown" differs from "contradicted": an interval with both the claimed effect and zero supports neither.

Many claims are judged at once, so decisions pass the Benjamini-Hochberg rule over all measured claims (statistics.py):
one in twenty is expected to be wrong. The p-value of a claim is that of the hypothesis that its decision rejects: no
effect, or the nearest effect that the claim accepts.

The memory and the loss of emulated arms are judged, because emulation does not change the loss, and allocates less than
1 % of a step's peak beyond native products (budget/memory.py).

A claim that compares no arms (450 W) is answered by a formula (formulas.py). Arithmetic, data sheets and published
prices decide it: it holds if the range of the answer overlaps it. The planner's model decides nothing, because its
range is wide: such a claim is "consistent with the model" or not.
"""

import math
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtr, stdtrit

from deskside.facts.claims import Claim
from deskside.plan.estimate import Range
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
MIN_SHARE = 0.05  # of a claimed effect, as a log-ratio: -0.3 % does not confirm a claimed -60 %


Source = Literal["arithmetic", "data sheet", "modelled", "published prices"]


@dataclass(frozen=True)
class Answer:
    """A computed value with its range, in the claim's unit. A claimed change is relative: -0.3 is 30 % less.

    source: the basis of the value. on: the hardware and setting that it applies to.
    """

    low: float
    value: float
    high: float
    source: Source
    on: str

    @classmethod
    def exact(cls, value: float, source: Source = "arithmetic", on: str = "any card") -> "Answer":
        """Return an answer without a range."""
        return cls(value, value, value, source, on)

    @classmethod
    def modelled(cls, values: Range, scale: float, on: str) -> "Answer":
        """Return `scale` times a range of the planner."""
        low, value, high = (scale * v for v in values)
        return cls(low, value, high, "modelled", on)


@dataclass(frozen=True)
class Change:
    """A measured or computed change, as a log-ratio. low and high are None if there are too few seeds."""

    log: float
    low: float | None
    high: float | None
    n: int


def verdict_of_change(claim: Claim, change: Change) -> Verdict:
    """Return the verdict on a claimed change, by the rules above."""
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
    assert claim.size is not None  # a claim of a direction alone has been decided
    least = MIN_SHARE * min(abs(math.log1p(end)) for end in claim.size)
    return "holds in direction" if max(abs(change.low), abs(change.high)) >= least else "contradicted"


def verdict_of_value(claim: Claim, found: Answer) -> Verdict:
    """Return the verdict on a claimed value: whether the range of the answer overlaps it."""
    assert claim.value is not None  # required for such a claim
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
    """Return the range of log-ratios that a claim of a change accepts."""
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
    assert change.low is not None and change.high is not None  # checked by the caller
    return change.low <= high and change.high >= low


def by_model(met: bool) -> Verdict:
    """Return the verdict on a claim that only a model can answer."""
    return "consistent with the model" if met else "not consistent with the model"


def decision_p(claim: Claim, change: Change) -> float | None:
    """Return the two-sided p-value of the null hypothesis that the verdict rejects; None without an interval.

    The null hypothesis is no effect if the interval excludes zero, and otherwise the nearest effect that the claim
    accepts. For a claim of no change it is both ends of the tolerance, or the end that the change lies beyond.
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
    assert change.low is not None and change.high is not None  # checked by the caller
    half = (change.high - change.low) / 2
    if half == 0:
        return 1.0 if change.log == effect else 0.0
    error = half / float(stdtrit(change.n - 1, (1 + CONFIDENCE) / 2))
    return 2 * float(stdtr(change.n - 1, -abs(change.log - effect) / error))
