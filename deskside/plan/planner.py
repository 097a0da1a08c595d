"""From a request to a plan: the open search or the verdict on a given model, then alternatives, costs and claims."""

import math
from dataclasses import asdict, replace
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
    TOO_SMALL,
    Candidate,
    fits_at_all,
    pretrain_seconds,
    setup_seconds,
    too_short,
)
from deskside.plan.claim_check import Claims, check
from deskside.plan.costs import cost
from deskside.plan.estimate import StepEstimate, estimate, fitted, in_precision, options
from deskside.plan.published import fp8_gain, unknown
from deskside.plan.remedies import Remedy
from deskside.plan.request import SPLIT, PlanRequest
from deskside.plan.result import Plan, PlannedBand, executable
from deskside.plan.verdict import Answer, judge
from deskside.utils.errors import UsageError
from deskside.utils.format import count, number

NO_CLAIMS = Claims()
OFFERED = "fp8"
LOSS_SENTENCE = "how close its loss comes to BF16's is in docs/precision.md"
WORTH_OFFERING = 1.02  # times the speed
# Text that is read up to four times teaches almost as much as new text (Muennighoff et al. 2023, arXiv 2305.16264).
MOST_READINGS = 4


def make_plan(request: PlanRequest, claims: Claims = NO_CLAIMS) -> Plan:
    """Return the plan for a request from `plan.request.ask`. Raises UsageError if the overrides exclude every model."""
    asked: StepEstimate | None = None
    remedies: tuple[Remedy, ...] = ()
    if request.given is not None:
        verdict = judge(request)
        answer, reasons, asked, remedies = verdict.answer, verdict.reasons, verdict.asked, verdict.remedies
        if request.refused is not None:
            reasons = [f"planned in BF16: {request.refused}", *reasons]
            answer = "yes-if" if answer == "yes" else answer
        why = f"the model that was asked about: {request.given.label}"
        found = [] if verdict.chosen is None else [Band("target", verdict.chosen, why)]
        chosen = found[0] if found else None
    else:
        found = choice.choose(request)
        chosen = choice.recommended(found)
        answer, reasons = _open(request, found, chosen)
    offered = [] if chosen is None else _offers(request, chosen.candidate)
    shown = chosen.candidate.estimate if chosen else asked
    findings = check(request, claims, asked or shown)
    failed = [finding for finding in findings if finding.verdict != "holds"]
    reasons = [
        *reasons,
        *([] if chosen is None else _repeats(request, chosen)),
        *(f"{offer['option']} is offered: {offer['told']}" for offer in offered),
        *([] if shown is None else _about_speed(request, shown)),
        *([f"{len(failed)} of {len(findings)} claims do not hold"] if failed else []),
    ]
    hours = request.budget.value if request.budget.kind == "hours" else None
    return Plan(
        request=request,
        verdict=answer,
        reasons=tuple(reasons),
        bands=tuple(_planned(request, band) for band in found),
        recommended=chosen.name if chosen else None,
        asked=asked,
        remedies=remedies,
        findings=tuple(findings),
        alternatives=tuple(offered),
        hours={} if hours is None else {what: hours * share for what, share in SPLIT.items()},
        notes=tuple(_notes(request, chosen)),
    )


def _planned(request: PlanRequest, band: Band) -> PlannedBand:
    config, command = executable(request, band.candidate)
    seconds, of = band.candidate.seconds, "the pretraining run"
    if request.budget.kind == "hours":
        seconds, of = (request.budget.value * 3600,) * 3, "the whole budget"
    costs = cost(request, seconds, of)
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
    in_fp8 = in_precision(setting, config, OFFERED, request.card.native)
    faster = fitted(in_fp8, request.calibration, request.card.memory_bytes)
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
            "published": published and asdict(published),
            "told": f"{speed:.2f} times the speed of BF16 ({source}{beside}); {LOSS_SENTENCE}",
        }
    ]


def _precision_notes(request: PlanRequest, shown: StepEstimate) -> list[str]:
    """Return notes on a run below 16 bits: whose loss is shown, and products that are emulated or untested here."""
    setting, gpu = shown.setting, request.card.gpu
    if not quantized(setting.precision):
        return []
    name, nvfp4 = setting.precision, "nvfp4" in setting.precision
    loss = f"the expected loss is BF16's; how close {name} comes to it is in docs/precision.md"
    if not setting.emulated and nvfp4:
        return [
            f"{name}: NVFP4 products are priced by {request.card.name}'s data sheet, and deskside has not "
            f"run them on such a card; deskside doctor tells whether they work",
            loss,
        ]
    if not setting.emulated:
        return [loss]
    plain = replace(setting, precision="bf16", kept=(0.0, 0.0), fp8_head=False)
    bf16 = estimate(plain, request.calibration, request.card.memory_bytes)
    share = f"{shown.tokens_per_second[1] / bf16.tokens_per_second[1]:.0%} of BF16's speed (modelled)"
    never = request.given is not None and request.given.config.precision.native == "never"
    if nvfp4 and gpu is not None and gpu.fp4_flops and not never:
        return [
            f"{name} is planned as emulated, at {share}: {request.card.name} has FP4 units, but deskside has not run "
            f"them on one; deskside doctor tells whether they work there",
            loss,
        ]
    return [
        f"{name} is emulated on {request.card.name}: its numbers are true, its products are computed in BF16, at "
        f"{share}; it is for comparing, not for saving time",
        loss,
    ]


def _about_speed(request: PlanRequest, shown: StepEstimate) -> list[str]:
    """Return notes on a low precision, on a step that waits for the host, and on a card that nothing calibrates."""
    told = _precision_notes(request, shown)
    calibration, gpu = request.calibration, request.card.gpu
    if shown.host_bound:
        source = "timed here by the probe" if calibration.host_measured else "not measured here"
        told.append(
            f"host-bound: passes of {shown.setting.micro_tokens:,} tokens are over before the next kernels are "
            f"launched; the device waits for {shown.step['host'] / shown.step_seconds:.0%} of a step (host {source}, "
            f"+-{shown.speed_spread:.0%}); more tokens per pass are faster"
        )
    if gpu is not None and calibration.source != "measured" and (said := unknown(gpu)):
        told.append(f"{said}: speed within +-{calibration.speed_spread:.0%}")
    return told


def _notes(request: PlanRequest, chosen: Band | None) -> list[str]:
    """Return the notes of the request, and what the plan assumes about the link between GPUs and about the text."""
    notes, gpu = list(request.notes), request.card.gpu
    if request.gpus > 1:
        what = "PCIe"
        if gpu is not None:
            what = "NVLink or Infinity Fabric" if gpu.fabric_bandwidth is not None else f"PCIe {gpu.pcie}"
        link = number(request.calibration.rates.link_bandwidth / 1e9)
        notes.append(
            f"communication: {link} GB/s of {what}, from the data sheet; no run on several GPUs was measured"
        )
    if chosen is not None and request.unique_tokens is None and request.pretrains:
        notes.append(
            f"text: {count(chosen.candidate.tokens[1])} tokens of it are assumed, none read twice; say how many there "
            f"are with --unique-tokens"
        )
    return notes


def _repeats(request: PlanRequest, chosen: Band) -> list[str]:
    """Return a note if the text is repeated more often than helps."""
    times = chosen.candidate.tokens[1] / (request.unique_tokens or math.inf)
    if times <= MOST_READINGS:
        return []
    return [
        f"it reads its {count(request.unique_tokens)} tokens of text {number(times)} times; beyond {MOST_READINGS} "
        f"times there is little left to learn: more text would help more than more hours"
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
        return too_short(request, seconds)
    return TOO_SMALL
