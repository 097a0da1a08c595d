"""Claims about a run, checked against the data sheet, against arithmetic and against the plan.

`deskside plan --gpu rtx5090 --preset moe.toml --claim-step-seconds 1 --claim-memory-gib 28` prints a verdict
on each claim, with the arithmetic: holds, unlikely (outside the planner's range), wrong (contradicts the data sheet),
impossible (faster than the card's peak in any number format, or in less memory than with all memory-saving options), or
contradiction (two claims exclude each other).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from deskside.facts.gpus import Gpu
from deskside.plan.combinations import minimum_over_changes
from deskside.plan.estimate import StepEstimate
from deskside.plan.request import PlanRequest
from deskside.utils.errors import UsageError
from deskside.utils.format import duration, flops, gib, number, span

ClaimVerdict = Literal["holds", "unlikely", "wrong", "impossible", "contradiction"]
Interval = tuple[float, float]
SHEET_TOLERANCE = 0.03  # relative difference from the data sheet that is still right
CONTRADICTION = 1.5  # two claims may differ by this factor


@dataclass(frozen=True)
class Claims:
    """Claims as (low, high), equal for a single number.

    step_seconds: seconds of an optimizer step; memory_gib: peak memory of training; vram_gib, watts: memory and power
    limit of the card; steps, hours: training takes this many steps in this many hours.
    """

    step_seconds: Interval | None = None
    memory_gib: Interval | None = None
    vram_gib: Interval | None = None
    watts: Interval | None = None
    tokens_per_second: Interval | None = None
    steps: Interval | None = None
    hours: Interval | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))

    @property
    def of_card_alone(self) -> bool:
        """True if no claim needs a model."""
        of_card = {"vram_gib", "watts"}
        return all(getattr(self, field.name) is None for field in fields(self) if field.name not in of_card)


@dataclass(frozen=True)
class ClaimFinding:
    """A claim, its verdict and the reason. source: the source of the number that the claim was compared with."""

    claim: str
    verdict: ClaimVerdict
    why: str
    source: str


def parse_claims(given: dict[str, str | None]) -> Claims:
    """Parse claims written as `28`, or `50-100` for a range. Raises UsageError."""
    values: dict[str, Interval | None] = {}
    for name, text in given.items():
        if text is None:
            continue
        flag = f"--claim-{name.replace('_', '-')}"
        parts = re.fullmatch(r"\s*([\d.,_e+]+)(?:\s*-\s*([\d.,_e+]+))?\s*", text)
        try:
            if parts is None:
                raise ValueError
            low = float(parts[1].replace(",", ""))
            high = float(parts[2].replace(",", "")) if parts[2] else low
        except ValueError:
            raise UsageError(f"{flag}: '{text}' is not a number or range; write it as 28 or 50-100") from None
        if not 0 < low <= high < 1e30:
            raise UsageError(
                f"{flag}: {text} is not possible; give a positive number, or a range from low to high"
            )
        values[name] = (low, high)
    if ("steps" in values) != ("hours" in values):
        raise UsageError(
            "--claim-steps and --claim-hours belong together; give both: so many steps in so many hours"
        )
    return Claims(**values)


def check_claims(request: PlanRequest, claims: Claims, requested: StepEstimate | None) -> list[ClaimFinding]:
    """Return the findings. requested: the run that the claims are about; None: check only claims about the card.

    Raises UsageError for claims about a card that is not in the table.
    """
    findings = []
    if request.card.gpu is not None:
        findings = check_card_claims(request.card.gpu, claims)
    elif claims.vram_gib is not None or claims.watts is not None:
        raise UsageError(
            f"{request.card.name} is not in the table of GPUs, so claims about it cannot be checked"
        )
    if requested is not None:
        findings += _memory(request, claims, requested)
        findings += _speed(request, claims, requested)
        findings += _length(request, claims, requested)
    return findings


def check_card_claims(gpu: Gpu, claims: Claims) -> list[ClaimFinding]:
    """Compare claims about the card itself with its data sheet."""
    findings = []
    limited = "; a lower power limit can be set, but reduces the speed"
    for claimed, name, sheet, unit, more in (
        (claims.vram_gib, "memory", gpu.memory_bytes / 2**30, "GiB", ""),
        (claims.watts, "power", gpu.watts, "W", limited),
    ):
        if claimed is not None:
            low, high = sheet * (1 - SHEET_TOLERANCE), sheet * (1 + SHEET_TOLERANCE)
            right = claimed[1] >= low and claimed[0] <= high
            why = f"the data sheet says {number(sheet)} {unit}{'' if right else more}"
            claim = f"{name} of the {gpu.name}: {span(claimed)} {unit}"
            findings.append(
                ClaimFinding(claim, "holds" if right else "wrong", why, f"published: {gpu.source}")
            )
    return findings


def _memory(request: PlanRequest, claims: Claims, requested: StepEstimate) -> Iterator[ClaimFinding]:
    if claims.memory_gib is None:
        return
    low, expected, high = requested.memory_bytes
    top = sorted(requested.memory.items.items(), key=lambda item: -item[1])[:4]
    items = " + ".join(f"{name} {gib(size)}" for name, size in top)
    claimed = claims.memory_gib[1] * 2**30
    least = minimum_over_changes(request, requested.setting, same_task=True)
    text = f"this run needs {gib(expected)} ({gib(low)} to {gib(high)}): {items}, and smaller items"
    verdict: ClaimVerdict = "holds"
    if claimed < low:
        verdict = "impossible" if claimed < least.memory_bytes[0] else "unlikely"
        text += (
            ". With all memory-saving options together, at this sequence length, it "
            f"{'still needs' if verdict == 'impossible' else 'needs'} {gib(least.memory_bytes[1])}"
        )
    elif claims.memory_gib[0] * 2**30 > high:
        verdict = "unlikely"
    yield ClaimFinding(f"memory: {span(claims.memory_gib)} GiB", verdict, text, _source(request))


def _speed(request: PlanRequest, claims: Claims, requested: StepEstimate) -> Iterator[ClaimFinding]:
    tokens = requested.setting.tokens_per_step
    slow, expected, fast = requested.tokens_per_second
    if claims.step_seconds is not None:
        low, high = claims.step_seconds
        verdict, why = _against_card(request, requested, tokens / high, tokens / low)
        yield ClaimFinding(
            f"{span(claims.step_seconds)} s per step of {tokens:,.0f} tokens",
            verdict,
            f"that is {tokens / high:,.0f} tokens/s; {why}. Modelled: {duration(tokens / expected)} per step "
            f"({duration(tokens / fast)} to {duration(tokens / slow)})",
            _source(request),
        )
    if claims.tokens_per_second is not None:
        verdict, why = _against_card(request, requested, *claims.tokens_per_second)
        yield ClaimFinding(
            f"{span(claims.tokens_per_second)} tokens/s",
            verdict,
            f"{why}. Modelled: {expected:,.0f} tokens/s ({slow:,.0f} to {fast:,.0f})",
            _source(request),
        )


def _length(request: PlanRequest, claims: Claims, requested: StepEstimate) -> Iterator[ClaimFinding]:
    if claims.steps is None or claims.hours is None:
        return
    tokens = requested.setting.tokens_per_step
    low = claims.steps[0] * tokens / (claims.hours[1] * 3600)
    high = claims.steps[1] * tokens / (claims.hours[0] * 3600)
    verdict, why = _against_card(request, requested, low, high)
    claim = f"{span(claims.steps)} steps in {span(claims.hours)} hours"
    yield ClaimFinding(
        claim,
        verdict,
        f"{number(claims.steps[0])} x {tokens:,.0f} tokens in {number(claims.hours[1])} h are {low:,.0f} tokens/s; "
        f"{why}. Modelled: {duration(claims.steps[0] * tokens / requested.tokens_per_second[1])}",
        _source(request),
    )
    rate = claims.tokens_per_second
    if rate is not None and not (low / CONTRADICTION <= rate[1] and rate[0] <= high * CONTRADICTION):
        needed = claims.steps[0] * tokens / rate[1]
        yield ClaimFinding(
            f"{span(rate)} tokens/s and {claim}",
            "contradiction",
            f"at {number(rate[1])} tokens/s, {number(claims.steps[0])} steps of {tokens:,.0f} tokens take "
            f"{duration(needed)}; in {span(claims.hours)} hours it must be {low:,.0f} tokens/s, "
            f"{number(low / rate[1])} times as many",
            "arithmetic",
        )


def _against_card(
    request: PlanRequest, requested: StepEstimate, low: float, high: float
) -> tuple[ClaimVerdict, str]:
    """Return the verdict on `low` to `high` tokens per second, and the arithmetic."""
    per_token = requested.setting.flops_per_token
    needed, gpu, gpus = low * per_token, request.card.gpu, request.gpus
    text = f"at {flops(per_token)} per token that is {flops(needed)}/s"
    if gpu is not None:
        formats = (("BF16", gpu.bf16_flops), ("FP8", gpu.fp8_flops), ("FP4", gpu.fp4_flops))
        peaks = {name: peak * gpus for name, peak in formats if peak is not None}
        rates = " and ".join(f"{flops(peak)}/s in {name}" for name, peak in peaks.items())
        text += f"; {'the card has' if gpus == 1 else f'{gpus} cards have'} {rates}"
        best = max(peaks.values())
        if needed > best:
            return "impossible", f"{text}: {number(needed / best)} times the maximum in any format"
    slow, _, fast = requested.tokens_per_second
    if low > fast:
        return "unlikely", f"{text}, but training is modelled to be slower"
    if high < slow:
        return "unlikely", f"{text}, but training is modelled to be {number(slow / high)} times as fast"
    return "holds", text


def _source(request: PlanRequest) -> str:
    return f"modelled, rates {request.calibration.source}"
