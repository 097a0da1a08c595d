"""Rules that turn a measured interval, a computed value or a model's range into a verdict on a claim.

The measured change is the mean log-ratio over the seeds that both arms finished, with Student's 95 % interval, as in
every comparison of a study. Every claim has an accepted range of log-ratios: for "-30 %, tolerance 0.5" from half to
one and a half of the claimed log-ratio, for "no change" the tolerance on both sides. Verdicts by the interval:

    holds               it excludes zero and overlaps the accepted range; without a claimed size, it excludes zero on
                        the claimed side; for "no change", it lies within the tolerance
    holds in direction  it excludes zero on the claimed side, but does not overlap the accepted range
    contradicted        it excludes zero on the other side; or it includes zero but no part of the accepted range; or
                        all of it is below a twentieth of the claimed effect; for "no change", it lies beyond the
                        tolerance
    not shown           it includes zero and part of the accepted range (for "no change", it crosses the tolerance);
                        or there are too few seeds, no finished pair of trials, or peaks of memory with different
                        micro-batches; or the decision is not significant after the correction below
    needs other hardware  the machine lacks something that the claim needs (for memory: a GPU), or the claim is about
                        speed or power and an arm was emulated
    not measured        no study has both arms, or their trials have not ended, or deskside cannot test the claim

Many claims are judged at once, so the decisions are corrected by the Benjamini-Hochberg rule over all measured claims
(statistics.py): at most one in twenty is expected to be wrong. The p-value of a claim belongs to the hypothesis that
its decision rejects: no effect, or the nearest effect that the claim accepts.

The memory and the loss of emulated arms are judged, because emulation does not change the loss, and it needs only a few
per cent more memory at a step's peak than native products (budget/memory.py).

A claim that compares no arms (450 W) is answered by a formula (formulas.py). If the formula uses arithmetic, data
sheets or published prices, the claim of a value holds if the range of the answer overlaps the claimed range. "At most"
and "at least" hold if the answer itself satisfies them, and are not shown if only part of its range does. The range of
the planner's model is too wide for a decision, so such a claim is "consistent with the model" or "not consistent with
the model".
"""

import math
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

from deskside.facts.claims import Claim
from deskside.plan.estimate import Range
from deskside.study.results import AnswerSource, ClaimVerdict
from deskside.study.stats.statistics import CONFIDENCE

MIN_SHARE = 0.05  # smallest share of a claimed log-ratio that confirms its direction


@dataclass(frozen=True)
class Answer:
    """A computed value with its range, in the claim's unit. A change is relative: -0.3 is 30 % less.

    Attributes:
        source: Basis of the value.
        on: Hardware and setting that the value applies to, as text.
    """

    low: float
    value: float
    high: float
    source: AnswerSource
    on: str

    @classmethod
    def exact(cls, value: float, source: AnswerSource = "arithmetic", on: str = "any card") -> "Answer":
        """Return an answer without a range."""
        return cls(value, value, value, source, on)

    @classmethod
    def modelled(cls, values: Range, scale: float, on: str) -> "Answer":
        """Return the answer for a range of the planner, (low, expected, high), multiplied by `scale`."""
        low, value, high = (scale * v for v in values)
        return cls(low, value, high, "modelled", on)


@dataclass(frozen=True)
class Change:
    """A measured or computed change as a log-ratio, with its interval.

    Attributes:
        low, high: None if there are too few seeds.
        n: Number of seeds; 0 for a computed change.
    """

    log: float
    low: float | None
    high: float | None
    n: int


def verdict_of_change(claim: Claim, change: Change) -> ClaimVerdict:
    """Return the verdict on a claimed change by the rules in the module's docstring, before the correction."""
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
    assert claim.size is not None  # without a size, the change meets the claim on its side of zero
    min_effect = MIN_SHARE * min(abs(math.log1p(end)) for end in claim.size)
    return "holds in direction" if max(abs(change.low), abs(change.high)) >= min_effect else "contradicted"


def verdict_of_value(claim: Claim, answer: Answer) -> ClaimVerdict:
    """Return the verdict on a claimed value, by the range of the answer."""
    assert claim.value is not None  # required for such a claim
    low, high = claim.value[0] * (1 - claim.tolerance), claim.value[1] * (1 + claim.tolerance)
    not_above, not_below = answer.low <= high, answer.high >= low  # for at least one value of the range
    if claim.direction == "at most":
        possible, expected = not_above, answer.value <= high
    elif claim.direction == "at least":
        possible, expected = not_below, answer.value >= low
    else:
        possible = expected = not_above and not_below
    if answer.source == "modelled":
        return verdict_of_model(possible)
    if not possible:
        return "contradicted"
    return "holds" if expected else "not shown"


def accepted(claim: Claim) -> tuple[float, float]:
    """Return the range of log-ratios that the claim accepts."""
    if claim.direction == "none":
        return math.log1p(-claim.tolerance), math.log1p(claim.tolerance)
    if claim.size is None:
        return (0.0, math.inf) if claim.direction == "higher" else (-math.inf, 0.0)
    near, far = sorted((math.log1p(end) for end in claim.size), key=abs)
    less, more = near * max(0.0, 1 - claim.tolerance), far * (1 + claim.tolerance)
    return min(less, more), max(less, more)


def meets(claim: Claim, change: Change) -> bool:
    """Return True if the interval of the change overlaps the range that the claim accepts."""
    low, high = accepted(claim)
    assert change.low is not None and change.high is not None  # checked by the caller
    return change.low <= high and change.high >= low


def verdict_of_model(consistent: bool) -> ClaimVerdict:
    """Return the verdict on a claim that only the planner's model answers."""
    return "consistent with the model" if consistent else "not consistent with the model"


def decision_p(claim: Claim, change: Change) -> float | None:
    """Return the two-sided p-value of the null hypothesis of a measured change; None without an interval or seeds.

    The null hypothesis is no effect, unless the interval includes zero and no part of the accepted range: then it is
    the nearest effect that the claim accepts. For a claim of no change it is the end of the tolerance that the change
    lies beyond, or both ends if the change lies between them.
    """
    if change.low is None or change.high is None or change.n == 0:
        return None
    low, high = accepted(claim)
    if claim.direction == "none":
        if low < change.log < high:
            return max(_p_against(change, low), _p_against(change, high))
        return _p_against(change, low if change.log <= low else high)
    if not change.low <= 0 <= change.high or claim.size is None or meets(claim, change):
        return _p_against(change, 0.0)
    return _p_against(change, low if change.log < low else high)


def _p_against(change: Change, effect: float) -> float:
    """Return the p-value of the hypothesis that the true log-ratio is `effect`, by a t-test."""
    assert change.low is not None and change.high is not None  # checked by the caller
    half_width = (change.high - change.low) / 2
    if half_width == 0:
        return 1.0 if change.log == effect else 0.0
    standard_error = half_width / float(stdtrit(change.n - 1, (1 + CONFIDENCE) / 2))
    return 2 * float(stdtr(change.n - 1, -abs(change.log - effect) / standard_error))
