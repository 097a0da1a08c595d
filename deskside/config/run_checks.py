"""Checks that the parts of a run's configuration fit together.

Each raises ValueError with the key and the remedy. `RunConfig` calls `check_parts_together` when it is validated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from deskside.config.dimensions import UNIT, adaptable_projections, check_dimensions, projection_sizes
from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.config.sections import (
    ATTENTION_PROJECTIONS,
    DEFAULT_BUCKET_MIB,
    AdapterConfig,
    can_share_rows,
    check_rows,
)

if TYPE_CHECKING:
    from deskside.config.run import RunConfig


def check_parts_together(config: RunConfig) -> None:
    """Raise ValueError, with the key and the remedy, if the parts of a configuration do not fit together."""
    if config.model.window_pattern is None and any(stage.window for stage in config.schedule.stages):
        raise ValueError(
            "schedule.stages: a stage's window has no effect on a model without window layers; remove it, "
            "or set model.window_pattern and model.sliding_window"
        )
    _check_compares_losses(config)
    _check_stages(config)
    if config.model.scoring_func == "sigmoid" and config.parallel.mode == "shard":
        raise ValueError(
            "model.scoring_func: the biases of a sigmoid router cannot be sharded yet; use --parallel.mode "
            "replicate, or softmax"
        )
    if config.parallel.gradient_dtype == "bfloat16" and config.parallel.mode == "shard":
        raise ValueError(
            "parallel.gradient_dtype: FSDP2 sums the gradients of sharded weights in float32; use --parallel.mode "
            "replicate, or float32"
        )
    in_place = config.parallel.gradient_dtype == config.optim.weights == "float32"
    if config.parallel.bucket_mib != DEFAULT_BUCKET_MIB and (config.parallel.mode == "shard" or not in_place):
        raise ValueError(
            "parallel.bucket_mib: only replicas with float32 weights and gradients send several gradients together; "
            "leave it out"
        )
    if config.parallel.context > 1:
        _check_context_parallel(config)
    if config.adapter is not None:
        _check_adapter(config, config.adapter)
    if config.align is not None:
        _check_fine_tuning(config)
    if config.precision.quantized:
        _check_precision(config)
    if config.optim.weights != "float32":
        _check_small_weights(config)
    if config.optim.gradients != "device":
        _check_gradients(config)
    _check_row_factors(config)
    if config.schedule.tied_until:
        _check_tied_until(config)
    if config.average.name != "none":
        _check_average(config)
    if config.dropout:
        _check_dropout(config)
    _check_compute(config)


def _check_compares_losses(config: RunConfig) -> None:
    """Raise ValueError if a run cannot compare validation losses as `keep_best` and `stop_early` need."""
    checkpoint, evaluate = config.checkpoint, config.evaluate
    if not (checkpoint.keep_best or evaluate.stop_early):
        return
    key = "checkpoint.keep_best" if checkpoint.keep_best else "evaluate.stop_early"
    if evaluate.every is None:
        raise ValueError(f"{key}: needs evaluations during the run; set --evaluate.every, such as 10m")
    if config.align is not None and config.align.name == "grpo":
        raise ValueError(f"{key}: GRPO has no validation loss; leave it out")
    if checkpoint.keep_best and config.parallel.mode == "shard":
        raise ValueError(
            "checkpoint.keep_best: is not supported with sharded weights; use --parallel.mode replicate"
        )
    if checkpoint.keep_best and checkpoint.keep_every is not None:
        raise ValueError(
            "checkpoint.keep_best: a run that ends with its best checkpoint deletes all later ones, also those of "
            "checkpoint.keep_every; leave one of them out"
        )


def _check_stages(config: RunConfig) -> None:
    """Raise ValueError, with the key and the remedy, if batches or the model's positions do not fit the rows."""
    longest, limit = config.batch.sequence_length, config.model.max_position_embeddings
    sizes = config.schedule.batch_growth
    key = "schedule.batch_growth" if sizes > 1 else "schedule.stages"
    if sizes > 1 and config.batch.tokens % (sizes * longest):
        raise ValueError(
            f"schedule.batch_growth: {config.batch.tokens} tokens of rows of {longest} cannot be divided by {sizes}; "
            f"use --batch.tokens {max(1, round(config.batch.tokens / (sizes * longest))) * sizes * longest}"
        )
    for stage in config.stages() if sizes > 1 else config.schedule.stages:
        longest = max(longest, stage.sequence_length)
        check_rows(key, config.stage_tokens(stage), stage.sequence_length)
        if config.batch.micro_tokens != "auto":
            check_rows("batch.micro_tokens", config.batch.micro_tokens, stage.sequence_length)
            if config.stage_tokens(stage) % config.batch.micro_tokens:
                raise ValueError(
                    f"batch.micro_tokens: {config.batch.micro_tokens} does not divide a stage of "
                    f"{config.stage_tokens(stage)} tokens per step"
                )
    if longest > limit:
        raise ValueError(
            f"batch.sequence_length: {longest} is longer than the model's {limit} positions; "
            f"raise --model.max_position_embeddings or shorten the sequence"
        )


def _check_fine_tuning(config: RunConfig) -> None:
    """Raise ValueError, with the key and the remedy, for options that fine-tuning does not have."""
    if not config.data.document_mask:
        raise ValueError(
            "data.document_mask: must be true for fine-tuning, so that examples in one row do not attend to each "
            "other; set it to true, or leave it out"
        )
    if config.multi_token.weights:
        raise ValueError("multi_token.weights: is not supported in fine-tuning; leave it out")
    if config.data.sources:
        raise ValueError("data.sources: has no effect in fine-tuning; give the training data with --data")


def _check_row_factors(config: RunConfig) -> None:
    """Raise ValueError if Muon would need the length of weights that are sharded."""
    optim = config.optim
    if config.parallel.mode == "shard" and isinstance(optim, MuonConfig) and optim.uses_row_sums:
        raise ValueError(
            f"optim.{'row_floor' if optim.row_floor else 'radial_brake'}: needs whole matrices, and parallel.mode "
            "shard splits them; use --parallel.mode replicate, or leave it out"
        )


def _refuse(key: str, unsupported: Iterable[tuple[bool, str]]) -> None:
    """Raise ValueError for a key with the first reason that applies. unsupported: (whether it applies, reason)."""
    for applies, reason in unsupported:
        if applies:
            raise ValueError(f"{key}: {reason}")


def _check_tied_until(config: RunConfig) -> None:
    """Raise ValueError, with the remedy, if embedding and head cannot be tied for a part of this run."""
    unsupported = (
        (
            config.model.tie_word_embeddings,
            "this model's embedding and head are always tied; use --model.tie_word_embeddings false",
        ),
        (config.align is not None or config.adapter is not None, "is for pretraining; leave it out"),
        (
            config.parallel.mode == "shard",
            "is not supported with sharded weights; use --parallel.mode replicate",
        ),
        (
            config.optim.weights != "float32",
            f"is not supported with --optim.weights {config.optim.weights}; use float32",
        ),
        (config.optim.offload, "is not supported with --optim.offload true; leave one of them out"),
        (config.optim.gradients != "device", "needs --optim.gradients device"),
    )
    _refuse("schedule.tied_until", unsupported)


def _check_dropout(config: RunConfig) -> None:
    """Raise ValueError, with the remedy, if this run cannot drop values."""
    unsupported = (
        (config.dropout < 2**-16, f"{config.dropout} is below the smallest rate, 1/65536; use 0"),
        (config.adapter is not None, "is for runs that train all weights; use --adapter.dropout"),
        (config.align is not None, "is not supported in fine-tuning; leave it out"),
        (config.parallel.context > 1, "is not supported with shared rows; use --parallel.context 1"),
    )
    _refuse("dropout", unsupported)


def _check_average(config: RunConfig) -> None:
    """Raise ValueError, with the key and the remedy, if this run cannot average its weights."""
    if config.average.offload and config.parallel.mode == "shard":
        raise ValueError(
            "average.offload: the average of sharded weights is sharded too, on the GPUs; leave it out"
        )
    if config.checkpoint.keep_best:
        raise ValueError(
            "checkpoint.keep_best: the run ends with the average of its last weights; use --average.name none"
        )
    if config.align is not None and config.align.name == "grpo":
        raise ValueError(
            "average.name: GRPO samples and evaluates the weights of the last step; use --average.name none"
        )


def _check_compute(config: RunConfig) -> None:
    """Raise ValueError, with the key and the remedy, for options of `compute` that do not go together."""
    compute = config.compute
    if compute.activation_offloading and compute.activation_checkpointing != "block":
        raise ValueError(
            "compute.activation_offloading: moves what recomputed blocks save; add "
            "--compute.activation_checkpointing block"
        )
    for option in ("activation_offloading", "mlp_chunk_tokens"):
        if getattr(compute, option) and compute.compile not in ("auto", "fused"):
            raise ValueError(
                f"compute.{option}: needs fused kernels, which compute.compile {compute.compile} does not use; "
                "use --compute.compile fused, or leave it out"
            )
    if compute.mlp_chunk_tokens is not None:
        _check_mlp_chunk(config)
    if compute.cuda_graph == "on" and (problem := graph_problem(config)):
        raise ValueError(f"compute.cuda_graph: {problem}")
    if compute.activation_offloading and config.parallel.mode == "shard":
        raise ValueError(
            "compute.activation_offloading: is not supported with sharded weights yet; use --parallel.mode "
            "replicate"
        )


def graph_problem(config: RunConfig) -> str:
    """Return what a pass of this run does that a CUDA graph cannot repeat, with the remedy; "" if there is nothing."""
    compute, precision, optim = config.compute, config.precision, config.optim
    off = "use --compute.cuda_graph off"
    unsupported = (
        (compute.device == "cpu", f"needs a GPU, and compute.device is cpu; {off}"),
        (
            compute.compile not in ("auto", "fused"),
            f"needs fused kernels, which compute.compile {compute.compile} does not use; use --compute.compile fused, "
            "or leave it out",
        ),
        (
            config.align is not None and config.align.name != "sft",
            f"is for pretraining and SFT, whose losses need no decision of the host; {off}",
        ),
        (config.adapter is not None, f"is not supported with adapters; {off}"),
        (
            config.model.num_experts > 0,
            f"is not supported with experts, as it was not tested with their routing; {off}",
        ),
        (config.dropout > 0, f"would repeat the same dropout masks in every step; use --dropout 0, or {off}"),
        (
            "nvfp4" in precision.recipe().formats if precision.quantized else False,
            f"would repeat the random numbers of {precision.name} in every step; use bf16 or an FP8 recipe, or {off}",
        ),
        (
            precision.quantized and precision.backend != "deskside",
            f"is not supported with the layers of {precision.backend}; use --precision.backend deskside, or {off}",
        ),
        (
            optim.weights != "float32",
            f"would repeat the rounding of gradients of {optim.weights} weights in every step; use --optim.weights "
            f"float32, or {off}",
        ),
        (
            optim.gradients != "device",
            f"adds up gradients on the GPU; use --optim.gradients device instead of {optim.gradients}, or {off}",
        ),
        (
            compute.activation_offloading,
            f"cannot move activations to host memory; leave out compute.activation_offloading, or {off}",
        ),
        (config.parallel.mode == "shard", f"is not supported with sharded weights; {off}"),
        (config.parallel.context > 1, f"is not supported with shared rows; {off}"),
        (
            compute.attention == "flex",
            f"cannot contain flex, which torch.compile compiles; use another --compute.attention, or {off}",
        ),
    )
    return next((reason for applies, reason in unsupported if applies), "")


def _check_context_parallel(config: RunConfig) -> None:
    """Raise ValueError, with the key and the remedy, if the rows of this run cannot be divided among processes."""
    context = config.parallel.context
    for stage in config.stages():
        if not can_share_rows(context, stage.sequence_length):
            raise ValueError(
                f"parallel.context: each of {context} processes holds two parts of a row, so rows must be a multiple "
                f"of {2 * context} tokens, not {stage.sequence_length}"
            )
    unsupported = (
        (config.align is not None, "is not supported in fine-tuning; leave it out"),
        (config.adapter is not None, "is not supported with adapters; leave it out"),
        (
            config.model.attn_logit_softcapping is not None or config.model.attention_sinks,
            "is not supported with model.attn_logit_softcapping or model.attention_sinks; leave it out",
        ),
        (
            config.precision.quantized,
            f"is not supported in {config.precision.name}; use --precision.name bf16",
        ),
        (config.parallel.mode == "shard", "sharded weights need whole rows; use --parallel.mode replicate"),
        (
            config.compute.compile in ("block", "model"),
            "torch.compile cannot exchange keys and values; use --compute.compile auto",
        ),
    )
    _refuse("parallel.context", unsupported)


def _check_small_weights(config: RunConfig) -> None:
    """Raise ValueError, with the key and the remedy, if this run cannot store weights in bfloat16, or in 24 bits."""
    if config.adapter is not None:
        raise ValueError(
            "optim.weights: adapters are few and stay in float32; use float32 (--adapter.base has the format of "
            "the frozen weights)"
        )
    if config.precision.name == "fp32":
        raise ValueError(
            f"optim.weights: {config.optim.weights} does not suit precision fp32; use bf16, or float32 weights"
        )
    if config.parallel.mode == "shard":
        raise ValueError(
            f"optim.weights: {config.optim.weights} weights cannot be sharded yet; use --parallel.mode replicate, or "
            "float32"
        )
    if config.precision.accumulate == "fused":
        raise ValueError(
            "precision.accumulate: products cannot add to gradients in bfloat16; use native, or --optim.weights "
            "float32"
        )


def _check_mlp_chunk(config: RunConfig) -> None:
    """Raise ValueError, with the key and the remedy, if this run cannot compute its MLPs in chunks."""
    if config.compute.activation_checkpointing not in ("mlp", "block"):
        raise ValueError(
            "compute.mlp_chunk_tokens: an MLP that keeps its activations saves nothing in chunks; add "
            "--compute.activation_checkpointing mlp or block"
        )
    if config.model.num_experts:
        raise ValueError("compute.mlp_chunk_tokens: is for dense MLPs; leave it out in a mixture of experts")
    if config.precision.quantized:
        raise ValueError(
            f"compute.mlp_chunk_tokens: is not supported in {config.precision.name} yet; leave it out, or use bf16"
        )
    if config.adapter is not None:
        raise ValueError(
            "compute.mlp_chunk_tokens: needs the fused kernels, which do not support adapters; leave it out"
        )


def _check_gradients(config: RunConfig) -> None:
    """Raise ValueError, with the key and the remedy, if gradients cannot leave the GPU in this run."""
    place = config.optim.gradients
    if config.adapter is not None:
        raise ValueError(f"optim.gradients: {place} is not supported with adapters; use device")
    if config.parallel.mode == "shard":
        raise ValueError(
            f"optim.gradients: {place} needs whole weights, and parallel.mode shard splits them; use "
            "--parallel.mode replicate, or device"
        )
    if config.precision.accumulate == "fused":
        raise ValueError(
            f"precision.accumulate: fused adds to gradients on the GPU; use native, or --optim.gradients device "
            f"instead of {place}"
        )
    micro = config.batch.micro_tokens
    if place == "released" and micro != "auto":
        for stage in config.stages():
            if config.stage_tokens(stage) != micro:
                raise ValueError(
                    f"optim.gradients: released needs one pass per step, and a step of {config.stage_tokens(stage)} "
                    f"tokens has several of {micro}; use --optim.gradients host, or --batch.tokens {micro}"
                )


def _check_adapter(config: RunConfig, adapter: AdapterConfig) -> None:
    """Raise ValueError, with the key and the remedy, if adapters cannot be trained in this run."""
    if not isinstance(config.optim, AdamWConfig):
        raise ValueError(
            "optim.name: muon is for whole matrices, and adapters are trained by adamw; use --optim.name adamw"
        )
    if config.precision.quantized:
        raise ValueError(
            f"precision.name: adapters are trained in bf16; {config.precision.name} products with frozen weights are "
            f"not supported; use --precision.name bf16, and --adapter.base for the format of the frozen weights"
        )
    if config.parallel.mode == "shard":
        raise ValueError(
            "parallel.mode: adapters and frozen weights are not sharded; use --parallel.mode replicate"
        )
    if config.compute.compile == "fused":
        raise ValueError(
            "compute.compile: the fused kernels do not support adapters; use --compute.compile auto"
        )
    if config.compute.activation_offloading:
        raise ValueError(
            "compute.activation_offloading: needs the fused kernels, which do not support adapters; leave it out"
        )
    if adapter.dropout and config.compute.activation_checkpointing != "none":
        raise ValueError(
            "adapter.dropout: recomputation in activation checkpointing would use another dropout mask; use "
            "--adapter.dropout 0, or --compute.activation_checkpointing none"
        )
    if config.model.shared_expert_intermediate_size:
        raise ValueError(
            "adapter: models with a shared expert cannot have adapters yet; train all weights, without --adapter"
        )
    _check_adapter_targets(config, adapter)


def _check_adapter_targets(config: RunConfig, adapter: AdapterConfig) -> None:
    """Raise ValueError, with the key and the remedy, if the model cannot have adapters of these projections."""
    available = adaptable_projections(config.model)
    targets = available if adapter.targets == "all" else adapter.targets
    if adapter.dropout and config.model.num_experts and not set(targets) <= set(ATTENTION_PROJECTIONS):
        raise ValueError(
            "adapter.dropout: PEFT does not support it for experts; use --adapter.dropout 0, or adapt attention only: "
            f"--adapter.targets {','.join(ATTENTION_PROJECTIONS)}"
        )
    if adapter.dora and config.model.num_experts and not set(targets) <= set(ATTENTION_PROJECTIONS):
        raise ValueError(
            "adapter.dora: PEFT does not support it for experts; leave it out, or adapt attention only: "
            f"--adapter.targets {','.join(ATTENTION_PROJECTIONS)}"
        )
    if adapter.dora and adapter.dropout:
        raise ValueError("adapter.dropout: is not supported with adapter.dora; use --adapter.dropout 0")
    if "lm_head" in adapter.modules_to_save and config.model.tie_word_embeddings:
        raise ValueError(
            "adapter.modules_to_save: this model has no head of its own; use --adapter.modules_to_save "
            "embed_tokens, which is its head too"
        )
    for name in targets:
        if name not in available:
            raise ValueError(
                f"adapter.targets: this model has no {name} that could be adapted; choose from "
                f"{', '.join(available)}"
            )


def _check_precision(config: RunConfig) -> None:
    """Raise ValueError, with the key and the remedy, if the recipe does not support this run."""
    name, layers = config.precision.name, config.model.num_hidden_layers
    first, last = config.precision.recipe().kept_blocks(layers)
    if first + last >= layers:
        raise ValueError(
            f"precision.name: {name} keeps the first {first} and the last {last} of {layers} blocks in BF16, so "
            f"nothing is quantized; set --precision.keep_first 0 --precision.keep_last 0, or use bf16"
        )
    # Projections that share a weight stay in BF16 together.
    if all(set(weight) & set(config.precision.keep) for weight in projection_sizes(config.model)):
        raise ValueError(
            f"precision.keep: with {', '.join(config.precision.keep)} in BF16 nothing is left to quantize; remove "
            f"some of them, or use --precision.name bf16"
        )
    length = config.schedule.length
    if length is not None and length.unit == "steps" and config.precision.warmup_steps >= length.value:
        raise ValueError(
            f"precision.warmup_steps: {config.precision.warmup_steps} BF16 steps are the whole run of {length}; "
            f"use fewer, or --precision.name bf16"
        )
    if config.compute.compile in ("block", "model") and config.precision.backend == "deskside":
        raise ValueError(
            f"compute.compile: {name} has its own kernels, which {config.compute.compile} cannot compile; use auto"
        )
    if config.parallel.mode == "shard":
        raise ValueError(
            f"parallel.mode: sharded weights cannot be trained in {name} yet; use --parallel.mode replicate, "
            f"or --precision.name bf16"
        )
    if config.model.num_experts:
        _check_quantized_experts(config, name)
    check_run_dimensions(config, UNIT)


def _check_quantized_experts(config: RunConfig, name: str) -> None:
    """Raise ValueError, with the key and the remedy, if experts cannot be computed in the recipe `name`."""
    if config.precision.backend != "deskside":
        raise ValueError(
            f"precision.backend: {config.precision.backend} does not compute experts; use deskside, or "
            f"--precision.name bf16"
        )
    if config.model.norm != "rmsnorm" or config.model.norm_position not in ("pre", "sandwich"):
        raise ValueError(
            f"precision.name: experts in {name} need an RMSNorm before them; use --model.norm rmsnorm "
            f"--model.norm_position pre, or --precision.name bf16"
        )
    if config.model.mlp_bias or config.model.hidden_act == "clamped_swiglu":
        raise ValueError(
            f"precision.name: experts in {name} support neither biases nor clamped_swiglu, which gpt-oss uses; use "
            f"--precision.name bf16"
        )


def check_run_dimensions(config: RunConfig, unit: int) -> None:
    """Raise ValueError if a size does not fit the recipe. unit: as in `check_dimensions`."""
    check_dimensions(
        config.precision.recipe(),
        config.model,
        head=config.precision.head == "fp8",
        sequence_lengths=[stage.sequence_length for stage in config.stages()],
        micro_tokens=None if config.batch.micro_tokens == "auto" else config.batch.micro_tokens,
        chunk_tokens=config.compute.loss_chunk_tokens,
        unit=unit,
    )
