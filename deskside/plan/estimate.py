"""Memory and speed of one way of training, with their ranges.

A setting is a model and everything about its optimizer step. It may have stages of sequence length: its memory is that
of the stage that needs the most, and its speed the mean over the run. Ranges come from the calibration: narrow after a
measurement on this card, wide without one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deskside.budget.format_costs import LowFormat, emulated, quantized
from deskside.budget.host import host_sensitivity
from deskside.budget.memory import Memory, training_memory
from deskside.budget.shape import flops_per_token
from deskside.budget.speed import Rates, step_seconds
from deskside.budget.step_spec import Precision, StepOptions, StepSpec
from deskside.config import recipes
from deskside.config.dimensions import model_uncovered_reason
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from deskside.config.step_options import format_options, kept_shares, step_options
from deskside.plan.calibrate import Calibration
from deskside.plan.request import defaults
from deskside.utils.errors import UsageError

MEMORY_SOURCE = (
    "modelled: what autograd and torch.compile keep was read from this project's blocks; what lies beside them was "
    "fitted on an H200 (docs/planner-accuracy.md)"
)
Range = tuple[float, float, float]  # low, expected, high
Fits = Literal["fits", "tight", "no"]
LINK_SPREAD = 0.5  # of the time between GPUs: no run on several was measured
# Of the host's time, where `deskside probe` did not time this machine's: processors differ by a factor of two, and the
# trials of one study on one host by 13 % either way (docs/performance.md, "Small passes").
HOST_SPREAD = {True: 0.15, False: 0.5}
HOST_BOUND = 0.5  # share of the host in a step's time from which a plan says that the passes wait for it
WIDEST_SPREAD = 0.9  # the low end of a speed is a speed
# Rows per pass that are tried go down by halves, so that fitting is a handful of evaluations, as in training.
MOST_PASS_TOKENS = 2**18  # more tokens in one pass than this make nothing faster


@dataclass(frozen=True)
class StageSetting:
    """A share of the run's steps, in rows of `sequence_length`, `tokens` per step, window layers seeing `window`."""

    share: float
    sequence_length: int
    tokens: int
    window: int | None = None


@dataclass(frozen=True)
class Setting(StepOptions):
    """A model, and how a run trains it. micro_tokens: of one pass on one GPU; kept: shares of the blocks, front and
    back, that stay in BF16."""

    model: ModelConfig
    stages: tuple[StageSetting, ...]
    micro_tokens: int
    kept: tuple[float, float] = (0.0, 0.0)
    native: frozenset[LowFormat] = field(default=frozenset(), kw_only=True)

    @property
    def sequence_length(self) -> int:
        """Tokens per row of the longest stage."""
        return max(stage.sequence_length for stage in self.stages)

    @property
    def emulated(self) -> bool:
        """True if products of a lower format are computed in BF16, with the same numbers."""
        return emulated(self.precision, self.native) or (self.fp8_head and "fp8" not in self.native)

    @property
    def has_optional_cache(self) -> bool:
        """True if BF16 copies of the weights are cached that could be converted at each use instead."""
        return self.copies == "step" and self.precision == "bf16" and not self.sharded

    @property
    def shardable(self) -> bool:
        """True if training can shard this setting over several GPUs."""
        light = self.states == "8bit" or self.offload_optimizer or self.adapter is not None
        return not quantized(self.precision) and not light

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step, averaged over the run."""
        return sum(stage.share * stage.tokens for stage in self.stages)

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token, averaged over the run's tokens."""
        flops = sum(
            stage.share * stage.tokens * flops_per_token(shape, stage.sequence_length)
            for stage, shape, _ in self.step_specs()
        )
        return flops / self.tokens_per_step

    def step_specs(self) -> Iterator[tuple[StageSetting, ModelConfig, StepSpec]]:
        """Yield every stage with the model it trains (its window set) and its optimizer step."""
        for stage in self.stages:
            yield stage, *self.step_spec(stage)

    def step_spec(self, stage: StageSetting) -> tuple[ModelConfig, StepSpec]:
        """Return the model and the optimizer step of one stage."""
        shape = self.model
        if stage.window is not None:
            shape = shape.model_copy(update={"sliding_window": stage.window})
        rows = max(1, self.micro_tokens // stage.sequence_length)
        per_gpu = stage.tokens // (stage.sequence_length * self.gpus)
        while per_gpu % rows:
            rows -= 1
        layers = shape.num_hidden_layers
        options = self.options()
        if self.sharded and self.copies == "step":  # gathered weights do not outlast a pass
            options["copies"] = "use"
        return shape, StepSpec(
            sequence_length=stage.sequence_length,
            tokens=stage.tokens,
            micro_tokens=rows * stage.sequence_length,
            kept_blocks=min(layers, sum(recipes.kept_blocks(share, layers) for share in self.kept)),
            **options,
        )


@dataclass(frozen=True)
class StepEstimate:
    """Memory and speed of a setting on one card.

    memory: of the stage that needs the most; memory_bytes: everything that must be in the card's memory, the CUDA
    context included; step: seconds of a mean step by item; host_sensitivity: d log(step seconds) / d log(host seconds).
    """

    setting: Setting
    memory: Memory
    memory_bytes: Range
    capacity: int
    step: dict[str, float]
    tokens_per_second: Range
    host_sensitivity: float = 0.0

    @property
    def speed_spread(self) -> float:
        """Half-width of the range of tokens/s, as a share."""
        low, expected, _ = self.tokens_per_second
        return 1 - low / expected

    @property
    def host_bound(self) -> bool:
        """True if launching kernels takes most of a step, not the device's work."""
        return self.host_sensitivity >= HOST_BOUND

    @property
    def step_seconds(self) -> float:
        return sum(self.step.values())

    @property
    def fits(self) -> Fits:
        """Fits at the high end of the range ("fits"), only as expected ("tight"), or not ("no")."""
        _, expected, high = self.memory_bytes
        if high <= self.capacity:
            return "fits"
        return "tight" if expected <= self.capacity else "no"

    @property
    def accumulation(self) -> int:
        """Passes per step of the last stage."""
        return self.setting.step_spec(self.setting.stages[-1])[1].accumulation


def range_json(found: Range) -> dict[str, float]:
    return dict(zip(("low", "expected", "high"), found, strict=True))


def estimate(
    setting: Setting, calibration: Calibration, capacity: int, memory: Memory | None = None
) -> StepEstimate:
    """Return the memory and speed of a setting. capacity: bytes that the card has for programs; memory: the peak, if
    it is known already."""
    memory = memory or peak_memory(setting)
    step = setting_seconds(setting, calibration.rates)
    total = sum(step.values())
    sensitivity = host_sensitivity(total, step["host"], calibration.rates.host.overlap)
    # A calibration of one GPU says nothing about the link between several or about the host. Their times may be off by
    # half, which adds to the calibration's spread as independent errors.
    spread = calibration.speed_spread
    if sensitivity:
        spread = math.hypot(spread, HOST_SPREAD[calibration.host_measured] * sensitivity)
    if setting.gpus > 1:
        spread = math.hypot(spread, LINK_SPREAD * (step["communication"] / total))
    spread = min(spread, WIDEST_SPREAD)
    speed = setting.tokens_per_step / total
    return StepEstimate(
        setting=setting,
        memory=memory,
        memory_bytes=memory_range(memory, calibration),
        capacity=capacity,
        step=step,
        tokens_per_second=(speed * (1 - spread), speed, speed * (1 + spread)),
        host_sensitivity=sensitivity,
    )


def fitted(setting: Setting, calibration: Calibration, capacity: int) -> StepEstimate:
    """Return the estimate of a setting with the most tokens per pass, up to its own micro_tokens, that fit.

    If no pass fits at the high end of the memory range, the largest that is expected to fit is taken; if none is, a
    single row.
    """
    sizes = [n for n in pass_sizes(setting) if n <= setting.micro_tokens] or pass_sizes(setting)[-1:]
    chosen: tuple[Setting, Memory | None] = replace(setting, micro_tokens=sizes[-1]), None
    for size in sizes:
        tried = replace(setting, micro_tokens=size)
        memory = training_memory(*tried.step_spec(tried.stages[-1]))
        # The last stage has the longest rows and usually decides. The others are only computed if it fits.
        if memory_range(memory, calibration)[1] > capacity:
            continue
        memory = peak_memory(tried, last=memory)
        _, expected, high = memory_range(memory, calibration)
        if high <= capacity or (chosen[1] is None and expected <= capacity):
            chosen = tried, memory
        if high <= capacity:
            break
    return estimate(chosen[0], calibration, capacity, chosen[1])


def setting_seconds(setting: Setting, rates: Rates) -> dict[str, float]:
    """Return the seconds of a mean step by item (`budget.speed.ITEMS`), over all stages."""
    step: dict[str, float] = {}
    for stage, shape, spec in setting.step_specs():
        for item, seconds in step_seconds(shape, spec, rates).items():
            step[item] = step.get(item, 0.0) + stage.share * seconds
    return step


def peak_stage(setting: Setting) -> tuple[ModelConfig, StepSpec]:
    """Return the model and the step of the stage that needs the most memory."""
    stages = [(shape, spec) for _, shape, spec in setting.step_specs()]
    return max(stages, key=lambda stage: training_memory(*stage).reserved)


def peak_memory(setting: Setting, last: Memory | None = None) -> Memory:
    """Return the memory of the stage that needs the most. last: that of the last stage, if it is known already."""
    found = [training_memory(*setting.step_spec(stage)) for stage in setting.stages[: -1 if last else None]]
    return max([*found, last] if last else found, key=lambda memory: memory.reserved)


def memory_range(memory: Memory, calibration: Calibration) -> Range:
    """Return (low, expected, high) bytes in the card's memory: the allocator's reserve and the CUDA context."""
    spread, beside, reserved = calibration.memory_spread, calibration.overhead_bytes, memory.reserved
    return reserved * (1 - spread) + beside, reserved + beside, reserved * (1 + spread) + beside


def pass_sizes(setting: Setting) -> list[int]:
    """Return tokens per pass that divide every stage's step evenly, descending, each at most half of the one before."""
    longest = setting.sequence_length
    rows = math.gcd(*(stage.tokens // (longest * setting.gpus) for stage in setting.stages))
    small = [n for n in range(1, math.isqrt(max(1, rows)) + 1) if rows % n == 0]
    divisors = sorted({1, *small, *(rows // n for n in small)}, reverse=True)
    chosen: list[int] = []
    for n in divisors:
        if n <= max(1, MOST_PASS_TOKENS // longest) and (not chosen or 2 * n <= chosen[-1] or n == 1):
            chosen.append(n)
    return [n * longest for n in chosen]


def max_microbatch(setting: Setting) -> Setting:
    """Return the setting with each GPU's share of a step in one pass, from which `fitted` starts."""
    return replace(setting, micro_tokens=pass_sizes(setting)[0])


def check_shared(setting: Setting) -> None:
    """Raise UsageError if the GPUs cannot share a step's rows evenly."""
    for stage in setting.stages:
        if stage.tokens % (stage.sequence_length * setting.gpus):
            raise UsageError(
                f"batch.tokens: {stage.tokens} is {stage.tokens // stage.sequence_length} rows, which {setting.gpus} "
                f"GPUs cannot share evenly; use a multiple of {setting.gpus * stage.sequence_length}"
            )


def in_precision(
    setting: Setting, config: RunConfig, precision: Precision, native: frozenset[LowFormat]
) -> Setting:
    """Return the setting in another precision, with the configuration's options for it. native: formats of the card."""
    uncovered = model_uncovered_reason(config.model, adapters=config.adapter is not None)
    covered = config.compute.compile in ("auto", "fused") and uncovered is None
    # torch.compile does not take the layers of a quantized recipe: where no fused sublayer covers them, they run
    # eagerly.
    eager = quantized(precision) and config.precision.backend == "deskside" and not covered
    compiled = setting.compiled and not eager
    return replace(
        setting,
        compiled=compiled,
        kept=kept_shares(config, precision),
        **format_options(config, precision, native, compiled and covered),
    )


def of_config(
    config: RunConfig,
    gpus: int,
    precision: Precision,
    cpu: bool = False,
    native: frozenset[LowFormat] = frozenset(),
) -> Setting:
    """Return the setting that `deskside train` would run, with the micro-batch as large as the step.

    native: formats below 16 bits that the card's tensor cores have.
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
    asked = config.batch.micro_tokens
    micro = max(longest, min(stage.tokens for stage in stages) // gpus) if asked == "auto" else asked
    setting = Setting(
        model=config.model,
        stages=tuple(stages),
        micro_tokens=micro,
        gpus=gpus,
        sharded=gpus > 1 and config.parallel.mode == "shard",
        compiled=config.compute.compile != "off" and not (cpu and config.compute.compile == "auto"),
        **step_options(config),
    )
    return in_precision(setting, config, precision, native)


def optim_options(setting: Setting) -> dict[str, Any]:
    """Return the options of the optimizer that differ from the defaults: its name, the states' format and place."""
    result: dict[str, Any] = {}
    if setting.states != "float32":
        result["states"] = setting.states
    if setting.offload_optimizer:
        result["offload"] = True
    if result or setting.optimizer != defaults().optim.name:
        result["name"] = setting.optimizer
    return result


def options(setting: Setting, staged: bool = False) -> dict[str, Any]:
    """Return the configuration that makes `deskside train` run this setting, without the model.

    staged: also write a single stage, which replaces the stages of a preset.
    """
    batch = {
        "sequence_length": setting.sequence_length,
        "tokens": setting.stages[-1].tokens,
        "micro_tokens": setting.micro_tokens,
    }
    result: dict[str, Any] = {"batch": batch, "compute": {}}
    if staged or len(setting.stages) > 1 or setting.stages[0].window is not None:
        until, stages = 0.0, []
        for stage in setting.stages:
            until = round(until + stage.share, 6)
            entry: dict[str, Any] = {"until": until, "sequence_length": stage.sequence_length}
            if stage.tokens != setting.stages[-1].tokens:
                entry["batch_tokens"] = stage.tokens
            if stage.window is not None:
                entry["window"] = stage.window
            stages.append(entry)
        result["schedule"] = {"stages": stages}
    if setting.activation_checkpointing != "none":
        result["compute"]["activation_checkpointing"] = setting.activation_checkpointing
    if setting.loss_chunk_tokens != defaults().compute.loss_chunk_tokens:
        result["compute"]["loss_chunk_tokens"] = setting.loss_chunk_tokens
    if optim := optim_options(setting):
        result["optim"] = optim
    if setting.sharded:
        result["parallel"] = {"mode": "shard"}
    if setting.copies == "use":
        result["precision"] = {"weight_cache": False}
    return {part: values for part, values in result.items() if values}
