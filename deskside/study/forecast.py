"""Forecast of a trial's time and memory on this machine, from the planner's models. Imports no torch.

A time budget is known; set-up and evaluation are added. For a budget in tokens or steps the planner models the
speed, from `deskside probe` measurements of this GPU or from published ones. Without either, as on a CPU that was
never probed, there is no forecast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deskside.budget.step_spec import Precision
from deskside.config.run import RunConfig
from deskside.plan.candidates import SETUP_SECONDS
from deskside.plan.estimate import StepEstimate, estimate, fitted, of_config
from deskside.plan.request import PlanQuestion, PlanRequest, ask
from deskside.study.spec.expand import PlannedArm
from deskside.utils.errors import UsageError
from deskside.utils.format import gib
from deskside.utils.parsing import json_value

# Process start to the first step, and model and checkpoint written at the end: 3 to 5 s on two CPU cores.
CPU_SETUP_SECONDS = 5.0
FORWARD_SHARE = 1 / 3  # of a training step's time: the backward takes two


@dataclass(frozen=True)
class Here:
    """This machine as the planner knows it. why_not: one line if speed and memory cannot be modelled."""

    request: PlanRequest | None
    why_not: str = ""

    @property
    def setup_seconds(self) -> float:
        """Return the seconds from process start to the first step, plus those after the last."""
        if self.request is None:
            return CPU_SETUP_SECONDS
        if self.request.setup_seconds is not None:
            return self.request.setup_seconds
        return CPU_SETUP_SECONDS if self.request.card.is_cpu else SETUP_SECONDS


@dataclass(frozen=True)
class TrialForecast:
    """The forecast of one trial. Values are None if unknown.

    seconds_total: the whole process, of which seconds_training is training. memory_gib: peak on the GPU. source:
    "measured", "published", or "budget" if only the time is known. note: a warning for the user.
    """

    seconds_total: float | None
    seconds_training: float | None
    tokens: float | None
    memory_gib: float | None
    source: str
    note: str = ""


def here(probes: str | Path = "probes") -> Here:
    """Return this machine. Raises RunError if an NVIDIA driver does not respond."""
    try:
        return Here(
            ask(PlanQuestion(here=True, preset="124m", probes=str(probes)))
        )  # the preset is there because one is asked for
    except UsageError as error:
        return Here(None, f"{str(error).split(';')[0]}; measure it with: deskside probe")


def forecast(arm: PlannedArm, here: Here, memory_fraction: float = 1.0) -> TrialForecast:
    """Forecast one trial of an arm. memory_fraction: share of the GPU memory that the micro-batch is fitted into."""
    length = arm.config.schedule.length
    if length is None or length.unit == "epochs":
        raise ValueError("an arm's length is in time, tokens or steps")
    found = _estimate(arm.config, here.request, memory_fraction) if here.request is not None else None
    speed = found.tokens_per_second[1] if found is not None else None
    training = tokens = None
    if length.unit == "seconds":
        training = float(length.value)
        tokens = training * speed if speed is not None else None
    else:
        tokens = float(length.value) * (arm.config.mean_step_tokens() if length.unit == "steps" else 1)
        training = tokens / speed if speed is not None else None
    total = note = None
    if training is not None:
        total = here.setup_seconds + training
        read = _evaluated_tokens(arm.config, training, tokens)
        if speed is not None:
            total += read * FORWARD_SHARE / speed
    if found is not None and found.fits == "no":
        note = f"not expected to fit: {gib(found.memory_bytes[1])} of {gib(found.capacity)}"
    elif found is not None and found.setting.emulated:
        note = "emulated here"
    return TrialForecast(
        seconds_total=total,
        seconds_training=training,
        tokens=tokens,
        memory_gib=found.memory_bytes[1] / 2**30 if found is not None else None,
        source=here.request.calibration.source if here.request is not None else "budget" if training else "",
        note=note or "",
    )


def total_seconds(forecasts: Sequence[TrialForecast], devices: int = 1) -> float | None:
    """Return the duration of all trials, spread over the devices; None if one of them is unknown."""
    seconds = [forecast.seconds_total for forecast in forecasts]
    known = [value for value in seconds if value is not None]
    if len(known) < len(seconds):
        return None
    return max(sum(known) / devices, max(known, default=0.0))


def _estimate(config: RunConfig, request: PlanRequest, memory_fraction: float) -> StepEstimate:
    """Estimate memory and speed. The micro-batch is fitted as in training, unless the arm sets it."""
    cpu = request.card.is_cpu
    asked = config.precision.name
    precision: Precision = ("fp32" if cpu else "bf16") if asked == "auto" else asked
    native = frozenset() if cpu else request.card.native
    setting = of_config(config, 1, precision, cpu, native)
    capacity = int(request.card.memory_bytes * memory_fraction)
    estimator = fitted if config.batch.micro_tokens == "auto" else estimate
    return estimator(setting, request.calibration, capacity)


def _evaluated_tokens(config: RunConfig, training: float, tokens: float | None) -> float:
    """Return the validation tokens that a trial reads: part of the split at each evaluation, all of it at the end."""
    split = _validation_tokens(config)
    every, times = config.evaluate.every, 0
    if every is not None:
        steps = tokens / config.mean_step_tokens() if tokens is not None else 0
        amount = {"seconds": training, "tokens": tokens or 0, "steps": steps}[every.unit]
        times = int(amount // every.value)
    once = min(config.evaluate.tokens, split) if split is not None else config.evaluate.tokens
    return times * once + (split if split is not None else once)


def _validation_tokens(config: RunConfig) -> int | None:
    """Return the size of the validation split, or None if there is no valid index yet."""
    if config.data.path is None:
        return None
    try:
        index = json_value((Path(config.data.path) / "index.json").read_bytes())
        return int(index["splits"]["val"]["tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
