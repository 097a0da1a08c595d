"""From a request to a plan: the open search, or the verdict on a given model, then costs and claims."""

from deskside.plan import bands as choice
from deskside.plan.alternatives import offers, told_of_precision
from deskside.plan.bands import Band
from deskside.plan.candidates import LONGEST_SECONDS, TOO_LONG, fits_at_all, pretrain_seconds, setup_seconds
from deskside.plan.claims import Claims, check
from deskside.plan.costs import cost
from deskside.plan.estimate import Estimate
from deskside.plan.published import unknown
from deskside.plan.request import Request
from deskside.plan.result import Plan, PlannedBand, executable
from deskside.plan.verdict import Answer, judge
from deskside.utils.format import count, duration, number

NO_CLAIMS = Claims()
# Text that is read up to four times is worth almost as much as new text (Muennighoff et al. 2023, arXiv 2305.16264).
MOST_READINGS = 4


def make_plan(request: Request, claims: Claims = NO_CLAIMS) -> Plan:
    """The plan for a request from `plan.request.ask`. Raises UsageError when options by hand fit no shape."""
    notes = [*request.notes, *_between_gpus(request)]
    asked: Estimate | None = None
    if request.given is not None:
        verdict = judge(request)
        answer, reasons, asked, remedies = (
            verdict.answer,
            list(verdict.reasons),
            verdict.asked,
            verdict.remedies,
        )
        if request.refused is not None:
            reasons.insert(0, f"planned in BF16: {request.refused}")
            answer = "yes-if" if answer == "yes" else answer
        found = []
        if verdict.chosen is not None:
            found = [Band("target", verdict.chosen, f"the model that was asked about: {request.given.label}")]
        chosen = found[0] if found else None
    else:
        found, remedies = choice.choose(request), ()
        chosen = choice.recommended(found)
        answer, reasons = _open(request, found, chosen)
    if chosen is not None:
        reasons += _repeats(request, chosen)
        notes += _assumed_text(request, chosen)
    shown = chosen.candidate.estimate if chosen else asked
    offered = [] if chosen is None else offers(request, chosen.candidate)
    reasons += [f"{offer['option']} is offered: {offer['told']}" for offer in offered]
    if shown is not None:
        reasons += told_of_precision(request, shown)
        reasons += _host_bound(request, shown)
    reasons += _uncalibrated(request)
    findings = check(request, claims, asked or shown)
    failed = [f for f in findings if f.verdict != "holds"]
    if failed:
        reasons.append(f"{len(failed)} of {len(findings)} claims do not hold")
    planned = tuple(_planned(request, band) for band in found)
    return Plan(
        request=request,
        verdict=answer,
        reasons=tuple(reasons),
        bands=planned,
        recommended=chosen.name if chosen else None,
        asked=asked,
        remedies=remedies,
        findings=tuple(findings),
        alternatives=tuple(offered),
        hours=_hours(request),
        notes=tuple(notes),
    )


def _planned(request: Request, band: Band) -> PlannedBand:
    config, command = executable(request, band.candidate)
    if request.budget is not None and request.budget.kind == "hours":
        seconds = request.budget.value * 3600
        costs = cost(request, (seconds, seconds, seconds), "the whole budget")
    else:
        costs = cost(request, band.candidate.seconds, "the pretraining run")
    return PlannedBand(band.name, band.why, band.candidate, config, command, costs)


def _between_gpus(request: Request) -> list[str]:
    """What the speed of several GPUs rests on."""
    if request.gpus == 1:
        return []
    link = request.calibration.rates.link_bandwidth / 1e9
    gpu = request.card.gpu
    what = "PCIe"
    if gpu is not None:
        what = "NVLink or Infinity Fabric" if gpu.fabric_bandwidth is not None else f"PCIe {gpu.pcie}"
    return [
        f"communication: {number(link)} GB/s of {what}, from the data sheet; no run on several GPUs was measured"
    ]


def _host_bound(request: Request, shown: Estimate) -> list[str]:
    """Say when passes are so small that launching their kernels decides the speed."""
    if not shown.host_bound:
        return []
    source = "timed here by the probe" if request.calibration.host_measured else "not measured here"
    return [
        f"host-bound: passes of {shown.setting.micro_tokens:,} tokens are over before the next kernels are launched; "
        f"the device waits for {shown.step['host'] / shown.step_seconds:.0%} of a step (host {source}, "
        f"+-{shown.speed_spread:.0%}); more tokens per pass are faster"
    ]


def _uncalibrated(request: Request) -> list[str]:
    """Say when nothing that was measured or published tells how this architecture does."""
    gpu = request.card.gpu
    if gpu is None or request.calibration.source == "measured":
        return []
    said = unknown(gpu)
    return [f"{said}: speed within +-{request.calibration.speed_spread:.0%}"] if said else []


def _repeats(request: Request, chosen: Band) -> list[str]:
    """A word when the same text is read more often than helps."""
    if request.unique_tokens is None:
        return []
    times = chosen.candidate.tokens[1] / request.unique_tokens
    if times <= MOST_READINGS:
        return []
    return [
        f"it reads its {count(request.unique_tokens)} tokens of text {number(times)} times; beyond {MOST_READINGS} "
        f"times there is little left to learn: more text would help more than more hours"
    ]


def _assumed_text(request: Request, chosen: Band) -> list[str]:
    """What a plan that does not know how much text there is takes for granted."""
    if request.unique_tokens is not None or not request.pretrains:
        return []
    return [
        f"text: {count(chosen.candidate.tokens[1])} tokens of it are assumed, none read twice; say how many there are "
        f"with --unique-tokens"
    ]


def _open(request: Request, found: list[Band], chosen: Band | None) -> tuple[Answer, list[str]]:
    if chosen is None:
        return "no", [_nothing(request)]
    reasons = [choice.reason(request, found, chosen)]
    if chosen.candidate.seconds[1] > LONGEST_SECONDS:
        return "no", [*reasons, TOO_LONG]
    if chosen.candidate.estimate.fits != "fits":
        reasons.append(
            "its memory fits as expected, but not at the high end of the range: only a trial will tell"
        )
        return "yes-if", reasons
    if request.budget is not None and request.budget.kind == "loss" and chosen.name == "stretch":
        reasons = ["the loss is reached only if it turns out at the low end of its range"]
        return "yes-if", reasons
    return "yes", reasons


def _nothing(request: Request) -> str:
    budget = request.budget
    if not fits_at_all(request):
        return f"not even the smallest model fits on {request.card.name} with rows of {request.sequence:,} tokens"
    if budget is not None and budget.kind == "loss":
        return (
            f"{budget.value:g} bits per byte is out of reach for every model that fits on {request.card.name}; "
            f"the law's floor is {request.law.E + request.law.offset:.3f} for a model of any size"
        )
    seconds = pretrain_seconds(request)
    if seconds is not None and (request.unique_tokens is None or seconds < 2 * setup_seconds(request)):
        return (
            f"nothing can be trained in this time: {duration(seconds)} of pretraining, of which setting up takes "
            f"about {duration(setup_seconds(request))}"
        )
    return "the budget is too small: nothing would be learned from so few tokens"


def _hours(request: Request) -> dict[str, float]:
    """How a budget of hours is split; empty for other budgets."""
    if request.budget is None or request.budget.kind != "hours":
        return {}
    hours, split = request.budget.value, request.split
    return {
        "pretraining": hours * split.pretraining,
        "sft": hours * split.sft,
        "evaluation": hours * split.evaluation,
        "margin": hours * split.margin,
    }
