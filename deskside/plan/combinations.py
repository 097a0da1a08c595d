"""All combinations of the memory-saving options of `deskside train`, and the one to run.

Combinations are tried in the order of their cost. Options that only cost speed (activation checkpointing, chunks, rows
per pass, cached weights, sharding) are chosen by `fastest_fit.py` for every combination. The combinations vary the
other options: number format, optimizer, format of the stored weights, format and location of the optimizer states,
location of the gradients, sequence length. On memory, the verdict "no" means that none of them fits.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from deskside.budget.format_costs import LowFormat, Precision, quantized
from deskside.budget.step_spec import (
    QUANTIZED_STATES,
    GradientPlace,
    OptimizerName,
    StateFormat,
    WeightFormat,
)
from deskside.config import merge
from deskside.config.dimensions import check_dimensions
from deskside.config.recipes import recipe_named
from deskside.config.sections import can_share_rows
from deskside.plan.estimate import StepEstimate, estimate_max_microbatch
from deskside.plan.fastest_fit import LADDER, MLP_CHUNK, fastest_that_fits, is_refused
from deskside.plan.given_model import GivenModel
from deskside.plan.request import PlanRequest
from deskside.plan.setting import Setting, StageSetting, pass_sizes, with_precision
from deskside.utils.errors import UsageError

MIN_SEQUENCE_LENGTH = 512  # no remedy makes rows shorter than this
MAX_HALVINGS = 3  # of the sequence length
# Costs of changes, which only define the order of combinations. A shorter context costs more than any other change.
OFFLOAD_COST = HOST_GRADIENTS_COST = 1
OTHER_OPTIMIZER_COST, SMALL_STATES_COST, SMALL_WEIGHTS_COST = 1, 2, 4
RELEASED_GRADIENTS_COST = TINY_STATES_COST = 5
OTHER_FORMAT_COST, HALVED_ROWS_COST = 16, 32
FASTER_SHARE = 0.05  # a combination is offered if it is faster by more than this share


def combinations(request: PlanRequest, start: Setting) -> Iterator[Setting]:
    """Yield the setting with every combination of changes, in the order of their cost, starting with no change."""
    in_formats = [(0, start)]
    if request.given is not None:
        others = _formats(start, request.given, request.card.native)
        in_formats += [(OTHER_FORMAT_COST, other) for other in others]
    combined = []
    for format_cost, base in in_formats:
        for halvings in possible_halvings(base):
            for optimizer_cost, setting in optimizer_changes(with_halved_rows(base, halvings)):
                combined.append((format_cost + HALVED_ROWS_COST * halvings + optimizer_cost, setting))
    # The cost of another format exceeds that of all smaller changes together, and that of shorter rows exceeds both.
    combined.sort(key=lambda pair: pair[0])
    yield from (setting for _, setting in combined if not is_refused(request, setting))


def best_that_fits(request: PlanRequest, start: Setting) -> tuple[StepEstimate | None, StepEstimate | None]:
    """Return (the combination to run, a faster one or None), of those that fit at the high end of the memory range.

    The combination to run changes as little as possible of what determines the loss (number format, rows, optimizer,
    rounding of weights and states), and is the fastest one with these; None if nothing fits. The faster one has the
    same number format and rows, and is faster by more than `FASTER_SHARE`.
    """
    fitting: list[StepEstimate] = []
    for setting in combinations(request, start):
        if fitting and _task(setting) != _task(fitting[0].setting):
            break
        if minimum_memory(request, setting).fits == "fits":
            step = fastest_that_fits(request, setting)
            fits = step.fits == "fits" and step.fits_host(request.card.host_bytes)
            if fits and not is_refused(request, step.setting):
                fitting.append(step)
    if not fitting:
        return None, None
    least = min(_change_of_loss(start, step.setting) for step in fitting)
    chosen = max(
        (step for step in fitting if _change_of_loss(start, step.setting) == least),
        key=lambda step: step.tokens_per_second[1],
    )
    fastest = max(fitting, key=lambda step: step.tokens_per_second[1])
    is_faster = fastest.tokens_per_second[1] > (1 + FASTER_SHARE) * chosen.tokens_per_second[1]
    return chosen, fastest if is_faster else None


def _task(setting: Setting) -> tuple[Precision, int]:
    return setting.precision, setting.sequence_length


def _change_of_loss(start: Setting, setting: Setting) -> int:
    """Return the cost of the changes that have an effect on the loss of each step."""
    cost = OTHER_OPTIMIZER_COST * (setting.optimizer != start.optimizer)
    cost += _states_cost(start, setting.states, setting.optimizer)
    cost += SMALL_WEIGHTS_COST * (setting.weights != start.weights)
    return cost + RELEASED_GRADIENTS_COST * (
        "released" in (setting.gradients, start.gradients) and setting.gradients != start.gradients
    )


def minimum_memory(request: PlanRequest, setting: Setting) -> StepEstimate:
    """Return the variant of a setting, among those of `fastest_that_fits`, that needs least memory."""
    checkpointing, chunk = LADDER[-1]
    lean = replace(
        setting,
        micro_tokens=min(setting.micro_tokens, pass_sizes(setting)[-1]),
        activation_checkpointing=checkpointing,
        loss_chunk_tokens=min(chunk, setting.loss_chunk_tokens),
        sharded=setting.sharded or (setting.gpus > 1 and setting.shardable),
    )
    if lean.has_optional_cache:
        lean = replace(lean, copies="use")
    if lean.can_offload_activations:
        lean = replace(lean, activation_offloading=True)
    if lean.can_chunk_mlps and lean.sequence_length > MLP_CHUNK:
        lean = replace(lean, mlp_chunk_tokens=MLP_CHUNK)
    return estimate_max_microbatch(lean, request.calibration, request.card.memory_bytes)


def minimum_over_changes(request: PlanRequest, start: Setting, same_task: bool = False) -> StepEstimate:
    """Return the combination that needs least memory. same_task: sequence length and number format do not change."""
    return min(
        (
            minimum_memory(request, setting)
            for setting in combinations(request, start)
            if not same_task
            or (setting.sequence_length, setting.precision) == (start.sequence_length, start.precision)
        ),
        key=lambda step: step.memory_bytes[1],
    )


def _formats(start: Setting, given: GivenModel, native: frozenset[LowFormat]) -> Iterator[Setting]:
    """Yield the setting in another number format: FP8 instead of BF16 if the card supports it, or BF16 instead of a
    lower format. A format is skipped if the configuration excludes it, as sizes do that 16 does not divide."""
    other: Precision | None = None
    if quantized(start.precision):
        other = "bf16"
    elif start.precision == "bf16" and "fp8" in native:
        other = "fp8-delayed"
    if other is None:
        return
    try:
        config = merge.build([*given.layers, {"precision": {"name": other}}])
    except UsageError:
        return
    yield with_precision(start, config, other, native)


def optimizer_changes(
    setting: Setting, names: tuple[OptimizerName, ...] = ()
) -> Iterator[tuple[int, Setting]]:
    """Yield (cost, setting) for every optimizer, format of its states and their location (GPU or host).

    names: the optimizers to try; default: the setting's own and Muon.
    """
    for name in dict.fromkeys(names or (setting.optimizer, "muon")):
        base = (
            setting if name == setting.optimizer else replace(setting, optimizer="muon", master_weights=False)
        )
        optimizer_cost = OTHER_OPTIMIZER_COST if name != setting.optimizer else 0
        small: tuple[StateFormat, ...] = ("bfloat16",) if base.sharded else QUANTIZED_STATES
        if name == "muon" and not base.sharded:
            small = ("bfloat16", "8bit")  # Muon's momentum takes 8 bits with 4bit too
        full_training = base.adapter is None and not base.sharded and base.precision != "fp32"
        all_weights: tuple[WeightFormat, ...] = ("bfloat16",) if full_training else ()
        places: tuple[GradientPlace, ...] = (base.gradients,)
        if base.gradients == "device" and base.adapter is None and base.gpus == 1:
            places = ("device", "host", "released") if _may_release(base) else ("device", "host")
        for weights, states, offload, gradients in itertools.product(
            dict.fromkeys((base.weights, *all_weights)),
            dict.fromkeys((base.states, *small)),
            dict.fromkeys((base.offload_optimizer, not base.sharded or base.offload_optimizer)),
            places,
        ):
            cost = optimizer_cost + _states_cost(base, states, name)
            cost += OFFLOAD_COST * (offload != base.offload_optimizer)
            cost += SMALL_WEIGHTS_COST * (weights != base.weights)
            cost += {"host": HOST_GRADIENTS_COST, "released": RELEASED_GRADIENTS_COST}.get(gradients, 0) * (
                gradients != base.gradients
            )
            yield (
                cost,
                replace(base, weights=weights, states=states, offload_optimizer=offload, gradients=gradients),
            )


def _states_cost(before: Setting, states: StateFormat, optimizer: OptimizerName) -> int:
    if states == before.states:
        return 0
    # The loss of Muon with momentum in 8 bits was not measured.
    return (
        TINY_STATES_COST if states == "4bit" or (states, optimizer) == ("8bit", "muon") else SMALL_STATES_COST
    )


def _may_release(setting: Setting) -> bool:
    """Return True if gradients may be released: a step is one pass, and gradients are not clipped (Muon's default)."""
    same_batch = len({stage.tokens for stage in setting.stages}) == 1
    return same_batch and setting.tokens_per_step == setting.micro_tokens and setting.optimizer == "muon"


def possible_halvings(setting: Setting) -> list[int]:
    """Return how often the sequence length can be halved: [0, 1, ...]."""
    length, halvings = setting.sequence_length, [0]
    while len(halvings) <= MAX_HALVINGS and length % 2 == 0 and length // 2 >= MIN_SEQUENCE_LENGTH:
        length //= 2
        if not _may_have_rows(setting, length):
            break
        halvings.append(len(halvings))
    return halvings


def _may_have_rows(setting: Setting, length: int) -> bool:
    """Return True if the recipe and the GPUs that share rows allow rows of this length."""
    if not can_share_rows(setting.context, length):
        return False
    try:
        check_dimensions(recipe_named(setting.precision), setting.model, sequence_lengths=[length])
    except ValueError:
        return False
    return True


def with_halved_rows(setting: Setting, halvings: int) -> Setting:
    if not halvings:
        return setting
    length = setting.sequence_length // 2**halvings
    stages = tuple(
        StageSetting(s.share, min(s.sequence_length, length), s.tokens, s.window) for s in setting.stages
    )
    return replace(setting, stages=stages, micro_tokens=max(length, setting.micro_tokens))
