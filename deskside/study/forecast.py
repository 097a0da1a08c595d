"""Forecast of a trial's time and memory on this machine, from the planner's models. Does not import torch.

The time of a trial is its set-up, training and evaluation. With a time budget the training time is given. With a budget
in tokens or steps the planner models the speed from `deskside probe` measurements of this GPU or from published ones.
Without either, as for a CPU that was never probed, the time is unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from deskside.budget.step_spec import Precision
from deskside.config.recipes import default_precision
from deskside.config.run import RunConfig
from deskside.config.sections import DataConfig
from deskside.data.reading.index_file import INDEX
from deskside.data.reading.mixing import PERIOD
from deskside.data.reading.repetition import component_sizes, describe_epochs, epochs_at_temperature
from deskside.plan.card import PlanCard
from deskside.plan.estimate import StepEstimate, estimate, estimate_max_microbatch
from deskside.plan.question import PlanQuestion
from deskside.plan.request import PlanRequest, make_request
from deskside.plan.run_length import SETUP_SECONDS
from deskside.plan.setting import Setting, setting_from_config
from deskside.study.spec.expand import PlannedArm
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import gib
from deskside.utils.parsing import json_value

# From process start to the first step, plus saving the model and a checkpoint at the end: 3 to 5 s on two CPU cores.
CPU_SETUP_SECONDS = 5.0
# The forward pass's share of a training step's time; the backward pass takes the other two thirds.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class LocalMachine:
    """This machine as the planner models it.

    Attributes:
        request: The planner's request for this machine; None if speed and memory cannot be modelled here.
        why_unknown: The reason in one line if `request` is None.
    """

    request: PlanRequest | None
    why_unknown: str = ""

    @property
    def setup_seconds(self) -> float:
        """Seconds from process start to the first step. CPU_SETUP_SECONDS includes those after the last step."""
        if self.request is None:
            return CPU_SETUP_SECONDS
        if self.request.setup_seconds is not None:
            return self.request.setup_seconds
        return CPU_SETUP_SECONDS if self.request.card.is_cpu else SETUP_SECONDS

    def running(self, config: RunConfig) -> "LocalMachine":
        """Return the machine for runs of this configuration: without its GPU if they use the CPU."""
        if config.compute.device != "cpu" or self.request is None or self.request.card.is_cpu:
            return self
        return LocalMachine(
            None,
            "the CPU of a machine with a GPU is not modelled; hide the GPU with CUDA_VISIBLE_DEVICES= to model it",
        )


@dataclass(frozen=True)
class TrialForecast:
    """The forecast of one trial. Values are None if unknown.

    Attributes:
        seconds_total: Lifetime of the process, including `seconds_training`.
        tokens: Tokens that the trial trains on.
        memory_gib: Peak memory of the device.
        source: "measured" or "published" for the measurements that the planner used, "budget" if only a time budget
            is known, "" if nothing is.
        note: A warning for the user, or "".
        epochs: How often the languages or sources are read that a temperature draws; empty without one.
        mixture: A line about these epochs, or "".
    """

    seconds_total: float | None
    seconds_training: float | None
    tokens: float | None
    memory_gib: float | None
    source: str
    note: str = ""
    epochs: Mapping[str, float] = field(default_factory=dict)
    mixture: str = ""


def local_machine(probes: str | Path = "probes") -> LocalMachine:
    """Return this machine. probes: folder of the probe store. Raises RunError if the NVIDIA driver does not respond."""
    try:
        # A request needs a preset. Forecasts replace it with the configuration of the arm.
        return LocalMachine(make_request(PlanQuestion(here=True, preset="124m", probes=str(probes))))
    except UsageError as error:
        return LocalMachine(None, f"{str(error).split(';')[0]}; measure it with: deskside probe")


def forecast(arm: PlannedArm, machine: LocalMachine, memory_fraction: float = 1.0) -> TrialForecast:
    """Forecast one trial of an arm. memory_fraction: share of the GPU memory that the micro-batch is fitted into."""
    length = arm.config.schedule.length
    if length is None or length.unit == "epochs":
        raise ValueError("the length of an arm must be in time, tokens or steps")
    machine = machine.running(arm.config)
    estimated = speed = None
    source = "budget" if length.unit == "seconds" else ""
    if machine.request is not None:
        estimated = _estimate(arm.config, machine.request, memory_fraction)
        speed = estimated.tokens_per_second[1]
        source = machine.request.calibration.source
    training = tokens = None
    if length.unit == "seconds":
        training = float(length.value)
        tokens = training * speed if speed is not None else None
    else:
        tokens = float(length.value) * (arm.config.mean_step_tokens() if length.unit == "steps" else 1)
        training = tokens / speed if speed is not None else None
    total = None
    if training is not None:
        total = machine.setup_seconds + training
        if speed is not None:
            total += _evaluated_tokens(arm.config, training, tokens) * FORWARD_SHARE / speed
    note = ""
    if estimated is not None and estimated.fits == "no":
        note = f"not expected to fit: {gib(estimated.memory_bytes[1])} of {gib(estimated.capacity)}"
    elif estimated is not None and estimated.setting.emulated:
        note = "low-precision format emulated here"
    epochs, mixture = _mixture(arm.config.data, tokens)
    return TrialForecast(
        seconds_total=total,
        seconds_training=training,
        tokens=tokens,
        memory_gib=estimated.memory_bytes[1] / 2**30 if estimated is not None else None,
        source=source,
        note=note,
        epochs=epochs,
        mixture=mixture,
    )


def total_seconds(forecasts: Sequence[TrialForecast], devices: int = 1) -> float | None:
    """Return a lower bound of a study's duration on several devices, or None if a trial's time is unknown."""
    known = [forecast.seconds_total for forecast in forecasts if forecast.seconds_total is not None]
    if len(known) < len(forecasts):
        return None
    return max(sum(known) / devices, max(known, default=0.0))


def _estimate(config: RunConfig, request: PlanRequest, memory_fraction: float) -> StepEstimate:
    """Estimate memory and speed. The micro-batch is fitted into the memory, unless the arm sets it."""
    setting = setting_on(request.card, config)
    capacity = int(request.card.memory_bytes * memory_fraction)
    estimator = estimate_max_microbatch if config.batch.micro_tokens == "auto" else estimate
    return estimator(setting, request.calibration, capacity)


def setting_on(card: PlanCard, config: RunConfig) -> Setting:
    """Return the setting of a run on one device, in the precision that the run would choose there."""
    on_cpu, name = card.is_cpu or config.compute.device == "cpu", config.precision.name
    precision: Precision = default_precision(on_cpu) if name == "auto" else name
    return setting_from_config(config, 1, precision, on_cpu, frozenset() if on_cpu else card.native)


def _evaluated_tokens(config: RunConfig, training: float, tokens: float | None) -> float:
    """Return the number of validation tokens that a trial evaluates.

    Evaluations during training read `evaluate.tokens`, and the one at the end reads the whole validation split.

    Args:
        training: Training time in seconds.
        tokens: Tokens that the trial trains on; None if unknown.
    """
    split_tokens = _validation_tokens(config)
    interval, evaluations = config.evaluate.every, 0
    if interval is not None:
        steps = tokens / config.mean_step_tokens() if tokens is not None else 0
        amount = {"seconds": training, "tokens": tokens or 0, "steps": steps}[interval.unit]
        evaluations = int(amount // interval.value)
    if split_tokens is None:
        return (evaluations + 1) * config.evaluate.tokens
    return evaluations * min(config.evaluate.tokens, split_tokens) + split_tokens


def _mixture(data: DataConfig, tokens: float | None) -> tuple[dict[str, float], str]:
    """Return the planned epochs and the line about them; empty without a temperature, tokens or data."""
    key = data.temperature_key
    if not key or data.path is None or tokens is None:
        return {}, ""
    sizes = _component_sizes(Path(data.path), key)
    if not 1 < len(sizes) <= PERIOD:  # runs refuse such mixtures
        return {}, ""
    epochs = epochs_at_temperature(sizes, getattr(data, key), tokens)
    return epochs, describe_epochs(epochs, data, sizes)


@cache  # the arms of a study mostly have the same data
def _component_sizes(directory: Path, key: str) -> dict[str, int]:
    try:
        return component_sizes(directory, key)
    except (UsageError, RunError, OSError):  # the trials say what is wrong with the data
        return {}


def _validation_tokens(config: RunConfig) -> int | None:
    """Return the size of the validation split, or None if it is unknown."""
    if config.data.path is None:
        return None
    try:
        index = json_value((Path(config.data.path) / INDEX).read_bytes())
        return int(index["splits"]["val"]["tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
