"""Three bands chosen from the candidates (safe, target, stretch), and the recommended one.

- target: the lowest expected loss at the expected speed, among what fits even at the high end of its memory.
- safe: the best smaller model if the speed is at the low end of its range. It learns more per hour at first and is
  cheaper to use afterwards. Safe refers to time: it may need more memory than the target, because free memory is used
  for larger passes.
- stretch: the best larger model if the speed is at the high end. Its memory only needs to fit as expected.

With a number of tokens instead of a time, a larger model always learns more from them, so the target is the largest one
for which that many tokens are still compute-optimal. With a loss to reach, the target reaches it first; safe reaches it
even at the high end of the expected loss, stretch only at the low end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deskside.budget.loss import LAW
from deskside.plan.candidates import AT_MOST, Candidate, bpb, optimal_tokens, search
from deskside.plan.request import PlanRequest
from deskside.utils.format import count, duration

Name = Literal["safe", "target", "stretch"]
WHY_TARGET = "the lowest expected loss in this budget, at the expected speed"
WHY_TARGET_OF_TOKENS = (
    "the largest model for which this many tokens are still compute-optimal, or the largest that fits"
)
SMALLER, LARGER = 0.8, 1.2  # parameters of safe and stretch against the target's, at most and at least

LOSS_BANDS: tuple[tuple[Name, int, str], ...] = (
    ("safe", 2, "the fastest way to reach the loss even at the high end of its range"),
    ("target", 1, "the fastest way to reach the loss as expected"),
    ("stretch", 0, "the fastest way if the loss turns out at the low end of its range"),
)


@dataclass(frozen=True)
class Band:
    """A candidate with its name and the reason for it."""

    name: Name
    candidate: Candidate
    why: str


def choose(request: PlanRequest) -> list[Band]:
    """Return the bands of the open search, safe first, without those that have no candidate."""
    if request.budget.kind == "loss":
        return _to_loss(request)
    found = search(request)
    sure = [c for c in found if c.estimate.fits == "fits"] or found
    if not sure:
        return []
    by_time = request.budget.kind != "tokens"
    best = sure
    if not by_time:
        tokens = request.budget.value
        best = [c for c in sure if optimal_tokens(LAW, c.weights) <= tokens] or sure[:1]
    target = min(best, key=lambda c: (c.loss[1], c.weights))
    bands = [Band("target", target, WHY_TARGET if by_time else WHY_TARGET_OF_TOKENS)]
    smaller = [c for c in sure if c.weights <= SMALLER * target.weights]
    larger = [c for c in found if LARGER * target.weights <= c.weights <= AT_MOST * target.weights]
    if smaller:
        safe = min(smaller, key=lambda c: (_loss_at(request, c, 0), -c.weights))
        bands.insert(0, Band("safe", safe, _why_safe(safe, target)))
    if larger:
        stretch = larger[0]
        if by_time:
            stretch = min(larger, key=lambda c: (_loss_at(request, c, 2), c.weights))
        bands.append(Band("stretch", stretch, _why_stretch(stretch, target)))
    return bands


def recommended(bands: Sequence[Band]) -> Band | None:
    """Return the target, unless only a smaller model is certain to fit."""
    by_name = {band.name: band for band in bands}
    target, safe = by_name.get("target"), by_name.get("safe")
    if target is not None and safe is not None and target.candidate.estimate.fits != "fits":
        return safe if safe.candidate.estimate.fits == "fits" else target
    return target or safe or by_name.get("stretch")


def reason(request: PlanRequest, bands: Sequence[Band], chosen: Band) -> str:
    """Return why this band is recommended."""
    by_name = {band.name: band for band in bands}
    best, kind = chosen.candidate, request.budget.kind
    if kind == "loss":
        text = f"{chosen.name} is recommended: {best.shape.preset} gets there in {duration(best.seconds[1])}"
        if chosen.name == "target" and "safe" in by_name:
            text += f"; to be sure of it takes {duration(by_name['safe'].candidate.seconds[1])} (safe)"
        return text
    if chosen.name != "target":
        return f"{chosen.name} is recommended: the target's memory fits only if it turns out as expected"
    if kind == "tokens":
        return f"target is recommended: {best.shape.preset} is {chosen.why}"
    text = (
        f"target is recommended: {best.loss[1]:.3f} bits per byte is the lowest that is expected in this budget, "
        f"of what surely fits"
    )
    if "stretch" in by_name:
        other = by_name["stretch"].candidate
        text += (
            f"; stretch ({count(other.params)}) is expected at {other.loss[1]:.3f}, "
            f"with {other.tokens[1] / other.params:.1f} tokens per parameter"
        )
    if "safe" in by_name:
        text += f"; safe costs {by_name['safe'].candidate.loss[1] - best.loss[1]:+.3f}"
        _, memory, reason = by_name["safe"].why.partition("; it needs more memory")
        text += f" (safe is about time{memory}{reason})".replace("time; it", "time: it") if memory else ""
    return text


def _loss_at(request: PlanRequest, found: Candidate, end: int) -> float:
    """Return the expected loss at one end of the range of the speed."""
    return bpb(request, found.setting, found.tokens[end])[1]


def _to_loss(request: PlanRequest) -> list[Band]:
    """Return the fastest way to a loss at the high end of its range (safe), as expected, and at the low end."""
    bands = []
    for name, end, words in LOSS_BANDS:
        found = search(request, end)
        sure = [c for c in found if c.estimate.fits == "fits"] or found
        if sure:
            best = min(sure, key=lambda c: (c.seconds[1], c.weights))
            bands.append(Band(name, best, words))
    return bands


def _why_safe(safe: Candidate, target: Candidate) -> str:
    faster = safe.estimate.tokens_per_second[1] / target.estimate.tokens_per_second[1]
    own, other, more = safe.setting, target.setting, ""
    if safe.estimate.memory_bytes[1] > target.estimate.memory_bytes[1]:
        more = "; it needs more memory, because it recomputes less: what is free is used for speed"
        if own.micro_tokens > other.micro_tokens:
            more = (
                f"; it needs more memory, because it puts {own.micro_tokens:,} tokens through a pass where the target "
                f"puts {other.micro_tokens:,}"
            )
    return (
        f"{safe.weights / target.weights:.0%} of the target's size and {faster:.1f} times its speed: the best smaller "
        f"model if the speed turns out at the low end{more}"
    )


def _why_stretch(stretch: Candidate, target: Candidate) -> str:
    tight = "; its memory fits only as expected" if stretch.estimate.fits != "fits" else ""
    return (
        f"{stretch.weights / target.weights:.1f} times the target's size: the best larger model if the speed turns "
        f"out at the high end{tight}"
    )
