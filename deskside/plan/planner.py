"""Make a plan from a request: search or verdict on a given model, then alternatives, costs and claims."""

import math
from dataclasses import asdict, replace
from typing import Any, Literal

from deskside.budget.format_costs import quantized
from deskside.budget.loss import (
    LAW,
    MAX_EPOCHS,
    MAX_WEIGHTS_PER_TOKEN,
    USEFUL_EPOCHS,
    outside_measured,
)
from deskside.budget.scaling import batch_token_factor
from deskside.budget.shape import num_params
from deskside.config import merge
from deskside.config.align import DpoConfig, KtoConfig
from deskside.config.recipes import expert_recipe, recipe_named
from deskside.plan import bands as band_choice
from deskside.plan import own_corpus
from deskside.plan.bands import Band
from deskside.plan.candidates import Candidate, ends_early, fits_at_all, takes_all_hours
from deskside.plan.claim_check import Claims, check_claims
from deskside.plan.costs import cost
from deskside.plan.estimate import StepEstimate, estimate, estimate_max_microbatch
from deskside.plan.expected_loss import law_inputs
from deskside.plan.published import published_fp8_speedup, uncalibrated_reason
from deskside.plan.reasons import Reason, reasons_of
from deskside.plan.remedies import Remedy
from deskside.plan.request import TIME_SHARES, PlanBudget, PlanRequest
from deskside.plan.result import Plan, PlannedBand, executable
from deskside.plan.run_length import (
    MAX_SECONDS,
    TOO_LONG,
    TOO_SMALL,
    more_text,
    pretrain_seconds,
    setup_seconds,
    text_too_small,
    too_short,
)
from deskside.plan.setting import Setting, options, with_precision
from deskside.plan.verdict import Answer, judge
from deskside.utils.errors import UsageError
from deskside.utils.format import bits_per_byte, count, duration, number, plural

# A smaller model is mentioned if its loss or its time is at most this share.
MENTIONED_LOSS, MENTIONED_TIME = 0.99, 0.5
NO_CLAIMS = Claims()
OFFERED: Literal["fp8"] = "fp8"  # the precision that is offered as an alternative to BF16
LOSS_SENTENCE = "how close its loss comes to BF16's is in docs/precision.md"
MIN_OFFERED_SPEEDUP = 1.02
MENTIONED_TOKENS = 0.005  # a large batch is mentioned if it needs at least this share more tokens


def make_plan(request: PlanRequest, claims: Claims = NO_CLAIMS) -> Plan:
    """Return the plan for a request. Raises UsageError, for example if the overrides exclude every model."""
    requested: StepEstimate | None = None
    remedies: tuple[Remedy, ...] = ()
    if request.given is not None:
        verdict = judge(request)
        answer, reasons = verdict.answer, verdict.reasons
        requested, remedies = verdict.requested, verdict.remedies
        why = f"the requested model: {request.given.label}"
        bands = [] if verdict.chosen is None else [Band("target", verdict.chosen, why)]
        chosen = bands[0] if bands else None
    else:
        bands = band_choice.choose_bands(request)
        chosen = band_choice.recommended(bands)
        answer, reasons = _search_verdict(request, bands, chosen)
    alternatives = [] if chosen is None else _alternatives(request, chosen.candidate)
    shown = chosen.candidate.estimate if chosen else requested
    findings = check_claims(request, claims, requested or shown)
    failed = [finding for finding in findings if finding.verdict != "holds"]
    planned = tuple(_planned_band(request, band) for band in bands)
    best = next((band for band in planned if chosen is not None and band.name == chosen.name), None)
    text_notes = [] if best is None else [*_repetition_notes(request, best), *_law_notes(request, best)]
    others = [
        *(f"{other['option']} is an alternative: {other['told']}" for other in alternatives),
        *([] if shown is None else _speed_notes(request, shown)),
        *([f"{len(failed)} of {len(findings)} claims do not hold"] if failed else []),
    ]
    hours = request.budget.value if request.budget.kind == "hours" else None
    return Plan(
        request=request,
        verdict=answer,
        reasons=(*reasons, *reasons_of("text", text_notes), *reasons_of("other", others)),
        bands=planned,
        recommended=chosen.name if chosen else None,
        requested=requested,
        remedies=remedies,
        findings=tuple(findings),
        alternatives=tuple(alternatives),
        hours={} if hours is None else _phase_hours(request, hours, chosen),
        notes=tuple(_notes(request, chosen)),
    )


def _phase_hours(request: PlanRequest, hours: float, chosen: Band | None) -> dict[str, float]:
    """Return the hours of each phase of a time budget."""
    phases = {phase: hours * share for phase, share in TIME_SHARES.items()}
    if chosen is not None and ends_early(request, chosen.candidate):
        phases["pretraining"] = chosen.candidate.seconds[1] / 3600
    return phases


def _planned_band(request: PlanRequest, band: Band) -> PlannedBand:
    """Return a band with its configuration, command and cost."""
    config, command, regularisation = executable(request, band.candidate)
    seconds, of = band.candidate.seconds, "the pretraining run"
    if takes_all_hours(request, band.candidate):
        seconds, of = (request.budget.value * 3600,) * 3, "the whole budget"
    costs = cost(request, seconds, of)
    return PlannedBand(band.name, band.why, band.candidate, config, command, costs, regularisation)


def _alternatives(request: PlanRequest, chosen: Candidate) -> list[dict[str, Any]]:
    """Return FP8 as an alternative to BF16 if the card and the model's dimensions support it and it is faster.

    `deskside plan` only offers it. `deskside go` chooses it if the doctor finds it right (`pipeline/planning.py`).
    """
    setting = chosen.setting
    if setting.precision != "bf16" or OFFERED not in request.card.native:
        return []
    layers = [
        *chosen.shape.layers,
        options(setting, config=chosen.shape.config),
        {"precision": {"name": OFFERED}},
    ]
    try:
        config = merge.build(layers)
    except UsageError:  # dimensions that FP8 does not support, or a sharded run
        return []
    in_fp8 = with_precision(setting, config, OFFERED, request.card.native)
    fp8_estimate = estimate_max_microbatch(in_fp8, request.calibration, request.card.memory_bytes)
    modelled = fp8_estimate.tokens_per_second[1] / chosen.estimate.tokens_per_second[1]
    measured = request.measured_fp8
    speed, source = (modelled, "modelled") if measured is None else (measured.speed, measured.source)
    if speed < MIN_OFFERED_SPEEDUP or fp8_estimate.fits == "no":
        return []
    published = (
        published_fp8_speedup(request.card.gpu, num_params(setting.model)) if request.card.gpu else None
    )
    others = "" if published is None else f"; {published.source}: {published.speed:.2f} times"
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
            "told": f"{speed:.2f} times the speed of BF16 ({source}{others}); {LOSS_SENTENCE}",
        }
    ]


def _precision_notes(request: PlanRequest, shown: StepEstimate) -> list[str]:
    """Return notes on a run below 16 bits: on its loss, and on products that are emulated or untested on this card."""
    setting, gpu = shown.setting, request.card.gpu
    if not quantized(setting.precision):
        return []
    name, nvfp4 = setting.precision, "nvfp4" in setting.precision
    loss = f"the expected loss is BF16's; how close {name} comes to it is in docs/precision.md"
    experts = _expert_notes(setting, request.card.name)
    if not setting.emulated and nvfp4:
        return [
            f"{name}: the speed of NVFP4 products is that of {request.card.name}'s data sheet; deskside has not "
            f"run them on such a card; deskside doctor tests them",
            *experts,
            loss,
        ]
    if not setting.emulated:
        return [*experts, loss]
    in_bf16 = replace(setting, precision="bf16", kept=(0.0, 0.0), fp8_head=False)
    bf16 = estimate(in_bf16, request.calibration, request.card.memory_bytes)
    share = f"{shown.tokens_per_second[1] / bf16.tokens_per_second[1]:.0%} of BF16's speed (modelled)"
    native_off = request.given is not None and request.given.config.precision.native == "never"
    if nvfp4 and gpu is not None and gpu.fp4_flops and not native_off:
        return [
            f"{name} is planned as emulated, at {share}: {request.card.name} has FP4 units, but deskside has not run "
            f"on such units; deskside doctor tests them",
            *experts,
            loss,
        ]
    return [
        f"{name} is emulated on {request.card.name}: the same numbers, but multiplied in BF16, at {share}; this is for "
        f"studying the loss, not for speed",
        *experts,
        loss,
    ]


def _expert_notes(setting: Setting, card: str) -> list[str]:
    """Return notes on the recipe of the experts, if it is not that of the other layers, and on its emulation."""
    recipe = recipe_named(setting.precision)
    if not setting.model.num_experts:
        return []
    used, notes = expert_recipe(recipe).name, []
    if used != recipe.name:
        notes.append(
            f"experts are computed in {used}, because grouped products support no other scaling of FP8"
        )
    if not setting.emulated and "fp8-grouped" not in setting.native:
        notes.append(f"products of experts are emulated on {card}: the same numbers, multiplied in BF16")
    if setting.model.shared_expert_intermediate_size:
        notes.append(f"the shared expert stays in BF16 in {setting.precision}")
    return notes


def _speed_notes(request: PlanRequest, shown: StepEstimate) -> list[str]:
    """Return notes on a low precision, the host's part, an architecture without measurements, and dense routing."""
    notes = _precision_notes(request, shown)
    calibration, gpu = request.calibration, request.card.gpu
    if shown.host_bound:
        source = "timed here by the probe" if calibration.host_measured else "not measured here"
        notes.append(
            f"host-bound: passes of {shown.setting.micro_tokens:,} tokens take the device less time than launching "
            f"their kernels takes the host; the device waits for {shown.step['host'] / shown.step_seconds:.0%} of a "
            f"step (host {source}, +-{shown.speed_spread:.0%}); more tokens per pass are faster"
        )
    if shown.replays and shown.setting.graphs == "auto":
        notes.append(
            f"passes of {shown.setting.micro_tokens:,} tokens are replayed as CUDA graphs: launching their kernels "
            "one by one would take the host longer than the device takes to run them"
        )
    if gpu is not None and calibration.source == "published" and (reason := uncalibrated_reason(gpu)):
        notes.append(f"{reason}: speed within +-{calibration.speed_spread:.0%}")
    if warning := shown.setting.model.all_experts_warning():
        notes.append(warning)
    return notes


def _notes(request: PlanRequest, chosen: Band | None) -> list[str]:
    """Return the notes of the request, and notes on the assumed link between GPUs, the assumed amount of text, and the
    pass of a reference model."""
    notes, gpu = list(request.notes), request.card.gpu
    align = None if request.given is None else request.given.config.align
    if isinstance(align, KtoConfig) or (isinstance(align, DpoConfig) and not align.reference_free):
        notes.append(
            "time: without the forward pass of each text under the reference model, before the first step"
        )
    if request.gpus > 1:
        link = "PCIe, assumed"
        if gpu is not None:
            name = "NVLink or Infinity Fabric" if gpu.fabric_bandwidth is not None else f"PCIe {gpu.pcie}"
            link = f"{name}, modelled from the data sheet"
        rate = number(request.calibration.rates.link_bandwidth / 1e9)
        notes.append(f"communication: {rate} GB/s of {link}; of several GPUs, only two H200 were measured")
    if reports := request.calibration.reports:
        notes.append(
            f"this card was not probed here: its speed comes from {plural(len(reports), 'report')} by other owners, "
            f"which deskside facts list --gpu shows; measure yours with: deskside probe"
        )
    if chosen is not None and request.pretrains and (batch := _batch_note(request, chosen)):
        notes.append(batch)
    if chosen is not None and request.unique_tokens is None and request.pretrains:
        notes.append(
            f"text: {count(chosen.candidate.tokens[1])} unique tokens are assumed; if there are fewer, give "
            f"--unique-tokens"
        )
    return notes


def _batch_note(request: PlanRequest, chosen: Band) -> str | None:
    """Return a note on the batch if there are several GPUs or it is larger than the best one, else None."""
    setting = chosen.candidate.setting
    tokens = setting.tokens_per_step
    more = batch_token_factor(tokens, chosen.candidate.tokens[1]) - 1
    if request.gpus == 1 and more < MENTIONED_TOKENS:
        return None
    each = f", {tokens / request.gpus:,.0f} on each GPU" if request.gpus > 1 else ""
    needed = (
        f"; at the best batch, {more / (1 + more):.0%} fewer tokens would give the same loss, which the "
        f"expected loss includes"
    )
    return f"batch: {tokens:,.0f} tokens per step{each}{needed if more >= MENTIONED_TOKENS else ''}"


def _repetition_notes(request: PlanRequest, chosen: PlannedBand) -> list[str]:
    """Return notes on a run of more than MAX_EPOCHS epochs, on one that ends early, and on own-corpus mode."""
    candidate, unique = chosen.candidate, request.unique_tokens
    if unique is None:
        return []
    epochs, notes = candidate.tokens[1] / unique, []
    helps = more_text(own_corpus=not request.own_corpus)
    if request.own_corpus:
        notes.append(own_corpus.sentence(candidate, unique, request.user_options))
    elif epochs > MAX_EPOCHS:
        best = "; it ends with its best checkpoint" if _keeps_best(chosen) else ""
        notes.append(
            f"it reads its {count(unique)} tokens of text {number(epochs)} times; beyond {MAX_EPOCHS} times, more "
            f"text helps more than more hours{best}"
        )
    if ends_early(request, candidate):
        wish = "this time" if pretrain_seconds(request) is not None else "this budget"
        if request.budget.kind is None:
            wish = "a model of this size"
        notes.append(
            f"the text is too small for {wish}: the run ends after {duration(candidate.seconds[1])}, because "
            f"reading it more than {USEFUL_EPOCHS} times is worth nothing (arXiv 2305.16264); {helps}"
        )
    elif request.pretrains and epochs > USEFUL_EPOCHS:
        notes.append(
            f"reading a text more than {USEFUL_EPOCHS} times is worth nothing (arXiv 2305.16264); "
            f"{count(USEFUL_EPOCHS * unique)} tokens are enough; {helps}"
        )
    if not request.own_corpus and candidate.weights > MAX_WEIGHTS_PER_TOKEN * unique and request.pretrains:
        notes.append(own_corpus.too_large(candidate.weights))
    if candidate.weights > MAX_WEIGHTS_PER_TOKEN * unique and request.pretrains:
        notes += _size_for_the_text(request, candidate)
    return notes


def _size_for_the_text(request: PlanRequest, candidate: Candidate) -> list[str]:
    """Return a note on the smaller model that a plan would choose for this text and the time of this candidate."""
    if request.given is None:
        return []
    seconds, model = candidate.seconds[1], candidate.setting.model
    open_request = replace(
        request,
        budget=PlanBudget("hours", seconds / 3600),
        pretrain_seconds=seconds,
        given=None,
        own_corpus=False,
        overrides={"model": {"vocab_size": model.vocab_size}},
        sequence_length=request.sequence,
    )
    choice = band_choice.recommended(band_choice.choose_bands(open_request))
    if choice is None or choice.candidate.weights >= candidate.weights:
        return []
    small = choice.candidate
    if (
        small.forecast[1] > MENTIONED_LOSS * candidate.forecast[1]
        and small.seconds[1] > MENTIONED_TIME * seconds
    ):
        return []  # neither better nor faster
    return [
        f"for this text, a plan without a given size takes {small.shape.preset} ({count(small.params)}): about "
        f"{bits_per_byte(small.forecast[1])} bits per byte after {duration(small.seconds[1])}, where this model "
        f"is expected at {bits_per_byte(candidate.forecast[1])} after {duration(seconds)} if it does not overfit"
    ]


def _keeps_best(chosen: PlannedBand) -> bool:
    return bool(chosen.config.get("checkpoint", {}).get("keep_best", False))


def _law_notes(request: PlanRequest, chosen: PlannedBand) -> list[str]:
    """Return a note on a forecast that is bounded by the baselines of the text rather than given by the loss law."""
    candidate, text = chosen.candidate, request.text
    if not request.pretrains or candidate.forecast == candidate.loss:
        return []
    outside = outside_measured(*law_inputs(candidate.setting, candidate.tokens[1]), request.unique_tokens)
    repeats = candidate.tokens[1] > MAX_EPOCHS * (request.unique_tokens or math.inf)
    overfits = "; a run that overfits ends higher, and this one does not keep its best checkpoint"
    overfits = overfits if repeats and not _keeps_best(chosen) else ""
    bound = f"the {text.unigram:.3f} of unigrams on this text"
    if text.untrained is not None:
        bound = f"the {text.untrained:g} of an untrained model"
    return [
        f"the loss is a rough guess, between {candidate.forecast[0]:.2f} and {candidate.forecast[2]:.2f} bits per "
        f"byte, which is kept below {bound}: the loss law was not fitted to runs like this one"
        f"{'' if not outside else ', of ' + ', '.join(outside)}{overfits}"
    ]


def _search_verdict(
    request: PlanRequest, bands: list[Band], chosen: Band | None
) -> tuple[Answer, list[Reason]]:
    """Return the verdict and the reasons of the open search."""
    if chosen is None:
        return "no", reasons_of("against", [_no_candidate_reason(request)])
    choice = band_choice.reason(request, bands, chosen)
    if chosen.candidate.seconds[1] > MAX_SECONDS:
        return "no", reasons_of("against", [choice, TOO_LONG])
    if chosen.candidate.estimate.fits != "fits":
        tight = "it fits at its expected memory, but not at the high end of the range: try it out"
        return "yes-if", reasons_of("other", [choice, tight])
    if request.budget.kind == "loss" and chosen.name == "stretch":
        return "yes-if", [Reason("the loss is reached only if it is at the low end of its predicted range")]
    return "yes", [Reason(choice)]


def _no_candidate_reason(request: PlanRequest) -> str:
    """Return the reason why the search found no candidate."""
    budget = request.budget
    if not fits_at_all(request):
        return f"not even the smallest model fits on {request.card.name} with rows of {request.sequence:,} tokens"
    if budget.kind == "loss":
        return (
            f"{budget.value:g} bits per byte is out of reach for every model that fits on {request.card.name}; "
            f"the loss law's limit for an infinitely large model is {LAW.E + LAW.offset:.3f}"
        )
    seconds = pretrain_seconds(request)
    if seconds is not None and (request.unique_tokens is None or seconds < 2 * setup_seconds(request)):
        return too_short(request, seconds)
    if request.unique_tokens is not None and band_choice.choose_bands(replace(request, unique_tokens=None)):
        return text_too_small(request)
    return TOO_SMALL
