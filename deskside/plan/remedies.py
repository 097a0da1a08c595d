"""Remedies that make a model fit: each alone, and all combinations of the options of `deskside train`.

Each remedy is listed with the memory that it saves and its cost. The kinds:

- change: an option of `deskside train` for the same model. Only changes turn the verdict "no" into "yes-if".
- hardware: the same run on more or larger cards.
- other model: a smaller model.
- elsewhere: known remedies that deskside does not offer, listed for completeness.

Combinations are tried in the order of their cost. Options that only cost speed (activation checkpointing, loss chunks,
rows per pass, cached weights, sharding) are chosen by `candidates.fastest_that_fits` for every combination. The
combinations vary the other options: number format, optimizer, format of the stored weights, format and location of the
optimizer states, location of the gradients, sequence length. On memory, the verdict "no" means that none of them fits.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from deskside.budget.format_costs import LowFormat, Precision, quantized
from deskside.budget.host_memory import host_gradient_bytes, offloaded_activation_bytes
from deskside.budget.shape import num_params
from deskside.budget.sizes import Sizes
from deskside.budget.states import state_bytes
from deskside.budget.step_spec import (
    Checkpointing,
    GradientPlace,
    OptimizerName,
    StateFormat,
    WeightFormat,
)
from deskside.config import merge, presets
from deskside.config.model import ModelConfig
from deskside.facts.gpus import gpus
from deskside.plan.candidates import LADDER, MLP_CHUNK, fastest_that_fits
from deskside.plan.estimate import (
    Fits,
    Setting,
    StageSetting,
    StepEstimate,
    estimate_max_microbatch,
    options,
    pass_sizes,
    with_max_microbatch,
    with_precision,
)
from deskside.plan.request import DRIVER_SHARE, MAX_DEPTH, GivenModel, PlanRequest
from deskside.utils.errors import UsageError
from deskside.utils.format import count, gib

MIN_SEQUENCE_LENGTH = 512  # no remedy makes rows shorter than this
MAX_HALVINGS = 3  # of the sequence length
# Costs of changes, which only define the order of combinations. A shorter context costs more than any other change.
OFFLOAD_COST = HOST_GRADIENTS_COST = 1
OTHER_OPTIMIZER_COST, SMALL_STATES_COST, SMALL_WEIGHTS_COST = 1, 2, 4
RELEASED_GRADIENTS_COST = TINY_STATES_COST = 5
OTHER_FORMAT_COST, HALVED_ROWS_COST = 16, 32
RemedyKind = Literal["change", "hardware", "other model", "elsewhere"]
GPU_COUNTS = (2, 4, 8)  # numbers of cards that a remedy proposes
CHECKPOINTING_LEVELS: tuple[tuple[Checkpointing, str], ...] = (
    ("none", "nothing"),
    ("attention", "attention"),
    ("mlp", "the MLP"),
    ("block", "whole blocks"),
)
STATE_FORMATS: dict[StateFormat, str] = {
    "float32": "32 bits",
    "bfloat16": "16 bits",
    "8bit": "8 bits",
    "4bit": "4 bits",
}
FASTER_SHARE = 0.05  # by which a combination must be faster to be offered
MAX_NAMED_CARDS = 3  # examples of a larger card


@dataclass(frozen=True)
class Remedy:
    """One way to reduce the memory of the requested run, applied alone.

    Attributes:
        saves_bytes: Reduction of the expected memory; for a change, at the tokens per pass of the requested run.
        speed: Tokens per second relative to the requested run, with the largest micro-batch that fits with this remedy;
            None if not modelled.
        fits: The verdict on memory with this remedy; None if not modelled.
        costs: Disadvantages, as text.
        options: Configuration for `deskside train`.
    """

    what: str
    kind: RemedyKind
    saves_bytes: float
    speed: float | None
    fits: Fits | None
    costs: str
    options: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        can = self.kind != "elsewhere"
        saves = int(self.saves_bytes)
        return {**asdict(self), "saves_bytes": saves, "deskside_can": can, "source": "modelled"}


def remedies(request: PlanRequest, requested: StepEstimate) -> list[Remedy]:
    """Return every remedy that saves memory, each applied alone to the requested run; changes come first."""
    result = []
    for what, setting, costs in [*_one_row_per_pass(requested.setting), *_changes(requested.setting)]:
        only_smaller_passes = replace(requested.setting, micro_tokens=setting.micro_tokens) == setting
        trial = setting if only_smaller_passes else with_max_microbatch_unless_set(request, setting)
        trial_step = _estimate(request, trial)
        saves = requested.memory_bytes[1] - _estimate(request, setting).memory_bytes[1]
        if saves > 0:
            result.append(replace(_remedy(what, "change", requested, trial_step, costs), saves_bytes=saves))
    result += [*_hardware(request, requested), *_smaller_model(request, requested)]
    weights = requested.memory.items.get("weights", 0)
    costs = "deskside cannot do this yet; each layer's weights are transferred in each pass (as in llmq)"
    what = "weights in the host's memory"
    return [*result, Remedy(what, "elsewhere", float(weights), None, None, costs, {})]


def _remedy(what: str, kind: RemedyKind, requested: StepEstimate, tried: StepEstimate, costs: str) -> Remedy:
    return Remedy(
        what,
        kind,
        saves_bytes=requested.memory_bytes[1] - tried.memory_bytes[1],
        speed=tried.tokens_per_second[1] / requested.tokens_per_second[1],
        fits=tried.fits,
        costs=costs,
        options=options(tried.setting),
    )


def _estimate(request: PlanRequest, setting: Setting) -> StepEstimate:
    return estimate_max_microbatch(setting, request.calibration, request.card.memory_bytes)


def with_max_microbatch_unless_set(request: PlanRequest, setting: Setting) -> Setting:
    """Return the setting with the largest micro-batch, unless the request sets it explicitly.

    If nothing fits, the requested run has one row per pass. With a remedy, larger passes may fit again.
    """
    explicit = request.given is not None and "batch.micro_tokens" in request.given.explicit
    return setting if explicit else with_max_microbatch(setting)


def _one_row_per_pass(requested: Setting) -> Iterator[tuple[str, Setting, str]]:
    smallest = pass_sizes(requested)[-1]
    if smallest < requested.micro_tokens:
        yield (
            f"micro-batch of one row ({smallest:,} tokens per pass)",
            replace(requested, micro_tokens=smallest),
            "more passes per step; the batch and the results stay the same",
        )


def _changes(requested: Setting) -> Iterator[tuple[str, Setting, str]]:
    """Yield (description, setting, cost) of the other changes, at the micro-batch of the requested run."""
    levels = [level for level, _ in CHECKPOINTING_LEVELS]
    for level, what in CHECKPOINTING_LEVELS[levels.index(requested.activation_checkpointing) + 1 :]:
        cost = "recomputed in the backward pass"
        yield f"activation checkpointing of {what}", replace(requested, activation_checkpointing=level), cost
    whole = replace(requested, activation_checkpointing="block")
    if whole.can_offload_activations and not requested.activation_offloading:
        lean = replace(whole, activation_offloading=True)
        *_, (_, shape, spec) = lean.step_specs()
        yield (
            "activations of recomputed blocks in the host's memory",
            lean,
            f"{gib(offloaded_activation_bytes(Sizes(shape, spec)))} of the host's memory; transferred in each pass",
        )
    if whole.can_chunk_mlps and requested.mlp_chunk_tokens is None and whole.sequence_length > MLP_CHUNK:
        yield (
            f"MLPs of recomputed blocks for {MLP_CHUNK:,} tokens at a time",
            replace(whole, mlp_chunk_tokens=MLP_CHUNK),
            "recomputed in the backward pass; weight gradients are added up over the chunks",
        )
    for chunk in (2048, 512):
        if chunk < min(requested.loss_chunk_tokens, requested.micro_tokens):
            yield (
                f"logits of {chunk:,} tokens at a time",
                replace(requested, loss_chunk_tokens=chunk),
                "more and smaller products in the loss",
            )
            break
    if requested.has_optional_cache:
        yield (
            "weights converted at each use",
            replace(requested, copies="use"),
            "--precision.weight_cache false: no BF16 copies are kept from pass to pass",
        )
    if requested.optimizer == "adamw":
        yield (
            "Muon instead of AdamW",
            replace(requested, optimizer="muon", master_weights=False),
            "one state per block weight instead of two; it also needs fewer tokens for the same loss",
        )
    for change_cost, lean in _optimizers(requested, (requested.optimizer,)):
        if change_cost == 0:
            continue
        if lean.weights != requested.weights:
            if lean == replace(requested, weights=lean.weights):
                yield (
                    "weights and gradients in 16 bits",
                    lean,
                    "updates and sums of gradients are rounded stochastically",
                )
            continue
        if lean.gradients != requested.gradients:
            if lean == replace(requested, gradients=lean.gradients):
                yield _gradients_change(lean)
            continue
        if lean.offload_optimizer:
            *_, (_, shape, spec) = lean.step_specs()
            host_bytes = gib(state_bytes(Sizes(shape, spec)).streamed)
            in_format = "" if lean.states == requested.states else f", in {STATE_FORMATS[lean.states]}"
            yield (
                f"optimizer states in the host's memory{in_format}",
                lean,
                f"{host_bytes} of the host's memory; they are transferred in each step",
            )
        else:
            yield f"optimizer states in {STATE_FORMATS[lean.states]}", lean, "states are rounded at each step"
    if requested.gpus > 1 and requested.shardable and not requested.sharded:
        yield (
            f"sharding over the {requested.gpus} GPUs",
            replace(requested, sharded=True),
            "weights and gradients are sent between the GPUs",
        )
    for halvings in _possible_halvings(requested)[1:]:
        cut = _with_halved_rows(requested, halvings)
        yield (
            f"rows of {cut.sequence_length:,} tokens",
            cut,
            "the model is not trained on longer contexts",
        )


def _gradients_change(lean: Setting) -> tuple[str, Setting, str]:
    """Return (description, setting, cost) of gradients that do not wait on the GPU."""
    if lean.gradients == "released":
        costs = "one pass per step; gradients are not clipped, and a bad step is skipped only in part"
        return "weights updated during the backward pass", lean, costs
    *_, (_, shape, spec) = lean.step_specs()
    needed = gib(host_gradient_bytes(Sizes(shape, spec)))
    return (
        "gradients in the host's memory",
        lean,
        f"{needed} of the host's memory; transferred in each pass",
    )


def _hardware(request: PlanRequest, requested: StepEstimate) -> Iterator[Remedy]:
    """Yield the smallest number of cards that fits with sharding, and the smallest card that fits with changes."""
    setting = requested.setting
    for number in GPU_COUNTS:
        row = setting.sequence_length * number
        if (
            not setting.shardable
            or number <= setting.gpus
            or any(stage.tokens % row for stage in setting.stages)
        ):
            continue
        tried = fastest_that_fits(
            request, with_max_microbatch_unless_set(request, replace(setting, gpus=number, sharded=True))
        )
        if tried.fits == "fits":
            more = number - setting.gpus
            costs = f"{more} more card{'s' if more > 1 else ''}"
            yield _remedy(f"{number} of this card, sharded", "hardware", requested, tried, costs)
            break
    needed = minimum_over_changes(request, with_max_microbatch_unless_set(request, setting)).memory_bytes[2]
    card = request.card  # compared by its total memory, not by the memory that is free now
    card_bytes = card.memory_bytes if card.gpu is None else max(card.memory_bytes, card.gpu.memory_bytes)
    larger = [
        gpu
        for gpu in gpus()
        if gpu.memory_bytes > card_bytes
        and not gpu.laptop
        and gpu.memory_bytes * (1 - DRIVER_SHARE) >= needed
    ]
    if larger and needed > card.memory_bytes:
        smallest = min(gpu.memory_bytes for gpu in larger)
        names = [gpu.name for gpu in larger if gpu.memory_bytes == smallest][:MAX_NAMED_CARDS]
        what = f"a card with {smallest / 2**30:.0f} GiB, such as {', '.join(names)}"
        yield Remedy(what, "hardware", 0.0, None, None, "another card", {})


def _smaller_model(request: PlanRequest, requested: StepEstimate) -> Iterator[Remedy]:
    """Yield the largest depth of the depth series that fits."""
    requested_model = requested.setting.model
    kept = {key: getattr(requested_model, key) for key in ("vocab_size", "max_position_embeddings")}
    low, high, best = 1, MAX_DEPTH // 2, None
    while low <= high:  # depth 2 x middle; memory grows with depth
        middle = (low + high) // 2
        model = ModelConfig(**{**presets.depth(2 * middle)["model"], **kept})
        tried = fastest_that_fits(
            request, with_max_microbatch_unless_set(request, replace(requested.setting, model=model))
        )
        if tried.fits == "fits":
            best, low = (2 * middle, tried), middle + 1
        else:
            high = middle - 1
    # With other options a larger model than the requested one may fit. Then the changes are the remedy.
    if best is not None and num_params(best[1].setting.model) < num_params(requested_model):
        depth, tried = best
        size = count(num_params(tried.setting.model))
        what = f"d{depth} ({size}), the largest of the depth series that fits"
        yield _remedy(what, "other model", requested, tried, "another, smaller model")


def combinations(request: PlanRequest, start: Setting) -> Iterator[Setting]:
    """Yield the setting with every combination of changes, in the order of their cost, starting with no change."""
    in_formats = [(0, start)]
    if request.given is not None:
        others = _formats(start, request.given, request.card.native)
        in_formats += [(OTHER_FORMAT_COST, other) for other in others]
    combined = []
    for (format_cost, base), halvings in itertools.product(in_formats, _possible_halvings(start)):
        for optimizer_cost, setting in _optimizers(_with_halved_rows(base, halvings)):
            combined.append((format_cost + HALVED_ROWS_COST * halvings + optimizer_cost, setting))
    combined.sort(
        key=lambda pair: pair[0]
    )  # the cost of a format or of shorter rows exceeds that of all others
    yield from (setting for _, setting in combined)


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
            if step.fits == "fits" and step.fits_host(request.card.host_bytes):
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
    cost += _states_cost(start, setting.states)
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


def _optimizers(setting: Setting, names: tuple[OptimizerName, ...] = ()) -> Iterator[tuple[int, Setting]]:
    """Yield (cost, setting) for every optimizer, format of its states and their location (GPU or host).

    names: the optimizers to try; default: the setting's own and Muon.
    """
    for name in dict.fromkeys(names or (setting.optimizer, "muon")):
        base = (
            setting if name == setting.optimizer else replace(setting, optimizer="muon", master_weights=False)
        )
        optimizer_cost = OTHER_OPTIMIZER_COST if name != setting.optimizer else 0
        small: tuple[StateFormat, ...] = ("bfloat16",) if base.sharded else ("8bit", "4bit")
        if name == "muon" and not base.sharded:
            small = ("8bit",)  # Muon's momentum takes 16 bits in both formats
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
            cost = optimizer_cost + _states_cost(base, states)
            cost += OFFLOAD_COST * (offload != base.offload_optimizer)
            cost += SMALL_WEIGHTS_COST * (weights != base.weights)
            cost += {"host": HOST_GRADIENTS_COST, "released": RELEASED_GRADIENTS_COST}.get(gradients, 0) * (
                gradients != base.gradients
            )
            yield (
                cost,
                replace(base, weights=weights, states=states, offload_optimizer=offload, gradients=gradients),
            )


def _states_cost(before: Setting, states: StateFormat) -> int:
    if states == before.states:
        return 0
    return TINY_STATES_COST if states == "4bit" else SMALL_STATES_COST


def _may_release(setting: Setting) -> bool:
    """Return True if gradients may be released: a step is one pass, and gradients are not clipped (Muon's default)."""
    same_batch = len({stage.tokens for stage in setting.stages}) == 1
    return same_batch and setting.tokens_per_step == setting.micro_tokens and setting.optimizer == "muon"


def _possible_halvings(setting: Setting) -> list[int]:
    """Return how often the sequence length can be halved: [0, 1, ...]."""
    length, halvings = setting.sequence_length, [0]
    while len(halvings) <= MAX_HALVINGS and length % 2 == 0 and length // 2 >= MIN_SEQUENCE_LENGTH:
        length //= 2
        halvings.append(len(halvings))
    return halvings


def _with_halved_rows(setting: Setting, halvings: int) -> Setting:
    if not halvings:
        return setting
    length = setting.sequence_length // 2**halvings
    stages = tuple(
        StageSetting(s.share, min(s.sequence_length, length), s.tokens, s.window) for s in setting.stages
    )
    return replace(setting, stages=stages, micro_tokens=max(length, setting.micro_tokens))
