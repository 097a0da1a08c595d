"""The model is given: yes, yes-if (what to change), or no (what would be needed).

Memory is checked first: the requested run, with its micro-batch fitted, must fit at the high end of the range. If it
does not, the options of `deskside train` that save memory are tried in every combination, the least change first
(`plan/remedies.py`). A run that fits with them is a yes-if. Time is checked next: a budget of hours must leave room for
training. If a smaller model would end clearly better in the same hours, the verdict is yes-if at best. A model that
reads too few tokens for its size is always reported. Sharding over the requested GPUs is a change. More GPUs, a larger
card or a smaller model answer another question and are reported as what would be needed.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Literal

from deskside.budget.loss import LAW
from deskside.budget.shape import matmul_params
from deskside.plan.candidates import (
    LONGEST_SECONDS,
    TOO_LONG,
    TOO_SMALL,
    Candidate,
    batch_tokens,
    bpb,
    candidate,
    fastest,
    length,
    optimal_tokens,
    pretrain_seconds,
    search,
    setting_of,
    too_short,
)
from deskside.plan.estimate import Setting, StepEstimate, check_shared, estimate, fitted, optim_options
from deskside.plan.remedies import (
    Remedy,
    combinations,
    first_that_fits,
    max_microbatch_unless_set,
    minimum_memory,
    minimum_over_changes,
    remedies,
)
from deskside.plan.request import Given, PlanRequest
from deskside.utils.format import count, duration, gib

Answer = Literal["yes", "yes-if", "no"]
UNDERTRAINED = 1.05  # loss above the law's floor, relative to the best smaller model in the same hours
CHANGED_OPTIONS = (
    ("--precision", "precision"),
    ("--compute.activation_checkpointing", "activation_checkpointing"),
    ("--compute.loss_chunk_tokens", "loss_chunk_tokens"),
    ("--optim.name", "optimizer"),
    ("--optim.states", "states"),
    ("--optim.offload", "offload_optimizer"),
)
FEW_TOKENS = 1 / 3  # of the optimum for the size; a plan reports fewer


@dataclass(frozen=True)
class ModelVerdict:
    """Verdict on a given model. asked: the run as requested; chosen: the run that is possible, None without one."""

    answer: Answer
    reasons: list[str]
    asked: StepEstimate
    chosen: Candidate | None
    remedies: tuple[Remedy, ...]


def judge(request: PlanRequest) -> ModelVerdict:
    """Return the verdict on the given model. The request must have one."""
    assert request.given is not None
    asked = _asked(request, request.given)
    found, answer, reasons = _memory(request, asked)
    needed = tuple(remedies(replace(request, overrides={}), asked)) if asked.fits != "fits" else ()
    if found is None:
        would = [remedy.what for remedy in needed if remedy.kind in ("hardware", "other model")]
        return ModelVerdict("no", [*reasons, f"what would do: {'; or '.join(would)}"], asked, None, needed)
    chosen = candidate(request, request.given, found)
    if chosen is None:
        return ModelVerdict("no", [*reasons, _out_of_reach(request, found)], asked, None, needed)
    if chosen.seconds[1] > LONGEST_SECONDS:
        told = f"{count(chosen.tokens[1])} tokens take {duration(chosen.seconds[1])}; {TOO_LONG}"
        return ModelVerdict("no", [*reasons, told], asked, chosen, needed)
    # The optimal tokens of a size, and the better of two sizes, are only known for pretraining.
    late, worse = _undertrained(request, chosen) if request.pretrains else (None, False)
    if late is not None:
        reasons.append(late)
    if worse:
        answer = "yes-if"
    return ModelVerdict(answer, reasons, asked, chosen, needed)


def _asked(request: PlanRequest, given: Given) -> StepEstimate:
    """Return the requested run. Options that were not set: the best batch for its tokens, the micro-batch that fits."""
    base = setting_of(request, given.config)
    capacity, own = request.card.memory_bytes, given.own

    def run(setting: Setting) -> StepEstimate:
        if "batch.micro_tokens" in own and setting.micro_tokens <= setting.tokens_per_step:
            return estimate(setting, request.calibration, capacity)
        return fitted(setting, request.calibration, capacity)

    by_stage = any(stage.batch_tokens for stage in given.config.schedule.stages)
    if "batch.tokens" in own or by_stage or len(base.stages) > 1:
        check_shared(base)
        return run(base)
    found: StepEstimate | None = None
    tokens = batch_tokens(optimal_tokens(LAW, matmul_params(base.model)), request.sequence, request.gpus)
    for _ in range(2):
        stages = (replace(base.stages[0], sequence_length=request.sequence, tokens=tokens),)
        micro = base.micro_tokens if "batch.micro_tokens" in own else tokens // request.gpus
        found = run(replace(base, stages=stages, micro_tokens=micro))
        reached = length(request, found)
        if reached is not None:
            tokens = batch_tokens(reached[0][1], request.sequence, request.gpus)
    assert found is not None
    return found


def _memory(request: PlanRequest, asked: StepEstimate) -> tuple[StepEstimate | None, Answer, list[str]]:
    """Return the run that is possible, the verdict on memory alone, and the reasons."""
    capacity = gib(request.card.memory_bytes)
    low, expected, high = asked.memory_bytes
    told = f"{gib(expected)} ({gib(low)} to {gib(high)}) of {capacity}"
    if asked.fits == "fits":
        return asked, "yes", [f"it fits: {told}, {asked.setting.micro_tokens:,} tokens per pass"]
    # The overrides do not fit, so they may be changed too.
    request = replace(request, overrides={})
    start = max_microbatch_unless_set(request, asked.setting)
    found = first_that_fits(request, start)
    if found is not None:
        return found, "yes-if", [f"as asked it needs {told}", f"it fits with {_differences(asked, found)}"]
    possible = (s for s in combinations(request, start) if minimum_memory(request, s).fits != "no")
    for found in itertools.chain([asked], (fastest(request, setting) for setting in possible)):
        if found.fits == "tight":
            _, expected, high = found.memory_bytes
            text = f"it needs {gib(expected)} as expected, but {gib(high)} at the high end"
            what = _differences(asked, found)
            trial = f"{text} of the range{f', with {what}' if what else ''}: only a trial will tell"
            return found, "yes-if", [trial]
    lean = minimum_over_changes(request, start)
    still = f"{gib(lean.memory_bytes[1])}, at most {gib(lean.memory_bytes[2])}"
    saved = f"with everything that saves memory together ({_differences(asked, lean)}) it still needs {still}"
    return None, "no", [f"as asked it needs {told}", saved]


def _differences(asked: StepEstimate, found: StepEstimate) -> str:
    """Return the changed options as text."""
    before, after = asked.setting, found.setting
    words = [
        f"{option} {str(getattr(after, field)).lower()}"
        for option, field in CHANGED_OPTIONS
        if getattr(after, field) != getattr(before, field)
    ]
    if after.copies == "use" and before.copies == "step":
        words.append("--precision.weight_cache false")
    if after.sharded and not before.sharded:
        words.append(f"sharding over the {after.gpus} GPUs (--parallel.mode shard)")
    if after.sequence_length != before.sequence_length:
        words.append(f"rows of {after.sequence_length:,} tokens")
    if after.micro_tokens != before.micro_tokens:
        words.append(f"{after.micro_tokens:,} tokens per pass")
    speed = found.tokens_per_second[1] / asked.tokens_per_second[1]
    return f"{', '.join(words)}, at {speed:.0%} of the speed" if words else ""


def _out_of_reach(request: PlanRequest, found: StepEstimate) -> str:
    budget = request.budget
    if budget.kind == "loss":
        floor = bpb(request, found.setting, 1e15)[1]
        return (
            f"{budget.value:g} bits per byte is out of reach: a model of this size is expected to end above "
            f"{floor:.3f} whatever it reads"
        )
    seconds = pretrain_seconds(request)
    if seconds is None or length(request, found) is not None:
        return TOO_SMALL
    return f"{too_short(request, seconds)}, and a step {duration(found.step_seconds)}"


def _undertrained(request: PlanRequest, chosen: Candidate) -> tuple[str | None, bool]:
    """Return (message about a model that reads too few tokens, or None; whether a smaller one ends clearly better).

    Two models are compared by their loss above the law's floor, with the same optimizer and the same use of short rows.
    """
    right = optimal_tokens(LAW, chosen.weights)
    rival = _rival(request, chosen)
    if rival is None and chosen.tokens[1] >= FEW_TOKENS * right:
        return None, False
    text = f"it sees only {chosen.tokens[1] / chosen.params:.2g} tokens per parameter"
    if rival is not None:
        text += (
            f" and is expected at {chosen.loss[1]:.3f} bits per byte, where {rival.shape.preset} "
            f"({count(rival.params)}), trained alike, gets to {rival.loss[1]:.3f} in the same budget"
        )
    needed = duration(right / chosen.estimate.tokens_per_second[1])
    text += f"; this size is the best choice from {count(right)} tokens on, which take {needed}"
    return text, rival is not None


def _rival(request: PlanRequest, chosen: Candidate) -> Candidate | None:
    """Return the best smaller model of the same budget, trained in the same way, if it ends clearly better."""
    if request.budget.kind not in ("hours", "flops"):
        return None
    alike = replace(
        request,
        given=None,
        overrides={"optim": {"name": chosen.setting.optimizer} | optim_options(chosen.setting)},
        sequence_length=request.sequence,
    )
    found = search(alike, staged=len(chosen.setting.stages) > 1)
    smaller = [c for c in found if c.estimate.fits == "fits" and c.weights < chosen.weights]
    if not smaller:
        return None
    best = min(smaller, key=lambda c: c.loss[1])
    floor = LAW.E + LAW.offset
    return best if chosen.loss[1] - floor >= UNDERTRAINED * (best.loss[1] - floor) else None
