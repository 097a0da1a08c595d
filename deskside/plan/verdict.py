"""The verdict on a given model: "yes", "yes-if" (with changes), or "no" (with what would be needed).

Memory is checked first: the requested run, with the largest micro-batch that fits, must fit at the high end of its
memory range. If it does not, all combinations of the memory-saving options of `deskside train` are tried, from small to
large changes (`plan/combinations.py`), sharding over the requested GPUs included. If one of them fits, the verdict is
"yes-if". More GPUs, a larger card or a smaller model are only listed.

Time is checked next: a budget of hours must be long enough for training, and no run may take more than a year. If a
smaller model would end with a clearly lower loss in the same budget, the verdict is "yes-if" at best. Pretraining on
too few tokens for the model's size is always reported.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from deskside.budget.loss import LAW
from deskside.budget.shape import matmul_params
from deskside.plan.candidates import Candidate, ends_early, make_candidate, search, setting_on_card
from deskside.plan.combinations import (
    best_that_fits,
    combinations,
    minimum_memory,
    minimum_over_changes,
)
from deskside.plan.estimate import StepEstimate, estimate, estimate_max_microbatch
from deskside.plan.expected_loss import bpb, optimal_tokens
from deskside.plan.fastest_fit import fastest_that_fits, is_refused
from deskside.plan.given_model import GivenModel
from deskside.plan.reasons import Reason, reasons_of
from deskside.plan.remedies import Remedy, remedies, with_max_microbatch_unless_set
from deskside.plan.request import PlanBudget, PlanRequest
from deskside.plan.run_length import (
    MAX_SECONDS,
    TOO_LONG,
    TOO_SMALL,
    batch_tokens,
    pretrain_seconds,
    run_length,
    text_too_small,
    too_short,
)
from deskside.plan.setting import Setting, check_batch_divides, optim_options
from deskside.utils.format import count, duration, gib, gib_range

Answer = Literal["yes", "yes-if", "no"]
# A smaller model is clearly better if the given model's loss above the law's limit is this multiple of the smaller's.
UNDERTRAINED = 1.05
CHANGED_OPTIONS = (
    ("--precision", "precision"),
    ("--compute.activation_checkpointing", "activation_checkpointing"),
    ("--compute.activation_offloading", "activation_offloading"),
    ("--compute.mlp_chunk_tokens", "mlp_chunk_tokens"),
    ("--compute.loss_chunk_tokens", "loss_chunk_tokens"),
    ("--optim.name", "optimizer"),
    ("--optim.weights", "weights"),
    ("--optim.states", "states"),
    ("--optim.offload", "offload_optimizer"),
    ("--optim.gradients", "gradients"),
)
FEW_TOKENS = 1 / 3  # share of the compute-optimal tokens below which a plan reports that they are too few


@dataclass(frozen=True)
class ModelVerdict:
    """Verdict on a given model. requested: the run as requested; chosen: the run to do, None if none is possible."""

    answer: Answer
    reasons: list[Reason]
    requested: StepEstimate
    chosen: Candidate | None
    remedies: tuple[Remedy, ...]


def judge(request: PlanRequest, with_remedies: bool = True) -> ModelVerdict:
    """Return the verdict on the given model. The request must have one.

    with_remedies: also search for what would help, which takes half of the time.
    """
    assert request.given is not None
    requested = _requested_run(request, request.given)
    possible, answer, about_memory = _check_memory(request, requested)
    useful: tuple[Remedy, ...] = ()
    if with_remedies and (requested.fits != "fits" or possible is None):
        useful = tuple(remedies(request.with_options({}), requested))

    def no(
        against: list[str], others: Sequence[Reason] = (), chosen: Candidate | None = None
    ) -> ModelVerdict:
        return ModelVerdict("no", [*reasons_of("against", against), *others], requested, chosen, useful)

    if possible is None and not with_remedies:
        return no(about_memory)
    if possible is None:
        would_fit = [remedy.what for remedy in useful if remedy.kind in ("hardware", "other model")]
        return no([*about_memory, f"what would fit: {'; or '.join(would_fit)}"])
    reasons = reasons_of("other", about_memory)
    chosen = make_candidate(request, request.given, possible)
    if chosen is None:
        return no([_out_of_reach(request, possible)], reasons)
    if chosen.seconds[1] > MAX_SECONDS:
        takes = f"{count(chosen.tokens[1])} tokens take {duration(chosen.seconds[1])}; {TOO_LONG}"
        return no([takes], reasons, chosen)
    if request.pretrains:  # the loss law applies only to pretraining
        message, smaller_is_better = _undertrained(request, chosen)
        if message is not None:
            reasons.append(Reason(message))
        if smaller_is_better:
            answer = "yes-if"
    return ModelVerdict(answer, reasons, requested, chosen, useful)


def _requested_run(request: PlanRequest, given: GivenModel) -> StepEstimate:
    """Return the requested run. If not set explicitly, its batch is the best for its tokens, its micro-batch the
    largest that fits."""
    base = setting_on_card(request, given.config)
    capacity, explicit = request.card.memory_bytes, given.explicit

    def estimated(setting: Setting) -> StepEstimate:
        if "batch.micro_tokens" in explicit and setting.micro_tokens <= setting.tokens_per_step:
            _, spec = setting.step_spec(setting.stages[-1])  # a pass has at most a GPU's share of the step
            own = replace(setting, micro_tokens=spec.micro_tokens * spec.context)
            return estimate(own, request.calibration, capacity)
        return estimate_max_microbatch(setting, request.calibration, capacity)

    by_stage = any(stage.batch_tokens for stage in given.config.schedule.stages)
    if "batch.tokens" in explicit or by_stage or len(base.stages) > 1:
        check_batch_divides(base)
        return estimated(base)
    step: StepEstimate | None = None
    # The best batch depends on the tokens of the run, and these on the speed, which depends a little on the batch.
    tokens = batch_tokens(optimal_tokens(LAW, matmul_params(base.model)), request.sequence, request.readers)
    for _ in range(2):
        stages = (replace(base.stages[0], sequence_length=request.sequence, tokens=tokens),)
        micro = base.micro_tokens if "batch.micro_tokens" in explicit else tokens // request.readers
        step = estimated(replace(base, stages=stages, micro_tokens=micro))
        lengths = run_length(request, step)
        if lengths is not None:
            tokens = batch_tokens(lengths[0][1], request.sequence, request.readers)
    assert step is not None
    return step


def _check_memory(
    request: PlanRequest, requested: StepEstimate
) -> tuple[StepEstimate | None, Answer, list[str]]:
    """Return (the run that is possible or None, the verdict based on memory only, the reasons)."""
    capacity, host_bytes = gib(request.card.memory_bytes), request.card.host_bytes
    low, expected, high = requested.memory_bytes
    needs = f"{gib(expected)} ({gib_range(low, high)})"
    if requested.fits == "fits" and requested.fits_host(host_bytes):
        return (
            requested,
            "yes",
            [f"it fits: {needs} of {capacity}, {requested.setting.micro_tokens:,} tokens per pass"],
        )
    lacking = [f"as requested, it needs {needs}; the card has {capacity}"]
    if not requested.fits_host(host_bytes):
        lacking.append(
            f"that is too much for the host: {host_memory_text(requested.setting.host_items(host_bytes), host_bytes)}"
        )
    # The run does not fit as set by the user, so these options may be changed too.
    request = request.with_options({})
    start = with_max_microbatch_unless_set(request, requested.setting)
    changed, faster = best_that_fits(request, start)
    if changed is not None:
        reasons = [*lacking, f"it fits with {_differences(requested, changed)}"]
        if changed.setting.host_memory:
            reasons.append(f"it needs {host_memory_text(changed.setting.host_items(host_bytes), host_bytes)}")
        if faster is not None:
            reasons.append(f"faster, with more rounding or changes: {_differences(requested, faster)}")
        return changed, "yes-if", reasons
    possible = (s for s in combinations(request, start) if minimum_memory(request, s).fits != "no")
    for step in itertools.chain([requested], (fastest_that_fits(request, setting) for setting in possible)):
        fits = step.fits == "tight" and step.fits_host(host_bytes)
        if fits and not is_refused(request, step.setting):
            _, expected, high = step.memory_bytes
            text = f"it needs {gib(expected)} as expected, but {gib(high)} at the high end of the range"
            changes = _differences(requested, step)
            return step, "yes-if", [f"{text}{f', with {changes}' if changes else ''}: try it out"]
    smallest = minimum_over_changes(request, start)
    needed = f"{gib(smallest.memory_bytes[1])}, at most {gib(smallest.memory_bytes[2])}"
    changes = _differences(requested, smallest)
    least = f"with all memory-saving options together ({changes}) it still needs {needed}"
    if not smallest.fits_host(host_bytes):
        least += f", and {host_memory_text(smallest.setting.host_items(host_bytes), host_bytes)}"
    return None, "no", [*lacking, least]


def host_memory_text(items: Mapping[str, int], available: int | None) -> str:
    """Return the page-locked host memory of a run as text. available: the host's memory, if it is known."""
    parts = ", ".join(f"{item} {gib(size)}" for item, size in items.items())
    of = "" if available is None else f" of {gib(available)} that programs can use"
    return f"{gib(sum(items.values()))} of the host's memory{of}: {parts}"


def _differences(requested: StepEstimate, changed: StepEstimate) -> str:
    """Return the changed options and their effect on speed as text; "" without changes."""
    before, after = requested.setting, changed.setting
    changes = [
        f"{option} {str(getattr(after, field)).lower()}"
        for option, field in CHANGED_OPTIONS
        if getattr(after, field) != getattr(before, field)
    ]
    if after.copies == "use" and before.copies == "step":
        changes.append("--precision.weight_cache false")
    if after.sharded and not before.sharded:
        changes.append(f"sharding over the {after.gpus} GPUs (--parallel.mode shard)")
    if after.sequence_length != before.sequence_length:
        changes.append(f"rows of {after.sequence_length:,} tokens")
    if after.micro_tokens != before.micro_tokens:
        changes.append(f"{after.micro_tokens:,} tokens per pass")
    speed = changed.tokens_per_second[1] / requested.tokens_per_second[1]
    return f"{', '.join(changes)}, at {speed:.0%} of the requested speed" if changes else ""


def _out_of_reach(request: PlanRequest, step: StepEstimate) -> str:
    """Return the reason why no training is possible in the budget."""
    budget = request.budget
    if budget.kind == "loss":
        floor = bpb(request, step.setting, 1e15)[1]
        return (
            f"{budget.value:g} bits per byte is out of reach: a model of this size is expected to end above "
            f"{floor:.3f} after any number of tokens"
        )
    seconds = pretrain_seconds(request)
    if seconds is None or run_length(request, step) is not None:
        assert request.given is not None
        if request.unique_tokens is None:
            return TOO_SMALL
        unlimited = make_candidate(replace(request, unique_tokens=None), request.given, step)
        return TOO_SMALL if unlimited is None else text_too_small(request)
    return f"{too_short(request, seconds)}, and a step {duration(step.step_seconds)}"


def _undertrained(request: PlanRequest, chosen: Candidate) -> tuple[str | None, bool]:
    """Return (message if the model is trained on too few tokens, else None; True if a smaller model is clearly better).

    Two models are compared by their loss above the law's limit, with the same optimizer and the same kind of stages.
    """
    optimal = optimal_tokens(LAW, chosen.weights)
    smaller = _better_smaller_model(request, chosen)
    # In a run that ends early, the text is too small, and more time is no help.
    if smaller is None and (chosen.tokens[1] >= FEW_TOKENS * optimal or ends_early(request, chosen)):
        return None, False
    text = f"it sees only {chosen.tokens[1] / chosen.params:.2g} tokens per parameter"
    if smaller is not None:
        text += (
            f" and is expected at {chosen.forecast[1]:.3f} bits per byte, while {smaller.shape.preset} "
            f"({count(smaller.params)}), trained in the same way, ends at {smaller.forecast[1]:.3f} in the same budget"
        )
    text += f"; this size is the best choice from {count(optimal)} tokens on"
    # A longer run has a larger batch, and so a different speed.
    unlimited = replace(
        request, budget=PlanBudget(), pretrain_seconds=None, unique_tokens=None, own_corpus=False
    )
    whole = judge(unlimited, with_remedies=False).chosen
    text += "" if whole is None else f", which take {duration(whole.seconds[1])}"
    return text, smaller is not None


def _better_smaller_model(request: PlanRequest, chosen: Candidate) -> Candidate | None:
    """Return the best smaller model in the same budget, trained in the same way, if its loss is clearly lower."""
    if request.budget.kind not in ("hours", "flops"):
        return None
    config = chosen.shape.config
    optim = {"name": chosen.setting.optimizer, "grad_clip": config.optim.grad_clip}
    optim |= optim_options(chosen.setting, config)
    without_model = replace(request, given=None, sequence_length=request.sequence)
    candidates = search(without_model.with_options({"optim": optim}), staged=len(chosen.setting.stages) > 1)
    smaller = [c for c in candidates if c.estimate.fits == "fits" and c.weights < chosen.weights]
    if not smaller:
        return None
    best = min(smaller, key=lambda c: c.loss[1])
    floor = LAW.E + LAW.offset
    return best if chosen.loss[1] - floor >= UNDERTRAINED * (best.loss[1] - floor) else None
