"""The model is given: yes, yes-if (what to change), or no (what would be needed).

First memory: the run as it was asked for, its micro-batch fitted, must fit even at the high end of the range. If it
does not, the options of `deskside train` that save memory are tried in every combination, the least change first
(`plan/changes.py`); what fits with them is a yes-if. Then time: a budget of hours must leave room for training, and a
model so large that a smaller one would end clearly better in the same hours is a yes-if at best; one that reads too
little for its size is always told so. Sharding over the GPUs that were named is a change; more GPUs, a larger card or
a smaller model are not what was asked, and are named as what would be needed.
"""

from dataclasses import dataclass, replace
from typing import Literal

from deskside.budget.shape import matmul_params
from deskside.plan.candidates import (
    LONGEST_SECONDS,
    TOO_LONG,
    Candidate,
    Shape,
    batch_tokens,
    bpb,
    candidate,
    fastest,
    length,
    optimal_tokens,
    pretrain_seconds,
    search,
    setting_of,
    setup_seconds,
)
from deskside.plan.changes import combinations, first_that_fits, leanest, least
from deskside.plan.estimate import Estimate, Setting, check_shared, estimate, fitted, optim_options
from deskside.plan.remedies import Remedy, remedies, roomy
from deskside.plan.request import Request
from deskside.utils.format import count, duration, gib

Answer = Literal["yes", "yes-if", "no"]
UNDERTRAINED = 1.05  # times what the best smaller model leaves to be learned in the same hours
FEW_TOKENS = 1 / 3  # of what is optimal for the size: below this a plan always says so


@dataclass(frozen=True)
class Verdict:
    """asked: the run as it was asked for; chosen: the run that can be done, None if there is none."""

    answer: Answer
    reasons: tuple[str, ...]
    asked: Estimate
    chosen: Candidate | None
    remedies: tuple[Remedy, ...]


def judge(request: Request) -> Verdict:
    """The verdict on the given model. The request must have one."""
    assert request.given is not None
    shape = Shape(request.given.preset, request.given.layers, request.given.config)
    asked = _asked(request, shape)
    found, answer, reasons = _memory(request, asked)
    needed = tuple(remedies(replace(request, overrides={}), asked)) if asked.fits != "fits" else ()
    if found is None:
        would = [remedy.what for remedy in needed if remedy.kind in ("hardware", "other model")]
        return Verdict("no", (*reasons, f"what would do: {'; or '.join(would)}"), asked, None, needed)
    chosen = candidate(request, shape, found)
    if chosen is None:
        return Verdict("no", (*reasons, _out_of_reach(request, found)), asked, None, needed)
    if chosen.seconds[1] > LONGEST_SECONDS:
        told = f"{count(chosen.tokens[1])} tokens take {duration(chosen.seconds[1])}; {TOO_LONG}"
        return Verdict("no", (*reasons, told), asked, chosen, needed)
    # How many tokens a size deserves, and which size ends better, is known of pretraining.
    late, worse = _undertrained(request, chosen) if request.pretrains else (None, False)
    if late is not None:
        reasons.append(late)
    if worse:
        answer = "yes-if"
    return Verdict(answer, tuple(reasons), asked, chosen, needed)


def _asked(request: Request, shape: Shape) -> Estimate:
    """The run as asked. What nobody said: the best batch for its tokens, and the micro-batch that fits."""
    assert request.given is not None
    base = setting_of(request, shape.config)
    capacity, own = request.card.memory_bytes, request.given.own

    def run(setting: Setting) -> Estimate:
        if "batch.micro_tokens" in own and setting.micro_tokens <= setting.tokens_per_step:
            return estimate(setting, request.calibration, capacity)
        return fitted(setting, request.calibration, capacity)

    by_stage = any(stage.batch_tokens for stage in shape.config.schedule.stages)
    if "batch.tokens" in own or by_stage or len(base.stages) > 1:
        check_shared(base)
        return run(base)
    found: Estimate | None = None
    tokens = batch_tokens(
        optimal_tokens(request.law, matmul_params(base.model)), request.sequence, request.gpus
    )
    for _ in range(2):
        stages = (replace(base.stages[0], sequence_length=request.sequence, tokens=tokens),)
        micro = base.micro_tokens if "batch.micro_tokens" in own else tokens // request.gpus
        found = run(replace(base, stages=stages, micro_tokens=micro))
        reached = length(request, found)
        if reached is not None:
            tokens = batch_tokens(reached[0][1], request.sequence, request.gpus)
    assert found is not None
    return found


def _memory(request: Request, asked: Estimate) -> tuple[Estimate | None, Answer, list[str]]:
    """What can be run, the verdict on memory alone, and why."""
    capacity = gib(request.card.memory_bytes)
    low, expected, high = asked.memory_bytes
    told = f"{gib(expected)} ({gib(low)} to {gib(high)}) of {capacity}"
    if asked.fits == "fits":
        return asked, "yes", [f"it fits: {told}, {asked.setting.micro_tokens:,} tokens per pass"]
    # What was asked for by hand does not fit, so it may be changed too.
    request = replace(request, overrides={})
    start = roomy(request, asked.setting)
    found = first_that_fits(request, start)
    if found is not None:
        return found, "yes-if", [f"as asked it needs {told}", f"it fits with {_differences(asked, found)}"]
    for setting in (None, *combinations(request, start)):
        found = asked if setting is None else _tight(request, setting)
        if found is not None and found.fits == "tight":
            _, expected, high = found.memory_bytes
            text = f"it needs {gib(expected)} as expected, but {gib(high)} at the high end"
            what = _differences(asked, found)
            trial = f"{text} of the range{f', with {what}' if what else ''}: only a trial will tell"
            return found, "yes-if", [trial]
    lean = leanest(request, start)
    return (
        None,
        "no",
        [
            f"as asked it needs {told}",
            f"with everything that saves memory together ({_differences(asked, lean)}) it still needs "
            f"{gib(lean.memory_bytes[1])}, at most {gib(lean.memory_bytes[2])}",
        ],
    )


def _tight(request: Request, setting: Setting) -> Estimate | None:
    """Return the fastest way to do a setting that is expected to fit, None when none is."""
    return None if least(request, setting).fits == "no" else fastest(request, setting)


def _differences(asked: Estimate, found: Estimate) -> str:
    """What was changed, in words."""
    before, after = asked.setting, found.setting
    words = []
    if after.precision != before.precision:
        words.append(f"--precision {after.precision}")
    if after.activation_checkpointing != before.activation_checkpointing:
        words.append(f"--compute.activation_checkpointing {after.activation_checkpointing}")
    if after.loss_chunk_tokens != before.loss_chunk_tokens:
        words.append(f"--compute.loss_chunk_tokens {after.loss_chunk_tokens}")
    if after.optimizer != before.optimizer:
        words.append(f"--optim.name {after.optimizer}")
    if after.states != before.states:
        words.append(f"--optim.states {after.states}")
    if after.offload_optimizer != before.offload_optimizer:
        words.append("--optim.offload true")
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


def _out_of_reach(request: Request, found: Estimate) -> str:
    budget = request.budget
    if budget is not None and budget.kind == "loss":
        floor = bpb(request, found.setting, 1e15)[1]
        return (
            f"{budget.value:g} bits per byte is out of reach: a model of this size is expected to end above "
            f"{floor:.3f} whatever it reads"
        )
    seconds = pretrain_seconds(request)
    if seconds is None or length(request, found) is not None:
        return "the budget is too small: nothing would be learned from so few tokens"
    return (
        f"the time is too short: {duration(seconds)} of pretraining, of which setting up takes about "
        f"{duration(setup_seconds(request))}, and a step {duration(found.step_seconds)}"
    )


def _undertrained(request: Request, chosen: Candidate) -> tuple[str | None, bool]:
    """(what to say of a model that reads too little for its size, whether a smaller one ends clearly better).

    Two models are compared by what is left above the law's floor, which no model gets below, and trained alike: the
    same optimiser, and short rows first for both or for neither.
    """
    right = optimal_tokens(request.law, chosen.weights)
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


def _rival(request: Request, chosen: Candidate) -> Candidate | None:
    """The best smaller model of the same budget, trained alike, if it ends clearly better."""
    if request.budget is None or request.budget.kind not in ("hours", "flops"):
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
    floor = request.law.E + request.law.offset
    return best if chosen.loss[1] - floor >= UNDERTRAINED * (best.loss[1] - floor) else None
