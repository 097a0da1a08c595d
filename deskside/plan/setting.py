"""A model with all options of its training, and the translation from and to a configuration of `deskside train`.

A setting may have stages with different sequence lengths. `estimate.py` has its memory and speed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deskside.budget.adapters import training_flops_per_token
from deskside.budget.format_costs import LowFormat, emulated, quantized
from deskside.budget.host_memory import checkpoint_bytes, fits_host, host_memory
from deskside.budget.step_spec import QUANTIZED_STATES, Precision, StepOptions, StepSpec
from deskside.config import recipes
from deskside.config.dimensions import model_uncovered_reason
from deskside.config.gpu_batch import rows_each
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.config.step_options import format_options, kept_shares, step_options
from deskside.plan.request import defaults

MAX_PASS_TOKENS = 2**18  # larger passes are not faster


@dataclass(frozen=True)
class StageSetting:
    """A stage of a run. share: its share of the steps; tokens: per step; window: of layers with a sliding window."""

    share: float
    sequence_length: int
    tokens: int
    window: int | None = None


@dataclass(frozen=True)
class Setting(StepOptions):
    """A model, and how a run trains it.

    micro_tokens: tokens per pass on one GPU, or on all GPUs that share rows; kept: shares of the first and of the last
    blocks that stay in BF16; background: `checkpoint.background`; grows: the stages are those of
    `schedule.batch_growth` alone.
    """

    model: ModelConfig
    stages: tuple[StageSetting, ...]
    micro_tokens: int
    kept: tuple[float, float] = (0.0, 0.0)
    background: bool | Literal["auto"] = field(default="auto", kw_only=True)
    native: frozenset[LowFormat] = field(default=frozenset(), kw_only=True)
    grows: bool = field(default=False, kw_only=True)

    @property
    def readers(self) -> int:
        """The number of GPUs that read different rows; those that share rows count once."""
        return self.gpus // self.context

    @property
    def sequence_length(self) -> int:
        """Tokens per row of the longest stage."""
        return max(stage.sequence_length for stage in self.stages)

    @property
    def emulated(self) -> bool:
        """True if some products in a lower format are computed in BF16 with the same numbers."""
        return emulated(self.precision, self.native) or (self.fp8_head and "fp8" not in self.native)

    @property
    def has_optional_cache(self) -> bool:
        """True if a cache of BF16 weights could be turned off, so that weights are converted at each use."""
        in_float32 = self.weights == "float32"
        return self.copies == "step" and self.precision == "bf16" and not self.sharded and in_float32

    @property
    def can_offload_activations(self) -> bool:
        """True if activations may be offloaded to host memory: fused blocks that are recomputed as a whole, in passes
        that the run does not have to replay."""
        recomputed = self.activation_checkpointing == "block" and self.graphs != "on"
        return recomputed and self.copies != "pass" and not self.sharded

    @property
    def can_chunk_mlps(self) -> bool:
        """True if dense MLPs may be computed in chunks of tokens: fused, recomputed and not quantized."""
        recomputed = self.activation_checkpointing in ("mlp", "block")
        in_16_bits = not quantized(self.precision) and self.adapter is None
        return recomputed and self.copies != "pass" and in_16_bits and not self.model.num_experts

    @property
    def shardable(self) -> bool:
        """True if training supports sharding of this setting over several GPUs."""
        memory_saving = self.states in QUANTIZED_STATES or self.offload_optimizer or self.adapter is not None
        in_float32 = self.weights == self.gradient_dtype == "float32" and self.gradients == "device"
        alone = self.context == 1 and self.graphs != "on"
        return not quantized(self.precision) and not memory_saving and in_float32 and alone

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step, averaged over the run."""
        return sum(stage.share * stage.tokens for stage in self.stages)

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token, averaged over the run's tokens."""
        flops = sum(
            stage.share * stage.tokens * training_flops_per_token(shape, stage.sequence_length, self.adapter)
            for stage, shape, _ in self.step_specs()
        )
        return flops / self.tokens_per_step

    @property
    def host_memory(self) -> dict[str, int]:
        """Page-locked bytes of host memory of all GPUs, by item, in the stage that needs most."""
        stages = (host_memory(shape, spec) for _, shape, spec in self.step_specs())
        items = max(stages, key=lambda items: sum(items.values()))
        return {item: self.gpus * size for item, size in items.items()}

    def host_items(self, host_bytes: int | None) -> dict[str, int]:
        """Return `host_memory`, with the copy that checkpoints are written from if `checkpoint.background` asks for it.

        host_bytes: memory of the host, None if unknown. With "auto", there is no copy if it does not fit.
        """
        items = self.host_memory
        if self.background is False:
            return items
        copies = self.gpus if self.sharded else 1  # only one of several replicas writes
        with_copy = items | {"checkpoint": copies * checkpoint_bytes(*self.step_spec(self.stages[-1]))}
        return with_copy if self.background is True or fits_host(with_copy, host_bytes) else items

    def step_specs(self) -> Iterator[tuple[StageSetting, ModelConfig, StepSpec]]:
        """Yield every stage with its model (which has the window of the stage) and its optimizer step."""
        for stage in self.stages:
            yield stage, *self.step_spec(stage)

    def step_spec(self, stage: StageSetting) -> tuple[ModelConfig, StepSpec]:
        """Return the model and the optimizer step of one stage."""
        shape = self.model
        if stage.window is not None:
            shape = shape.model_copy(update={"sliding_window": stage.window})
        rows = max(1, self.micro_tokens // stage.sequence_length)
        per_reader = stage.tokens // (stage.sequence_length * self.readers)
        while per_reader % rows:
            rows -= 1
        layers = shape.num_hidden_layers
        options = self.options()
        if self.sharded and self.copies == "step":  # sharding frees gathered weights after each use
            options["copies"] = "use"
        return shape, StepSpec(
            sequence_length=stage.sequence_length,
            tokens=stage.tokens,
            micro_tokens=rows * stage.sequence_length // self.context,
            kept_blocks=min(layers, sum(recipes.kept_blocks(share, layers) for share in self.kept)),
            **options,
        )


def setting_from_config(
    config: RunConfig,
    gpus: int,
    precision: Precision,
    cpu: bool = False,
    native: frozenset[LowFormat] = frozenset(),
) -> Setting:
    """Return the setting that `deskside train` would run. An automatic micro-batch is as large as the smallest step.

    native: formats below 16 bits that the card's tensor cores support.
    """
    start, stages = 0.0, []
    for stage in config.stages():
        stages.append(
            StageSetting(
                round(stage.until - start, 9), stage.sequence_length, config.stage_tokens(stage), stage.window
            )
        )
        start = stage.until
    longest = max(stage.sequence_length for stage in stages)
    readers = gpus // config.parallel.context
    largest = max(longest, min(stage.tokens for stage in stages) // readers)
    micro = largest if config.batch.micro_tokens == "auto" else config.batch.micro_tokens
    setting = Setting(
        model=config.model,
        stages=tuple(stages),
        micro_tokens=micro,
        gpus=gpus,
        sharded=gpus > 1 and config.parallel.mode == "shard",
        compiled=config.compute.compile != "off" and not (cpu and config.compute.compile == "auto"),
        background=config.checkpoint.background,
        grows=config.schedule.batch_growth > 1 and not config.schedule.stages,
        **step_options(config),
    )
    return with_precision(setting, config, precision, native)


def with_precision(
    setting: Setting, config: RunConfig, precision: Precision, native: frozenset[LowFormat]
) -> Setting:
    """Return the setting in another precision, with the configuration's options for it."""
    uncovered = model_uncovered_reason(config.model, adapters=config.adapter is not None)
    fused = config.compute.compile in ("auto", "fused") and uncovered is None
    # torch.compile does not support quantized layers. Without fused sublayers they run eagerly.
    eager = quantized(precision) and config.precision.backend == "deskside" and not fused
    compiled = setting.compiled and not eager
    return replace(
        setting,
        compiled=compiled,
        kept=kept_shares(config, precision),
        **format_options(config, precision, native, compiled and fused),
    )


def options(setting: Setting, staged: bool = False, config: RunConfig | None = None) -> dict[str, Any]:
    """Return the configuration that makes `deskside train` run this setting, without model, number format and adapters.

    staged: also write a single stage, which replaces the stages of a preset. config: the configuration that the result
    is added to; default: `deskside train`'s.
    """
    config = config or defaults()
    batch: dict[str, Any] = {
        "sequence_length": setting.sequence_length,
        "tokens": setting.stages[-1].tokens,
        "micro_tokens": setting.micro_tokens,
    }
    if len({stage.tokens for stage in setting.stages}) > 1 and setting.gradients == "released":
        batch["micro_tokens"] = "auto"  # every stage has its own size of passes
    result: dict[str, Any] = {"batch": batch, "compute": {}}
    if not setting.grows and (staged or len(setting.stages) > 1 or setting.stages[0].window is not None):
        until, stages = 0.0, []
        for stage in setting.stages:
            until += stage.share
            entry: dict[str, Any] = {"until": round(until, 6), "sequence_length": stage.sequence_length}
            if stage.tokens != setting.stages[-1].tokens:
                entry["batch_tokens"] = stage.tokens
            if stage.window is not None:
                entry["window"] = stage.window
            stages.append(entry)
        result["schedule"] = {"stages": stages}
        if any("batch_tokens" in entry for entry in stages):
            result["schedule"]["batch_growth"] = 1  # the stages have its batches
    if setting.activation_checkpointing != "none":
        result["compute"]["activation_checkpointing"] = setting.activation_checkpointing
    if setting.activation_offloading:
        result["compute"]["activation_offloading"] = True
    if setting.mlp_chunk_tokens is not None:
        result["compute"]["mlp_chunk_tokens"] = setting.mlp_chunk_tokens
    if setting.loss_chunk_tokens != config.compute.loss_chunk_tokens:
        result["compute"]["loss_chunk_tokens"] = setting.loss_chunk_tokens
    if optim := optim_options(setting, config):
        result["optim"] = optim
    if setting.sharded:
        result["parallel"] = {"mode": "shard"}
    if setting.context > 1:
        result["parallel"] = {"context": setting.context}
    if setting.gradient_dtype != "float32":
        result["parallel"] = {**result.get("parallel", {}), "gradient_dtype": setting.gradient_dtype}
    if setting.copies == "use":
        result["precision"] = {"weight_cache": False}
    return {part: values for part, values in result.items() if values}


def optim_options(setting: Setting, config: RunConfig) -> dict[str, Any]:
    """Return the optimizer options that differ from the defaults (format of the weights, format of the states,
    offloading, place of the gradients), and the optimizer's name with them, or if it is not that of `config`."""
    result: dict[str, Any] = {}
    if setting.weights != "float32":
        result["weights"] = setting.weights
    if setting.states != "float32":
        result["states"] = setting.states
    if setting.offload_optimizer:
        result["offload"] = True
    if setting.master_weights:
        result["master_weights"] = True
    if setting.gradients != "device":
        result["gradients"] = setting.gradients
    if result or setting.optimizer != config.optim.name:
        result["name"] = setting.optimizer
    return result


def pass_sizes(setting: Setting) -> list[int]:
    """Return the tokens per pass to try, largest first.

    Each divides the steps of all stages evenly and is at most half of the size before it, so that a search over them
    takes few evaluations. If gradients are released, a step is one pass.
    """
    if setting.gradients == "released":
        return [max(stage.tokens for stage in setting.stages)]
    longest = setting.sequence_length
    rows = math.gcd(*(stage.tokens // (longest * setting.readers) for stage in setting.stages))
    small_divisors = [n for n in range(1, math.isqrt(max(1, rows)) + 1) if rows % n == 0]
    divisors = sorted({1, *small_divisors, *(rows // n for n in small_divisors)}, reverse=True)
    rows_per_pass: list[int] = []
    for n in divisors:
        if n <= max(1, MAX_PASS_TOKENS // longest) and (not rows_per_pass or 2 * n <= rows_per_pass[-1]):
            rows_per_pass.append(n)
    return [n * longest for n in rows_per_pass]


def with_max_microbatch(setting: Setting) -> Setting:
    """Return the setting with the largest micro-batch: one pass per step, up to MAX_PASS_TOKENS."""
    return replace(setting, micro_tokens=pass_sizes(setting)[0])


def check_batch_divides(setting: Setting) -> None:
    """Raise UsageError if the rows of a step cannot be divided evenly among the GPUs."""
    for stage in setting.stages:
        rows_each(stage.tokens, stage.sequence_length, setting.readers)
