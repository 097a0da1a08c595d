"""The fields of `budget.step_spec.StepOptions` that a configuration decides, by name.

The planner and training both build a `StepSpec` from a `RunConfig`. Fields that depend neither on the card nor on the
micro-batch come from here, so that both model the same step.
"""

from collections.abc import Collection
from typing import Any

from deskside.budget.format_costs import LowKind, Precision
from deskside.budget.step_spec import AdapterSpec
from deskside.config.dimensions import adaptable, projections
from deskside.config.recipes import Recipe
from deskside.config.run import RunConfig


def step_options(config: RunConfig) -> dict[str, Any]:
    """Return the options that do not depend on the precision."""
    adapter = None
    if asked := config.adapter:
        targets = tuple(n for n in adaptable(config.model) if asked.targets == "all" or n in asked.targets)
        adapter = AdapterSpec(asked.rank, targets, asked.base)
    return {
        "optimizer": config.optim.name,
        "states": config.optim.states,
        "offload_optimizer": config.optim.offload,
        "activation_checkpointing": config.compute.activation_checkpointing,
        "loss_chunk_tokens": config.compute.loss_chunk_tokens,
        "adapter": adapter,
    }


def recipe_of(config: RunConfig, precision: Precision) -> Recipe:
    """Return the recipe of this name with the configuration's options for it."""
    return config.precision.model_copy(update={"name": precision}).recipe()


def format_options(
    config: RunConfig, precision: Precision, native: Collection[LowKind], fused: bool
) -> dict[str, Any]:
    """Return the options that depend on the precision.

    native: formats that the card's tensor cores run; fused: fused sublayers compute the blocks. Only they keep
    converted weights from pass to pass.
    """
    asked = config.precision
    return {
        "precision": precision,
        "native": frozenset() if asked.native == "never" else frozenset(native),
        "kept_weights": kept_weights(config, precision),
        "fp8_head": recipe_of(config, precision).quantized and asked.head == "fp8",
        "copies": ("step" if asked.weight_cache else "use") if fused else "pass",
    }


def kept_weights(config: RunConfig, precision: Precision) -> float:
    """Return the share of a quantized block's weights that `precision.keep` leaves in BF16."""
    if not config.precision.keep or not recipe_of(config, precision).quantized:
        return 0.0
    sizes = projections(config.model)
    kept = sum(size for names, size in sizes.items() if set(names) & set(config.precision.keep))
    return kept / sum(sizes.values())


def kept_shares(config: RunConfig, precision: Precision) -> tuple[float, float]:
    """Return the shares of the blocks, front and back, that stay in BF16 in a quantized recipe."""
    recipe = recipe_of(config, precision)
    return (recipe.keep_first, recipe.keep_last) if recipe.quantized else (0.0, 0.0)
