"""What a trial will take on this machine, by the planner's models, before anything is run. Imports no torch.

A budget in time is known beforehand; what lies around the training is added to it. For a budget in tokens or steps the
planner models the speed, from `deskside probe`'s measurements of this card or from published ones. Where there are
neither, as on a CPU that was never probed, nothing is said: a guess would be worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deskside.budget.step_spec import Precision
from deskside.config.run import RunConfig
from deskside.plan.candidates import SETUP_SECONDS
from deskside.plan.estimate import Estimate, estimate, fitted, of_config
from deskside.plan.request import Request, ask
from deskside.study.spec.expand import PlannedArm
from deskside.utils.errors import UsageError
from deskside.utils.format import gib
from deskside.utils.parsing import json_value

# Process start to the first step, and model and checkpoint written at the end: 3 to 5 s on two CPU cores.
CPU_SETUP_SECONDS = 5.0
FORWARD_SHARE = 1 / 3  # of a training step's time: the backward takes two


@dataclass(frozen=True)
class Here:
    """This machine, as far as it can be planned for. why_not: one line where speed and memory cannot be modelled."""

    request: Request | None
    why_not: str = ""

    @property
    def setup_seconds(self) -> float:
        """From a trial's process's start to its first step, and what its end takes."""
        if self.request is None:
            return CPU_SETUP_SECONDS
        if self.request.setup_seconds is not None:
            return self.request.setup_seconds
        return CPU_SETUP_SECONDS if self.request.card.is_cpu else SETUP_SECONDS


@dataclass(frozen=True)
class Forecast:
    """One trial. seconds_total: its whole process; seconds_training: of that, the training; None: not known.

    tokens: that it will train on; memory_gib: peak on the card; source: measured, published, or budget where the time
    was given and no speed is known; note: what a person should know of it.
    """

    seconds_total: float | None
    seconds_training: float | None
    tokens: float | None
    memory_gib: float | None
    source: str
    note: str = ""


def here(probes: str | Path = "probes") -> Here:
    """What is known of this machine. Raises RunError when an NVIDIA driver gives no answer."""
    try:
        return Here(
            ask(here=True, preset="124m", probes=str(probes))
        )  # the preset is there because one is asked for
    except UsageError as error:
        return Here(None, f"{str(error).split(';')[0]}; measure it with: deskside probe")


def forecast(arm: PlannedArm, here: Here, memory_fraction: float = 1.0) -> Forecast:
    """One trial of an arm. memory_fraction: the share of the card that its micro-batch is fitted into."""
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
    return Forecast(
        seconds_total=total,
        seconds_training=training,
        tokens=tokens,
        memory_gib=found.memory_bytes[1] / 2**30 if found is not None else None,
        source=here.request.calibration.source if here.request is not None else "budget" if training else "",
        note=note or "",
    )


def total_seconds(forecasts: Sequence[Forecast], devices: int = 1) -> float | None:
    """Of trials that are spread over devices, one at a time on each. None where a trial's time is not known."""
    seconds = [forecast.seconds_total for forecast in forecasts]
    known = [value for value in seconds if value is not None]
    if len(known) < len(seconds):
        return None
    return max(sum(known) / devices, max(known, default=0.0))


def _estimate(config: RunConfig, request: Request, memory_fraction: float) -> Estimate:
    """Memory and speed, the micro-batch fitted as training fits it unless the arm sets it."""
    cpu = request.card.is_cpu
    asked = config.precision.name
    precision: Precision = ("fp32" if cpu else "bf16") if asked == "auto" else asked
    native = frozenset() if cpu else request.card.native
    setting = of_config(config, 1, precision, cpu, native)
    capacity = int(request.card.memory_bytes * memory_fraction)
    if config.batch.micro_tokens == "auto":
        setting = fitted(setting, request.calibration, capacity)
    return estimate(setting, request.calibration, capacity)


def _evaluated_tokens(config: RunConfig, training: float, tokens: float | None) -> float:
    """Validation tokens that a trial reads: a part of the split on the way, the whole split at the end."""
    split = _validation_tokens(config)
    every, times = config.evaluate.every, 0
    if every is not None:
        steps = tokens / config.mean_step_tokens() if tokens is not None else 0
        amount = {"seconds": training, "tokens": tokens or 0, "steps": steps}[every.unit]
        times = int(amount // every.value)
    once = min(config.evaluate.tokens, split) if split is not None else config.evaluate.tokens
    return times * once + (split if split is not None else once)


def _validation_tokens(config: RunConfig) -> int | None:
    """Of prepared data; None where there is none yet. What is wrong with an index, the run itself will say."""
    if config.data.path is None:
        return None
    try:
        index = json_value((Path(config.data.path) / "index.json").read_bytes())
        return int(index["splits"]["val"]["tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
