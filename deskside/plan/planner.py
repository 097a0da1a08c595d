"""From a request to a plan: the open search or the verdict on a given model, then alternatives, costs and claims."""

from dataclasses import replace
from typing import Any

from deskside.budget.format_costs import quantized
from deskside.budget.loss import LAW
from deskside.budget.shape import num_params
from deskside.config import merge
from deskside.plan import bands as choice
from deskside.plan.bands import Band
from deskside.plan.candidates import (
    LONGEST_SECONDS,
    TOO_LONG,
    Candidate,
    fits_at_all,
    pretrain_seconds,
    setup_seconds,
)
from deskside.plan.claim_check import Claims, check
from deskside.plan.costs import cost
from deskside.plan.estimate import StepEstimate, estimate, fitted, in_precision, options
from deskside.plan.published import fp8_gain, unknown
from deskside.plan.request import SPLIT, PlanRequest
from deskside.plan.result import Plan, PlannedBand, executable
from deskside.plan.verdict import Answer, judge
from deskside.utils.errors import UsageError
from deskside.utils.format import count, duration, number

NO_CLAIMS = Claims()
OFFERED = "fp8"
LOSS_SENTENCE = "how close its loss comes to BF16's is in docs/precision.md"
WORTH_OFFERING = 1.02  # times the speed
# Text that is read up to four times teaches almost as much as new text (Muennighoff et al. 2023, arXiv 2305.16264).
MOST_READINGS = 4


def make_plan(request: PlanRequest, claims: Claims = NO_CLAIMS) -> Plan:
    """Return the plan for a request from `plan.request.ask`. Raises UsageError if the overrides exclude every model."""
    notes = [*request.notes, *_between_gpus(request)]
    asked: StepEstimate | None = None
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
    offered = [] if chosen is None else _offers(request, chosen.candidate)
    reasons += [f"{offer['option']} is offered: {offer['told']}" for offer in offered]
    if shown is not None:
        reasons += _precision_notes(request, shown)
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


def _planned(request: PlanRequest, band: Band) -> PlannedBand:
    config, command = executable(request, band.candidate)
    if request.budget.kind == "hours":
        seconds = request.budget.value * 3600
        costs = cost(request, (seconds, seconds, seconds), "the whole budget")
    else:
        costs = cost(request, band.candidate.seconds, "the pretraining run")
    return PlannedBand(band.name, band.why, band.candidate, config, command, costs)


def _offers(request: PlanRequest, chosen: Candidate) -> list[dict[str, Any]]:
    """Return FP8 as an alternative to BF16, if the card has it, the model's sizes divide and it is modelled faster.

    BF16 stays the default: the loss of FP8 is close to BF16's, but not equal, so the user decides.
    """
    setting = chosen.setting
    if setting.precision != "bf16" or OFFERED not in request.card.native:
        return []
    layers = [*chosen.shape.layers, options(setting), {"precision": {"name": OFFERED}}]
    try:
        config = merge.build(layers)
    except UsageError:  # sizes that do not divide, or a sharded run
        return []
    faster = fitted(
        in_precision(setting, config, OFFERED, request.card.native),
        request.calibration,
        request.card.memory_bytes,
    )
    modelled = faster.tokens_per_second[1] / chosen.estimate.tokens_per_second[1]
    seen = request.measured_fp8
    speed, source = (modelled, "modelled") if seen is None else (seen.speed, seen.source)
    if speed < WORTH_OFFERING or faster.fits == "no":
        return []
    published = fp8_gain(request.card.gpu, num_params(setting.model)) if request.card.gpu else None
    beside = "" if published is None else f"; {published.source}: {published.speed:.2f} times"
    return [
        {
            "precision": OFFERED,
            "option": f"--precision {OFFERED}",
            "deskside_can": True,
            "tokens_per_second": chosen.estimate.tokens_per_second[1] * speed,
            "speed": speed,
            "modelled_speed": modelled,
            "source": source,
            "published": None
            if published is None
            else {"speed": published.speed, "source": published.source},
            "told": f"{speed:.2f} times the speed of BF16 ({source}{beside}); {LOSS_SENTENCE}",
        }
    ]


def _precision_notes(request: PlanRequest, shown: StepEstimate) -> list[str]:
    """Return notes on a run below 16 bits: whose loss is shown, and products that are emulated or untested here."""
    setting = shown.setting
    if not quantized(setting.precision):
        return []
    loss = f"the expected loss is BF16's; how close {setting.precision} comes to it is in docs/precision.md"
    if setting.emulated:
        plain = estimate(
            replace(setting, precision="bf16", kept=(0.0, 0.0), fp8_head=False),
            request.calibration,
            request.card.memory_bytes,
        )
        share = shown.tokens_per_second[1] / plain.tokens_per_second[1]
        gpu = request.card.gpu
        never = request.given is not None and request.given.config.precision.native == "never"
        if "nvfp4" in setting.precision and gpu is not None and gpu.fp4_flops and not never:
            return [
                f"{setting.precision} is planned as emulated, at {share:.0%} of BF16's speed (modelled): "
                f"{request.card.name} has FP4 units, but deskside has not run them on one; deskside doctor tells "
                f"whether they work there",
                loss,
            ]
        return [
            f"{setting.precision} is emulated on {request.card.name}: its numbers are true, its products are computed "
            f"in BF16, at {share:.0%} of BF16's speed (modelled); it is for comparing, not for saving time",
            loss,
        ]
    if "nvfp4" in setting.precision:
        return [
            f"{setting.precision}: NVFP4 products are priced by {request.card.name}'s data sheet, and deskside has not "
            f"run them on such a card; deskside doctor tells whether they spec",
            loss,
        ]
    return [loss]


def _between_gpus(request: PlanRequest) -> list[str]:
    """Return a note on the assumed bandwidth between several GPUs."""
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


def _host_bound(request: PlanRequest, shown: StepEstimate) -> list[str]:
    """Return a note if passes are so small that launching their kernels limits the speed."""
    if not shown.host_bound:
        return []
    source = "timed here by the probe" if request.calibration.host_measured else "not measured here"
    return [
        f"host-bound: passes of {shown.setting.micro_tokens:,} tokens are over before the next kernels are launched; "
        f"the device waits for {shown.step['host'] / shown.step_seconds:.0%} of a step (host {source}, "
        f"+-{shown.speed_spread:.0%}); more tokens per pass are faster"
    ]


def _uncalibrated(request: PlanRequest) -> list[str]:
    """Return a note if no measured or published run calibrates this architecture."""
    gpu = request.card.gpu
    if gpu is None or request.calibration.source == "measured":
        return []
    said = unknown(gpu)
    return [f"{said}: speed within +-{request.calibration.speed_spread:.0%}"] if said else []


def _repeats(request: PlanRequest, chosen: Band) -> list[str]:
    """Return a note if the text is repeated more often than helps."""
    if request.unique_tokens is None:
        return []
    times = chosen.candidate.tokens[1] / request.unique_tokens
    if times <= MOST_READINGS:
        return []
    return [
        f"it reads its {count(request.unique_tokens)} tokens of text {number(times)} times; beyond {MOST_READINGS} "
        f"times there is little left to learn: more text would help more than more hours"
    ]


def _assumed_text(request: PlanRequest, chosen: Band) -> list[str]:
    """Return a note on the amount of text that the plan assumes."""
    if request.unique_tokens is not None or not request.pretrains:
        return []
    return [
        f"text: {count(chosen.candidate.tokens[1])} tokens of it are assumed, none read twice; say how many there are "
        f"with --unique-tokens"
    ]


def _open(request: PlanRequest, found: list[Band], chosen: Band | None) -> tuple[Answer, list[str]]:
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
    if request.budget.kind == "loss" and chosen.name == "stretch":
        reasons = ["the loss is reached only if it turns out at the low end of its range"]
        return "yes-if", reasons
    return "yes", reasons


def _nothing(request: PlanRequest) -> str:
    budget = request.budget
    if not fits_at_all(request):
        return f"not even the smallest model fits on {request.card.name} with rows of {request.sequence:,} tokens"
    if budget.kind == "loss":
        return (
            f"{budget.value:g} bits per byte is out of reach for every model that fits on {request.card.name}; "
            f"the law's floor is {LAW.E + LAW.offset:.3f} for a model of any size"
        )
    seconds = pretrain_seconds(request)
    if seconds is not None and (request.unique_tokens is None or seconds < 2 * setup_seconds(request)):
        return (
            f"the time is too short: {duration(seconds)} of pretraining, of which set-up takes "
            f"about {duration(setup_seconds(request))}"
        )
    return "the budget is too small: nothing would be learned from so few tokens"


def _hours(request: PlanRequest) -> dict[str, float]:
    """Return how a budget of hours is split; empty for other budgets."""
    if request.budget.kind != "hours":
        return {}
    return {what: request.budget.value * share for what, share in SPLIT.items()}
