"""Remedies that make a model fit, each applied separately.

Each remedy is listed with the memory that it saves and its cost. The kinds:

- change: an option of `deskside train` for the same model. Only changes turn the verdict "no" into "yes-if".
- hardware: the same run on more or larger cards.
- other model: a smaller model.
- elsewhere: known remedies that deskside does not offer, listed for completeness.

`combinations.py` has the combinations of changes.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from deskside.budget.shape import num_params
from deskside.budget.step_spec import Checkpointing, StateFormat
from deskside.config.depth_series import MAX_DEPTH, of_depth
from deskside.config.model import ModelConfig
from deskside.facts.gpus import gpus
from deskside.plan.card import DRIVER_SHARE
from deskside.plan.combinations import (
    minimum_over_changes,
    optimizer_changes,
    possible_halvings,
    with_halved_rows,
)
from deskside.plan.estimate import Fits, StepEstimate, estimate_max_microbatch
from deskside.plan.fastest_fit import MLP_CHUNK, fastest_that_fits, is_refused
from deskside.plan.request import PlanRequest
from deskside.plan.setting import Setting, options, pass_sizes, with_max_microbatch
from deskside.utils.format import count, gib

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
MAX_NAMED_CARDS = 3  # examples of a larger card


@dataclass(frozen=True)
class Remedy:
    """One way to reduce the memory of the requested run, applied separately.

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
    """Return every remedy that saves memory, each applied separately to the requested run; changes come first."""
    result = []
    for what, setting, costs in [*_one_row_per_pass(requested.setting), *_changes(requested.setting)]:
        if is_refused(request, setting):
            continue
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
        yield (
            "activations of recomputed blocks in the host's memory",
            lean,
            f"{gib(lean.host_memory['activations'])} of the host's memory; transferred in each pass",
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
    for change_cost, lean in optimizer_changes(requested, (requested.optimizer,)):
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
            host_bytes = gib(lean.host_memory["optimizer states"])
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
    for halvings in possible_halvings(requested)[1:]:
        cut = with_halved_rows(requested, halvings)
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
    needed = gib(lean.host_memory["gradients"])
    return "gradients in the host's memory", lean, f"{needed} of the host's memory; transferred in each pass"


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
        model = ModelConfig(**{**of_depth(2 * middle)["model"], **kept})
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
