"""The fastest variant of a setting that fits in the memory of the card."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deskside.budget.step_spec import Checkpointing
from deskside.config import merge
from deskside.plan.estimate import StepEstimate, estimate_max_microbatch
from deskside.plan.request import PlanRequest
from deskside.plan.setting import Setting, options, pass_sizes
from deskside.utils.errors import UsageError

# Activation checkpointing and loss_chunk_tokens, in the order of decreasing memory and mostly decreasing speed.
LADDER: tuple[tuple[Checkpointing, int], ...] = (
    ("none", 8192),
    ("none", 2048),
    ("attention", 2048),
    ("mlp", 2048),
    ("block", 2048),
    ("block", 512),
)
MLP_CHUNK = 4096  # tokens of an MLP chunk; shorter rows need none, because a pass may be as short
ENOUGH_PASS_TOKENS = 16384  # from this pass size on, recomputation to fit larger passes does not pay


def fastest_that_fits(request: PlanRequest, base: Setting) -> StepEstimate:
    """Return the fastest variant of a setting that fits, else that is expected to fit, else the one of least memory.

    Variants differ in micro-batch, activation checkpointing, activation offloading, chunks of loss and MLP, cached
    weights and sharding.
    """
    best: StepEstimate | None = None
    for setting in _ladder(request, base):
        step = estimate_max_microbatch(setting, request.calibration, request.card.memory_bytes)
        if best is not None and not step.fits_host(request.card.host_bytes):
            continue
        if best is None or (_rank(step) < _rank(best) and not is_refused(request, step.setting)):
            best = step
        enough = min(ENOUGH_PASS_TOKENS, pass_sizes(setting)[0])
        if best.fits == "fits" and best.setting.micro_tokens >= enough and not best.setting.sharded:
            break
    assert best is not None
    return best


def is_refused(request: PlanRequest, setting: Setting) -> bool:
    """Return True if other options of the user exclude those of a setting."""
    layers: Sequence[Mapping[str, Any]]
    config = None
    if request.given is not None:
        layers, config = request.given.layers, request.given.config
    elif request.overrides:
        layers = [*merge.resolved_layers("model", setting.model.model_dump(mode="json")), request.overrides]
    else:
        return False
    try:
        merge.build([*layers, options(setting, config=config), {"precision": {"name": setting.precision}}])
    except UsageError:
        return True
    return False


def _rank(step: StepEstimate) -> tuple[int, float]:
    """Return a sort key: by `fits`, then the faster ones first, or the smaller ones among those that do not fit."""
    order = ("fits", "tight", "no").index(step.fits)
    return order, step.memory_bytes[1] if step.fits == "no" else -step.tokens_per_second[1]


def _ladder(request: PlanRequest, base: Setting) -> Iterator[Setting]:
    """Yield variants of a setting that recompute at least as much, mostly the fastest first.

    Options in the overrides are not changed.
    """
    explicit = request.overrides.get("compute", {})
    levels = [checkpointing for checkpointing, _ in LADDER]
    may_shard = base.gpus > 1 and base.shardable and "parallel" not in request.overrides
    for sharded in (False, True) if may_shard else (base.sharded,):
        variants = []
        for checkpointing, chunk in LADDER[levels.index(base.activation_checkpointing) :]:
            if checkpointing != explicit.get("activation_checkpointing", checkpointing):
                continue
            chunk = min(chunk, base.loss_chunk_tokens)
            if "loss_chunk_tokens" in explicit:
                chunk = base.loss_chunk_tokens
            variants.append(
                replace(
                    base, sharded=sharded, activation_checkpointing=checkpointing, loss_chunk_tokens=chunk
                )
            )
        yield from variants
        uncached = []
        if variants[0].has_optional_cache and "weight_cache" not in request.overrides.get("precision", {}):
            uncached = [replace(variant, copies="use") for variant in variants]
        yield from uncached
        offloaded = []
        if "activation_offloading" not in explicit:
            offloaded = [
                replace(variant, activation_offloading=True)
                for variant in [*variants, *uncached]
                if variant.can_offload_activations
            ]
        yield from offloaded
        if "mlp_chunk_tokens" not in explicit:
            for variant in [*variants, *uncached, *offloaded]:
                if variant.can_chunk_mlps and variant.sequence_length > MLP_CHUNK:
                    yield replace(variant, mlp_chunk_tokens=MLP_CHUNK)
