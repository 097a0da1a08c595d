"""Memory and speed of a training setting, with their ranges.

The memory of a setting is the maximum over its stages, its speed the mean over the run. The ranges come from the
calibration: they are narrow after a measurement on this card, and wide without one.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from deskside.budget.host import host_sensitivity, replays_passes
from deskside.budget.host_memory import fits_host
from deskside.budget.memory import Memory, training_memory
from deskside.budget.speed import Rates, replays_by_itself, step_seconds
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.plan.calibrate import Calibration
from deskside.plan.setting import Setting, pass_sizes

MEMORY_SOURCE = (
    "modelled: activations as autograd and torch.compile save them for this project's blocks; the memory of compiled "
    "blocks beyond these was fitted on an H200 (docs/planner-accuracy.md)"
)
Range = tuple[float, float, float]  # low, expected, high
Fits = Literal["fits", "tight", "no"]
LINK_SPREAD = 0.5  # error of the communication time, as a share: only two H200 over NVLink were measured
# Error of the host time, as a share. Keys: whether `deskside probe` timed this machine's host. Processors differ by a
# factor of two; trials of one study on one host differed by +-13 % (docs/performance.md, "Small passes").
HOST_SPREAD = {True: 0.15, False: 0.5}
HOST_BOUND = 0.5  # d log(step) / d log(host) from which a plan calls a step host-bound
MAX_SPEED_SPREAD = 0.9  # keeps the low end of a speed above zero


@dataclass(frozen=True)
class StepEstimate:
    """Memory and speed of a setting on one card.

    memory: of the stage that needs most; memory_bytes: everything in the card's memory, including the CUDA context;
    capacity: bytes that programs can use; step: seconds of a mean step by item; host_sensitivity: d log(step seconds) /
    d log(host seconds); replays: passes are CUDA graphs.
    """

    setting: Setting
    memory: Memory
    memory_bytes: Range
    capacity: int
    step: dict[str, float]
    tokens_per_second: Range
    host_sensitivity: float = 0.0
    replays: bool = False

    @property
    def executed(self) -> Setting:
        """The setting as it is executed, with CUDA graphs on or off."""
        return replace(self.setting, graphs="on" if self.replays else "off")

    @property
    def speed_spread(self) -> float:
        """Half-width of the range of tokens/s, as a share."""
        low, expected, _ = self.tokens_per_second
        return 1 - low / expected

    @property
    def host_bound(self) -> bool:
        """True if the step time depends more on the host, which launches kernels, than on the device."""
        return self.host_sensitivity >= HOST_BOUND

    @property
    def step_seconds(self) -> float:
        return sum(self.step.values())

    @property
    def fits(self) -> Fits:
        """Verdict on memory: "fits" at the high end of the memory range, "tight" only as expected, or "no"."""
        _, expected, high = self.memory_bytes
        if high <= self.capacity:
            return "fits"
        return "tight" if expected <= self.capacity else "no"

    def fits_host(self, host_bytes: int | None) -> bool:
        """Return True if the page-locked memory fits into this much host memory, or if that is unknown."""
        return fits_host(self.setting.host_items(host_bytes), host_bytes)

    @property
    def accumulation(self) -> int:
        """Passes per step of the last stage."""
        return self.setting.step_spec(self.setting.stages[-1])[1].accumulation


def range_json(values: Range) -> dict[str, float]:
    """Return a range as {"low": ..., "expected": ..., "high": ...}."""
    return dict(zip(("low", "expected", "high"), values, strict=True))


def estimate(
    setting: Setting, calibration: Calibration, capacity: int, memory: Memory | None = None
) -> StepEstimate:
    """Return the memory and speed of a setting.

    capacity: bytes that programs can use. memory: the peak without CUDA graphs, if known.
    """
    captured = memory_of_captured_pass(setting, calibration, capacity)
    memory = captured or memory or peak_memory(setting)
    step = mean_step_seconds(replace(setting, graphs="on" if captured else "off"), calibration.rates)
    total = sum(step.values())
    sensitivity = host_sensitivity(total, step["host"], calibration.rates.host.overlap)
    # The calibration of a GPU covers neither the link between GPUs nor the host. Their errors are independent.
    spread = calibration.speed_spread
    if sensitivity:
        spread = math.hypot(spread, HOST_SPREAD[calibration.host_measured] * sensitivity)
    if setting.gpus > 1:
        spread = math.hypot(spread, LINK_SPREAD * (step["communication"] / total))
    spread = min(spread, MAX_SPEED_SPREAD)
    speed = setting.tokens_per_step / total
    return StepEstimate(
        setting=setting,
        memory=memory,
        memory_bytes=memory_range(memory, calibration),
        capacity=capacity,
        step=step,
        tokens_per_second=(speed * (1 - spread), speed, speed * (1 + spread)),
        host_sensitivity=sensitivity,
        replays=captured is not None,
    )


def memory_of_captured_pass(setting: Setting, calibration: Calibration, capacity: int) -> Memory | None:
    """Return the peak of a setting whose passes are CUDA graphs; None if they are not.

    With "auto", a run decides by its longest stage, and has no graphs if a captured pass does not fit.
    """
    if setting.graphs == "off":
        return None
    captured = replace(setting, graphs="on")
    longest = max(setting.stages, key=lambda stage: stage.share)
    shape, spec = captured.step_spec(longest)
    if not replays_passes(spec):
        return None
    if setting.graphs == "on":
        return peak_memory(captured)
    if not replays_by_itself(shape, spec, calibration.rates):
        return None
    memory = peak_memory(captured)
    return memory if memory_range(memory, calibration)[2] <= capacity else None


def estimate_max_microbatch(setting: Setting, calibration: Calibration, capacity: int) -> StepEstimate:
    """Return the estimate of a setting with the largest micro-batch that fits, at most the setting's own.

    If none fits at the high end of the memory range, it is the largest that is expected to fit; if none is, one row.
    """
    sizes = [n for n in pass_sizes(setting) if n <= setting.micro_tokens] or pass_sizes(setting)[-1:]
    best, best_memory = replace(setting, micro_tokens=sizes[-1]), None
    for size in sizes:
        trial = replace(setting, micro_tokens=size)
        memory = training_memory(*trial.step_spec(trial.stages[-1]))
        # The last stage has the longest rows and usually the peak. The others are only computed if the last one fits.
        if memory_range(memory, calibration)[1] > capacity:
            continue
        memory = peak_memory(trial, last=memory)
        _, expected, high = memory_range(memory, calibration)
        if high <= capacity or (best_memory is None and expected <= capacity):
            best, best_memory = trial, memory
        if high <= capacity:
            break
    return estimate(best, calibration, capacity, best_memory)


def mean_step_seconds(setting: Setting, rates: Rates) -> dict[str, float]:
    """Return the seconds of a mean step over all stages, by item (`budget.speed.ITEMS`)."""
    step: dict[str, float] = {}
    for stage, shape, spec in setting.step_specs():
        for item, seconds in step_seconds(shape, spec, rates).items():
            step[item] = step.get(item, 0.0) + stage.share * seconds
    return step


def peak_stage(setting: Setting) -> tuple[ModelConfig, StepSpec]:
    """Return the model and the optimizer step of the stage that needs most memory."""
    stages = [(shape, spec) for _, shape, spec in setting.step_specs()]
    return max(stages, key=lambda stage: training_memory(*stage).reserved)


def peak_memory(setting: Setting, last: Memory | None = None) -> Memory:
    """Return the memory of the stage that needs most. last: the memory of the last stage, if known."""
    stages = setting.stages if last is None else setting.stages[:-1]
    memories = [training_memory(*setting.step_spec(stage)) for stage in stages]
    if last is not None:
        memories.append(last)
    return max(memories, key=lambda memory: memory.reserved)


def memory_range(memory: Memory, calibration: Calibration) -> Range:
    """Return (low, expected, high) bytes in the card's memory: reserved by the allocator, plus the CUDA context."""
    spread, overhead, reserved = calibration.memory_spread, calibration.overhead_bytes, memory.reserved
    return reserved * (1 - spread) + overhead, reserved + overhead, reserved * (1 + spread) + overhead
