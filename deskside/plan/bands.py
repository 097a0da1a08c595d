"""The choice of three candidates (safe, target, stretch), called bands, and of the recommended one.

- target: the lowest expected loss at the expected speed, among the candidates that fit even at the high end of their
  memory range.
- safe: the best smaller model if the speed is at the low end of its range. It learns faster at first and is
  cheaper to use afterwards. "Safe" refers to time: it may need more memory than the target, because it uses free memory
  for larger passes.
- stretch: the best larger model if the speed is at the high end. Its memory only needs to fit as expected.

With a budget of tokens, a larger model always has a lower loss, so the target is the largest model for which that many
tokens are still compute-optimal. With a loss to reach, the target is the model that is expected to reach it first; safe
reaches it even at the high end of the range of the loss, stretch only at the low end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deskside.budget.loss import LAW
from deskside.plan.candidates import MAX_SIZE_RATIO, Candidate, search
from deskside.plan.expected_loss import bpb, optimal_tokens
from deskside.plan.request import PlanRequest
from deskside.utils.format import count, duration

BandName = Literal["safe", "target", "stretch"]
WHY_TARGET = "the lowest expected loss in this budget, at the expected speed"
WHY_TARGET_OF_TOKENS = (
    "the largest model for which this many tokens are still compute-optimal, or the largest that fits"
)
MORE_MEMORY = "it needs more memory"
SMALLER, LARGER = 0.8, 1.2  # safe has at most, stretch at least this multiple of the target's weights

# (band, end of the range of the loss, reason)
LOSS_BANDS: tuple[tuple[BandName, int, str], ...] = (
    ("safe", 2, "the fastest way to reach the loss even at the high end of its range"),
    ("target", 1, "the fastest way to reach the loss as expected"),
    ("stretch", 0, "the fastest way if the loss turns out at the low end of its range"),
)


@dataclass(frozen=True)
class Band:
    """A candidate with its name and the reason for it."""

    name: BandName
    candidate: Candidate
    why: str


def choose_bands(request: PlanRequest) -> list[Band]:
    """Return the bands of the open search, safe first. A band without a candidate is left out."""
    if request.budget.kind == "loss":
        return _bands_to_loss(request)
    candidates = search(request)
    fitting = [c for c in candidates if c.estimate.fits == "fits"] or candidates
    if not fitting:
        return []
    of_tokens = request.budget.kind == "tokens"
    eligible = fitting
    if of_tokens:
        tokens = request.budget.value
        eligible = [c for c in fitting if optimal_tokens(LAW, c.weights) <= tokens] or fitting[:1]
    target = min(eligible, key=lambda c: (c.loss[1], c.weights))
    bands = [Band("target", target, WHY_TARGET_OF_TOKENS if of_tokens else WHY_TARGET)]
    smaller = [c for c in fitting if c.weights <= SMALLER * target.weights]
    larger = [
        c for c in candidates if LARGER * target.weights <= c.weights <= MAX_SIZE_RATIO * target.weights
    ]
    if smaller:
        safe = min(smaller, key=lambda c: (_loss_at(request, c, 0), -c.weights))
        bands.insert(0, Band("safe", safe, _why_safe(request, safe, target)))
    if larger:
        stretch = larger[0]
        if not of_tokens:
            stretch = min(larger, key=lambda c: (_loss_at(request, c, 2), c.weights))
        bands.append(Band("stretch", stretch, _why_stretch(request, stretch, target)))
    return bands


def recommended(bands: Sequence[Band]) -> Band | None:
    """Return the target, unless only the safe band fits at the high end of its memory range; stretch if it is alone."""
    by_name = {band.name: band for band in bands}
    target, safe = by_name.get("target"), by_name.get("safe")
    if target is not None and safe is not None and target.candidate.estimate.fits != "fits":
        return safe if safe.candidate.estimate.fits == "fits" else target
    return target or safe or by_name.get("stretch")


def reason(request: PlanRequest, bands: Sequence[Band], chosen: Band) -> str:
    """Return the reason for recommending this band, as one line."""
    by_name = {band.name: band for band in bands}
    best, kind = chosen.candidate, request.budget.kind
    if kind == "loss":
        text = f"{chosen.name} is recommended: {best.shape.preset} gets there in {duration(best.seconds[1])}"
        if chosen.name == "target" and "safe" in by_name:
            text += f"; to be sure of it takes {duration(by_name['safe'].candidate.seconds[1])} (safe)"
        return text
    if kind == "tokens":
        return f"target is recommended: {best.shape.preset} is {chosen.why}"
    fit = "even at the high end of their memory range" if best.estimate.fits == "fits" else "as expected"
    text = (
        f"target is recommended: {best.forecast[1]:.3f} bits per byte is the lowest expected loss in this budget among "
        f"the models that fit {fit}"
    )
    if "stretch" in by_name:
        other = by_name["stretch"].candidate
        text += (
            f"; stretch ({count(other.params)}) is expected at {other.forecast[1]:.3f}, "
            f"with {other.tokens[1] / other.params:.1f} tokens per parameter"
        )
    if "safe" in by_name:
        text += f"; safe costs {by_name['safe'].candidate.forecast[1] - best.forecast[1]:+.3f}"
        _, _, cause = by_name["safe"].why.partition(MORE_MEMORY)
        text += f" (safe refers to time: {MORE_MEMORY}{cause})" if cause else ""
    return text


def _loss_at(request: PlanRequest, candidate: Candidate, end: int) -> float:
    """Return the expected loss if the speed is at one end of its range: 0 low, 1 expected, 2 high."""
    return bpb(request, candidate.setting, candidate.tokens[end])[1]


def _bands_to_loss(request: PlanRequest) -> list[Band]:
    """Return the bands for a budget of loss: for each end of its range, the candidate that reaches it first."""
    bands = []
    for name, end, why in LOSS_BANDS:
        candidates = search(request, end)
        fitting = [c for c in candidates if c.estimate.fits == "fits"] or candidates
        if fitting:
            fastest = min(fitting, key=lambda c: (c.seconds[1], c.weights))
            bands.append(Band(name, fastest, why))
    return bands


def _why_safe(request: PlanRequest, safe: Candidate, target: Candidate) -> str:
    faster = safe.estimate.tokens_per_second[1] / target.estimate.tokens_per_second[1]
    more = ""
    if safe.estimate.memory_bytes[1] > target.estimate.memory_bytes[1]:
        more = f"; {MORE_MEMORY}, because it recomputes less: free memory is used for speed"
        passes = safe.setting.micro_tokens, target.setting.micro_tokens
        if passes[0] > passes[1]:
            more = (
                f"; {MORE_MEMORY}, because it has {passes[0]:,} tokens per pass and the target {passes[1]:,}"
            )
    condition = " if the speed turns out at the low end" if request.budget.kind == "hours" else ""
    return (
        f"{safe.weights / target.weights:.0%} of the target's size and {faster:.1f} times its speed: the best smaller "
        f"model{condition}{more}"
    )


def _why_stretch(request: PlanRequest, stretch: Candidate, target: Candidate) -> str:
    tight = "; its memory only fits as expected" if stretch.estimate.fits != "fits" else ""
    model = {
        "hours": "the best larger model if the speed turns out at the high end",
        "tokens": "the next larger model",
    }.get(str(request.budget.kind), "the best larger model")
    return f"{stretch.weights / target.weights:.1f} times the target's size: {model}{tight}"
