"""Fields of `budget.step_spec.StepOptions` that follow from a configuration.

The planner and training both build a `StepSpec` from a `RunConfig` with the functions below, so that both describe the
same step.
"""

from collections.abc import Collection
from typing import Any

from deskside.budget.format_costs import LowFormat, Precision
from deskside.budget.step_spec import AdapterSpec
from deskside.config.dimensions import adaptable_projections, projection_sizes
from deskside.config.optim import AdamWConfig, MuonConfig, ema_updates_per_step
from deskside.config.recipes import Recipe
from deskside.config.run import RunConfig
from deskside.config.run_checks import graph_problem


def adapter_spec(config: RunConfig) -> AdapterSpec | None:
    """Return the adapters of a run; None if it trains all weights."""
    if config.adapter is None:
        return None
    options, targets = config.adapter, config.adapter.targets
    adapted = [name for name in adaptable_projections(config.model) if targets == "all" or name in targets]
    tables = tuple(sorted(set(options.modules_to_save)))
    return AdapterSpec(options.rank, tuple(adapted), options.base, options.dora, tables)


def step_options(config: RunConfig) -> dict[str, Any]:
    """Return the fields that do not depend on the precision, by name."""
    place = "host" if config.average.offload else "device"
    return {
        "context": config.parallel.context,
        "flash_chunks": flash_chunks(config),
        "optimizer": config.optim.name,
        "weights": config.optim.weights,
        "states": config.optim.states,
        "offload_optimizer": config.optim.offload,
        "master_weights": isinstance(config.optim, AdamWConfig) and config.optim.master_weights,
        "gradients": config.optim.gradients,
        "row_sums": isinstance(config.optim, MuonConfig) and config.optim.uses_row_sums,
        "ema_updates": ema_updates_per_step(config.optim),
        "gradient_dtype": config.parallel.gradient_dtype,
        "activation_checkpointing": config.compute.activation_checkpointing,
        "activation_offloading": config.compute.activation_offloading,
        "mlp_chunk_tokens": config.compute.mlp_chunk_tokens,
        "loss_chunk_tokens": config.compute.loss_chunk_tokens,
        "average": "none" if config.average.name == "none" else place,
        "averages_per_step": config.average.per_step(),
        "dropout": config.dropout > 0,
        "future_targets": len(config.multi_token.weights),
        "graphs": "off" if graph_problem(config) else config.compute.cuda_graph,
        "adapter": adapter_spec(config),
    }


def flash_chunks(config: RunConfig) -> bool:
    """Return True if attention of shared rows will run in torch's FlashAttention on any card.

    cuDNN has no document masks and is not deterministic, and it is used only if the run may choose it. Otherwise the
    trial of whole rows decides (`kernels/attention/gathered.py`), which finds cuDNN to be faster on Hopper.
    """
    may_choose = config.compute.attention in ("auto", "cudnn")
    masked = config.data.document_mask or config.deterministic
    return config.parallel.context > 1 and (masked or not may_choose)


def recipe_of(config: RunConfig, precision: Precision) -> Recipe:
    """Return the recipe `precision` with the options of `config.precision`."""
    return config.precision.model_copy(update={"name": precision}).recipe()


def format_options(
    config: RunConfig, precision: Precision, native: Collection[LowFormat], fused: bool
) -> dict[str, Any]:
    """Return the fields that depend on the precision, by name.

    Args:
        native: Formats that the GPU's tensor cores run.
        fused: Whether fused sublayers compute the blocks. In BF16, only they keep converted weights from pass to pass.
    """
    options = config.precision
    return {
        "precision": precision,
        "native": frozenset() if options.native == "never" else frozenset(native),
        "kept_weights": kept_weights(config, precision),
        "fp8_head": recipe_of(config, precision).quantized and options.head == "fp8",
        "copies": ("step" if options.weight_cache else "use") if fused else "pass",
    }


def kept_weights(config: RunConfig, precision: Precision) -> float:
    """Return the share of a quantized block's weights that `precision.keep` leaves in BF16."""
    if not config.precision.keep or not recipe_of(config, precision).quantized:
        return 0.0
    sizes = projection_sizes(config.model)
    kept = sum(size for names, size in sizes.items() if set(names) & set(config.precision.keep))
    return kept / sum(sizes.values())


def kept_shares(config: RunConfig, precision: Precision) -> tuple[float, float]:
    """Return the shares of the blocks at the front and at the back that a quantized recipe leaves in BF16."""
    recipe = recipe_of(config, precision)
    return (recipe.keep_first, recipe.keep_last) if recipe.quantized else (0.0, 0.0)
