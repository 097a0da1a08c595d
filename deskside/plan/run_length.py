"""The length of a pretraining run in its budget: tokens, seconds, tokens per step and sequence-length stages."""

import math

from deskside.budget.loss import LAW, USEFUL_EPOCHS
from deskside.budget.scaling import batch_on_gpus, best_batch_tokens
from deskside.budget.shape import matmul_params
from deskside.config.sections import can_share_rows
from deskside.plan.estimate import Range, StepEstimate
from deskside.plan.expected_loss import optimal_tokens, tokens_to_reach
from deskside.plan.request import MAX_BUDGET, TIME_SHARES, PlanRequest
from deskside.plan.setting import Setting, StageSetting
from deskside.utils.format import count, duration

STAGES = ((0.35, 4), (0.35, 2), (0.3, 1))  # share of the run, divisor of the sequence length
MIN_STAGE_TOKENS = 256
MIN_STEPS = 200  # the batch is chosen small enough for about this many steps
MAX_SECONDS = 365 * 86400.0  # longer runs get the verdict "no"
TOO_LONG = "that is more than a year of training: it needs more or faster cards, or a smaller goal"
TOO_SMALL = "the budget is too small to learn anything; give more of it"
# Seconds before the first step if not measured. In 74 runs on the host of an H200 they were 6 to 25 s, 16 to 25 s with
# empty caches (docs/log.md, 2026-11-30); a desktop's processor compiles more slowly.
SETUP_SECONDS = 30.0


def run_length(request: PlanRequest, step: StepEstimate, end: int = 1) -> tuple[Range, Range] | None:
    """Return (tokens, seconds) of the pretraining run that the budget allows, with their ranges. None if its hours
    allow no step or the requested loss is out of reach. end: as in `candidates.search`."""
    setup, (slow, expected, fast) = setup_seconds(request), step.tokens_per_second
    seconds, limit = pretrain_seconds(request), most_tokens(request, step.setting)
    if seconds is not None:
        training = seconds - setup
        if training * expected < step.setting.tokens_per_step:
            return None
        low, middle, high = (min(training * speed, limit) for speed in (slow, expected, fast))
        ends = (min(seconds, setup + limit / speed) for speed in (fast, expected, slow))
        return (low, middle, high), tuple(ends)  # type: ignore[return-value]
    tokens = budget_tokens(request, step.setting, end)
    if tokens is None:
        return None
    tokens = min(tokens, limit)
    return (tokens, tokens, tokens), (setup + tokens / fast, setup + tokens / expected, setup + tokens / slow)


def most_tokens(request: PlanRequest, setting: Setting) -> float:
    """Return the tokens of the longest run that a plan proposes: of `USEFUL_EPOCHS` epochs, but at least one step.

    It is infinite if the text's size is unknown, the user sets the tokens, or the model is fine-tuned.
    """
    if request.unique_tokens is None or request.budget.kind == "tokens" or not request.pretrains:
        return math.inf
    return max(USEFUL_EPOCHS * request.unique_tokens, setting.tokens_per_step)


def budget_tokens(request: PlanRequest, setting: Setting, end: int) -> float | None:
    """Return the tokens that a budget other than hours allows, or without one the compute-optimal tokens. None if the
    requested loss is out of reach."""
    budget = request.budget
    if budget.kind is None:
        return optimal_tokens(LAW, matmul_params(setting.model))
    if budget.kind == "tokens":
        return budget.value
    if budget.kind == "flops":
        return min(budget.value / setting.flops_per_token, MAX_BUDGET["tokens"])
    needed = tokens_to_reach(request, setting, budget.value, end)
    return None if needed is None or needed > most_tokens(request, setting) else needed


def pretrain_seconds(request: PlanRequest) -> float | None:
    """Return the wall-clock seconds of the pretraining run, set-up included, under a budget of hours; else None."""
    if request.pretrain_seconds is not None:
        return request.pretrain_seconds
    if request.budget.kind != "hours":
        return None
    return request.budget.value * 3600 * TIME_SHARES["pretraining"]


def setup_seconds(request: PlanRequest) -> float:
    """Return the seconds before the first step: measured on this machine, else `SETUP_SECONDS`."""
    return SETUP_SECONDS if request.setup_seconds is None else request.setup_seconds


def batch_tokens(total_tokens: float, sequence_length: int, readers: int) -> int:
    """Return the tokens per step for a run of `total_tokens`, as a power of two of rows per reader.

    readers: as in `PlanRequest.readers`.
    """
    best = best_batch_tokens(max(1.0, total_tokens))
    return batch_on_gpus(best, readers, sequence_length, total_tokens / MIN_STEPS)


def stages(request: PlanRequest, tokens: int) -> tuple[StageSetting, ...]:
    """Return stages of a quarter, half and all of the sequence length, or one stage if a quarter is too short or cannot
    be shared by the GPUs of a row.

    Attention is cheaper over shorter rows.
    """
    sequence_length = request.sequence
    shortest, rest = divmod(sequence_length, STAGES[0][1])
    if shortest < MIN_STAGE_TOKENS or rest or not can_share_rows(request.context, shortest):
        return (StageSetting(1.0, sequence_length, tokens),)
    return tuple(StageSetting(share, sequence_length // divisor, tokens) for share, divisor in STAGES)


def too_short(request: PlanRequest, seconds: float) -> str:
    """Return the message for a budget of hours that is too short."""
    return (
        f"the time is too short: {duration(seconds)} of pretraining, of which set-up takes about "
        f"{duration(setup_seconds(request))}"
    )


def text_too_small(request: PlanRequest) -> str:
    """Return the reason why a text, not the budget, is too small for any model."""
    unique = request.unique_tokens
    assert unique is not None
    return (
        f"the text is too small: a model learns nothing from {count(unique)} tokens, which are worth reading "
        f"{USEFUL_EPOCHS} times at most (arXiv 2305.16264); {more_text()}"
    )


def more_text(own_corpus: bool = False) -> str:
    """Return what helps where a text is too small. own_corpus: whether the mode --own-corpus would help."""
    mode = ", --own-corpus" if own_corpus else ""
    return f"what helps: more text{mode}, or fine-tuning a published model (deskside sft)"
