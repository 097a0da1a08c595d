"""Remedies that make a model fit: each alone, and every combination of the changes that `deskside train` offers.

Remedies are listed with what they save and cost. Their kinds, from near to far:
- change: an option of `deskside train`; the model stays what was asked for. Only these turn a no into a yes-if.
- hardware: the same run on more or larger cards.
- other model: a smaller one.
- elsewhere: known remedies that deskside does not offer. They are listed so that the answer is complete.

Combinations are tried from the least change to the greatest. Options that only cost speed (recomputation, loss chunks,
rows per pass, cached weights, sharding) are the ladder of `candidates.fastest`, which every combination goes through.
The combinations vary what changes more than that: the number format, the optimizer, the format and place of its states,
and the length of the rows. A verdict of "no" means that none of them fits.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from deskside.budget.format_costs import LowFormat, Precision, quantized
from deskside.budget.shape import num_params
from deskside.budget.sizes import Sizes
from deskside.budget.states import state_bytes
from deskside.budget.step_spec import Checkpointing, OptimizerName, StateFormat
from deskside.config import merge, presets
from deskside.config.model import ModelConfig
from deskside.facts.gpus import gpus
from deskside.plan.candidates import LADDER, fastest
from deskside.plan.estimate import (
    Fits,
    Setting,
    StageSetting,
    StepEstimate,
    fitted,
    in_precision,
    max_microbatch,
    options,
    pass_sizes,
)
from deskside.plan.request import DEEPEST, DRIVER_SHARE, Given, PlanRequest
from deskside.utils.errors import UsageError
from deskside.utils.format import count, gib

SHORTEST = 512  # tokens; rows are not cut shorter than this to make something fit
MOST_CUTS = 3  # times half the length
# What a change costs beside speed, as an order: a halving of the rows more than all that leaves the model's context.
OTHER_OPTIMIZER, SMALL_STATES, ON_HOST, OTHER_FORMAT, HALF_ROWS = 1, 2, 3, 7, 8
Kind = Literal["change", "hardware", "other model", "elsewhere"]
GPU_COUNTS = (2, 4, 8)
RUNGS: tuple[tuple[Checkpointing, str], ...] = (
    ("none", "nothing"),
    ("attention", "attention"),
    ("mlp", "the MLP"),
    ("block", "whole blocks"),
)
FORMATS: dict[StateFormat, str] = {"float32": "32 bits", "bfloat16": "16 bits", "8bit": "8 bits"}
NAMED_CARDS = 3


@dataclass(frozen=True)
class Remedy:
    """saves_bytes: of the memory that is expected to be needed, at no more tokens per pass than in the run as asked.
    speed, fits, options: with this remedy alone, and as many tokens per pass as it makes room for. speed: tokens per
    second against the run as asked for, None where that is not modelled; options: what `deskside train` takes."""

    what: str
    kind: Kind
    saves_bytes: float
    speed: float | None
    fits: Fits | None
    costs: str
    options: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        can = self.kind != "elsewhere"
        saves = int(self.saves_bytes)
        return {**asdict(self), "saves_bytes": saves, "deskside_can": can, "source": "modelled"}


def remedies(request: PlanRequest, asked: StepEstimate) -> list[Remedy]:
    """Return every remedy that saves memory, changes first, each applied alone to what was asked for."""
    found = []
    for what, setting, costs in [*_one_row(asked.setting), *_changes(asked.setting)]:
        one_row = replace(asked.setting, micro_tokens=setting.micro_tokens) == setting
        tried = _estimate(request, setting if one_row else max_microbatch_unless_set(request, setting))
        saves = asked.memory_bytes[1] - _estimate(request, setting).memory_bytes[1]
        if saves > 0:
            found.append(replace(_remedy(what, "change", asked, tried, costs), saves_bytes=saves))
    found += [*_hardware(request, asked), *_smaller_model(request, asked)]
    # float32 weights, gradients and states against bfloat16 ones.
    halved = [asked.memory.items.get(item, 0) for item in ("weights", "gradients", "optimizer")]
    costs = "deskside keeps float32 master weights; small updates are rounded away without them"
    what = "weights, gradients and states in 16 bits"
    return [*found, Remedy(what, "elsewhere", 0.5 * sum(halved), None, None, costs, {})]


def _remedy(what: str, kind: Kind, asked: StepEstimate, tried: StepEstimate, costs: str) -> Remedy:
    return Remedy(
        what,
        kind,
        saves_bytes=asked.memory_bytes[1] - tried.memory_bytes[1],
        speed=tried.tokens_per_second[1] / asked.tokens_per_second[1],
        fits=tried.fits,
        costs=costs,
        options=options(tried.setting),
    )


def _estimate(request: PlanRequest, setting: Setting) -> StepEstimate:
    return fitted(setting, request.calibration, request.card.memory_bytes)


def max_microbatch_unless_set(request: PlanRequest, setting: Setting) -> Setting:
    """Return the setting with the largest micro-batch to start fitting from, unless the request sets it. A run that was
    cut to one row because nothing fitted can so use the memory that a remedy frees."""
    by_hand = request.given is not None and "batch.micro_tokens" in request.given.own
    return setting if by_hand else max_microbatch(setting)


def _one_row(asked: Setting) -> Iterator[tuple[str, Setting, str]]:
    smallest = pass_sizes(asked)[-1]
    if smallest < asked.micro_tokens:
        yield (
            f"micro-batch of one row ({smallest:,} tokens per pass)",
            replace(asked, micro_tokens=smallest),
            "more passes per step; the batch and what is learned stay the same",
        )


def _changes(asked: Setting) -> Iterator[tuple[str, Setting, str]]:
    """Everything else that can be changed, at the passes of the run as asked for."""
    for rung, what in RUNGS[[name for name, _ in RUNGS].index(asked.activation_checkpointing) + 1 :]:
        cost = "recomputed in the backward pass"
        yield f"activation checkpointing of {what}", replace(asked, activation_checkpointing=rung), cost
    for chunk in (2048, 512):
        if chunk < min(asked.loss_chunk_tokens, asked.micro_tokens):
            yield (
                f"logits of {chunk:,} tokens at a time",
                replace(asked, loss_chunk_tokens=chunk),
                "more and smaller products in the loss",
            )
            break
    if asked.has_optional_cache:
        yield (
            "weights converted at each use",
            replace(asked, copies="use"),
            "--precision.weight_cache false: no BF16 copies are kept from pass to pass",
        )
    if asked.optimizer == "adamw":
        yield (
            "Muon instead of AdamW",
            replace(asked, optimizer="muon"),
            "one state per block weight instead of two; it also needs fewer tokens for the same loss",
        )
    for cost_order, lean in _optimizers(asked, (asked.optimizer,)):
        if not cost_order:
            continue
        if lean.offload_optimizer:
            *_, (_, shape, spec) = lean.step_specs()
            held = gib(state_bytes(Sizes(shape, spec)).streamed)
            kept = "" if lean.states == asked.states else f", in {FORMATS[lean.states]}"
            yield (
                f"optimizer states in the host's memory{kept}",
                lean,
                f"{held} of the host's memory; they travel over the bus at each step",
            )
        else:
            yield f"optimizer states in {FORMATS[lean.states]}", lean, "states are rounded at each step"
    if asked.gpus > 1 and asked.shardable and not asked.sharded:
        yield (
            f"sharding over the {asked.gpus} GPUs",
            replace(asked, sharded=True),
            "weights and gradients travel between the GPUs",
        )
    for cuts in _cuts(asked)[1:]:
        cut = _with_rows(asked, cuts)
        yield (
            f"rows of {cut.sequence_length:,} tokens",
            cut,
            "the model never sees a longer context than that",
        )


def _hardware(request: PlanRequest, asked: StepEstimate) -> Iterator[Remedy]:
    setting = asked.setting
    for number in GPU_COUNTS:
        row = setting.sequence_length * number
        if (
            not setting.shardable
            or number <= setting.gpus
            or any(stage.tokens % row for stage in setting.stages)
        ):
            continue
        tried = fastest(
            request, max_microbatch_unless_set(request, replace(setting, gpus=number, sharded=True))
        )
        if tried.fits == "fits":
            more = number - setting.gpus
            costs = f"{more} more card{'s' if more > 1 else ''}"
            yield _remedy(f"{number} of this card, sharded", "hardware", asked, tried, costs)
            break
    needed = minimum_over_changes(request, max_microbatch_unless_set(request, setting)).memory_bytes[2]
    card = request.card  # what counts is the memory that it is sold with, not what is free of it now
    own = card.memory_bytes if card.gpu is None else max(card.memory_bytes, card.gpu.memory_bytes)
    larger = [
        gpu
        for gpu in gpus()
        if gpu.memory_bytes > own and not gpu.laptop and gpu.memory_bytes * (1 - DRIVER_SHARE) >= needed
    ]
    if larger and needed > card.memory_bytes:
        smallest = min(gpu.memory_bytes for gpu in larger)
        names = [gpu.name for gpu in larger if gpu.memory_bytes == smallest][:NAMED_CARDS]
        what = f"a card with {smallest / 2**30:.0f} GiB, such as {', '.join(names)}"
        yield Remedy(what, "hardware", 0.0, None, None, "another card", {})


def _smaller_model(request: PlanRequest, asked: StepEstimate) -> Iterator[Remedy]:
    """Yield the largest depth of the depth series that fits."""
    asked_model = asked.setting.model
    kept = {key: getattr(asked_model, key) for key in ("vocab_size", "max_position_embeddings")}
    low, high, best = 1, DEEPEST // 2, None
    while low <= high:  # depth 2 x middle; memory grows with depth
        middle = (low + high) // 2
        model = ModelConfig(**{**presets.depth(2 * middle)["model"], **kept})
        tried = fastest(request, max_microbatch_unless_set(request, replace(asked.setting, model=model)))
        if tried.fits == "fits":
            best, low = (2 * middle, tried), middle + 1
        else:
            high = middle - 1
    # With changes at once a larger one may fit than was asked for: then the changes are the answer, not another model.
    if best is not None and num_params(best[1].setting.model) < num_params(asked_model):
        depth, tried = best
        size = count(num_params(tried.setting.model))
        what = f"d{depth} ({size}), the largest of the depth series that fits"
        yield _remedy(what, "other model", asked, tried, "another, smaller model")


def combinations(request: PlanRequest, start: Setting) -> Iterator[Setting]:
    """Yield the setting with every combination of changes, the least first; the first is the setting itself."""
    formats = [(0, start)]
    if request.given is not None:
        formats += [(OTHER_FORMAT, other) for other in _formats(start, request.given, request.card.native)]
    found = [
        (cost + HALF_ROWS * cuts + more, way)
        for (cost, base), cuts in itertools.product(formats, _cuts(start))
        for more, way in _optimizers(_with_rows(base, cuts))
    ]
    found.sort(key=lambda pair: pair[0])
    yield from (setting for _, setting in found)


def first_that_fits(request: PlanRequest, start: Setting) -> StepEstimate | None:
    """Return the least change that surely fits; None when nothing does."""
    for setting in combinations(request, start):
        if minimum_memory(request, setting).fits == "fits":
            found = fastest(request, setting)
            if found.fits == "fits":
                return found
    return None


def minimum_memory(request: PlanRequest, setting: Setting) -> StepEstimate:
    """Return what needs least memory of all that `fastest` may choose for this setting."""
    rung, chunk = LADDER[-1]
    lean = replace(
        setting,
        micro_tokens=min(setting.micro_tokens, pass_sizes(setting)[-1]),
        activation_checkpointing=rung,
        loss_chunk_tokens=min(chunk, setting.loss_chunk_tokens),
        sharded=setting.sharded or (setting.gpus > 1 and setting.shardable),
    )
    if lean.has_optional_cache:
        lean = replace(lean, copies="use")
    return fitted(lean, request.calibration, request.card.memory_bytes)


def minimum_over_changes(request: PlanRequest, start: Setting, same_task: bool = False) -> StepEstimate:
    """Return what needs least memory of all combinations. same_task: rows and number format stay what they are."""
    return min(
        (
            minimum_memory(request, setting)
            for setting in combinations(request, start)
            if not same_task
            or (setting.sequence_length, setting.precision) == (start.sequence_length, start.precision)
        ),
        key=lambda found: found.memory_bytes[1],
    )


def _formats(start: Setting, given: Given, native: frozenset[LowFormat]) -> Iterator[Setting]:
    """Yield the setting in another number format: FP8 for BF16 where the card has it, BF16 for lower ones.

    Only where training takes the model in it: a mixture of experts has no FP8 products.
    """
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
        return  # this model or these options exclude it
    yield in_precision(start, config, other, native)


def _optimizers(setting: Setting, names: tuple[OptimizerName, ...] = ()) -> Iterator[tuple[int, Setting]]:
    """Yield (cost, setting) with every optimizer, format of its states and place for them that training takes."""
    for name in dict.fromkeys(names or (setting.optimizer, "muon")):
        base = setting if name == setting.optimizer else replace(setting, optimizer="muon")
        first = OTHER_OPTIMIZER if name != setting.optimizer else 0
        small: StateFormat = "bfloat16" if base.sharded else "8bit"
        for states in dict.fromkeys((base.states, small)):
            for offload in dict.fromkeys(
                (base.offload_optimizer, not base.sharded or base.offload_optimizer)
            ):
                cost = first + SMALL_STATES * (states != base.states)
                cost += ON_HOST * (offload != base.offload_optimizer)
                yield cost, replace(base, states=states, offload_optimizer=offload)


def _cuts(setting: Setting) -> list[int]:
    """Return how often the rows can be halved: 0, 1, ..."""
    length, found = setting.sequence_length, [0]
    while len(found) <= MOST_CUTS and length % 2 == 0 and length // 2 >= SHORTEST:
        length //= 2
        found.append(len(found))
    return found


def _with_rows(setting: Setting, cuts: int) -> Setting:
    if not cuts:
        return setting
    length = setting.sequence_length // 2**cuts
    stages = tuple(
        StageSetting(s.share, min(s.sequence_length, length), s.tokens, s.window) for s in setting.stages
    )
    return replace(setting, stages=stages, micro_tokens=max(length, setting.micro_tokens))
