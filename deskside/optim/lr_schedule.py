"""The learning rate and the stage as pure functions of progress, the share of the run that is done.

Progress is 0 before the first step and 1 after the last. Nothing here knows time or tokens: who calls decides what the
share is a share of, so the same functions serve a run of so many steps and a run of so many hours.
"""

import math
from dataclasses import dataclass

from deskside.config.duration import Duration
from deskside.config.schedule import CosineConfig, ScheduleConfig, Stage, WsdConfig


def lr_factor(config: ScheduleConfig, progress: float, planned_steps: int) -> float:
    """Learning rate as a fraction of its peak, in [0, 1].

    `progress` is (steps done) / `planned_steps`; values outside of [0, 1] count as the nearer end. The rise starts at
    one part rather than at zero, so that the first step trains. Raises ValueError if progress is not a number, or if
    the warm-up cannot be related to the length of the run.
    """
    if math.isnan(progress):
        raise ValueError("progress is not a number")
    progress = min(max(progress, 0.0), 1.0)
    warmup = warmup_share(config, planned_steps)
    if progress < warmup:
        return (progress * planned_steps + 1) / (warmup * planned_steps + 1)
    if isinstance(config, CosineConfig):
        share = (progress - warmup) / (1 - warmup)
        return config.final_lr_fraction + (1 - config.final_lr_fraction) * 0.5 * (
            1 + math.cos(math.pi * share)
        )
    if isinstance(config, WsdConfig) and progress > 1 - config.decay:
        share = min((progress - (1 - config.decay)) / config.decay, 1.0)
        fall = math.sqrt(share) if config.decay_shape == "1-sqrt" else share
        return 1 - (1 - config.final_lr_fraction) * fall
    return 1.0


def warmup_share(config: ScheduleConfig, planned_steps: int) -> float:
    """The warm-up as a share of the run.

    A warm-up given as a Duration is shortened to the time before the decay (half the run for cosine and constant),
    because 40 steps of warm-up must not swallow a run of 30. Raises ValueError if its unit cannot be compared.
    """
    if planned_steps < 1:
        raise ValueError(f"a run has at least one step, not {planned_steps}")
    if not isinstance(config.warmup, Duration):
        return config.warmup
    if config.warmup.unit == "steps":
        share = config.warmup.value / planned_steps
    elif config.length is not None and config.length.unit == config.warmup.unit:
        share = config.warmup.value / config.length.value
    else:
        raise ValueError(f"warmup: '{config.warmup}' cannot be compared with the length {config.length}")
    return min(share, 1 - config.decay if isinstance(config, WsdConfig) else 0.5)


def stage_at(config: ScheduleConfig, progress: float) -> Stage | None:
    """The stage that a step at `progress` trains in, None when the schedule has none. `until` belongs to the next."""
    for stage in config.stages:
        if progress < stage.until:
            return stage
    return config.stages[-1] if config.stages else None


@dataclass(frozen=True)
class SchedulePoint:
    """One moment of a schedule: what begins or ends there, and the learning rate and stage from there on."""

    what: str
    step: int
    progress: float
    lr_factor: float
    stage: Stage | None


def describe(config: ScheduleConfig, planned_steps: int) -> list[SchedulePoint]:
    """The moments at which the schedule changes, in order, for `deskside train --dry-run`."""
    moments: list[tuple[float, str]] = [(0.0, "start")]
    warmup = warmup_share(config, planned_steps)
    if warmup > 0:
        moments.append((warmup, "warm-up ends"))
    if isinstance(config, WsdConfig) and config.decay > 0:
        moments.append((1 - config.decay, f"{config.decay_shape} decay starts"))
    moments += [(s.until, f"stage {i + 2} starts") for i, s in enumerate(config.stages[:-1])]
    moments.append((1.0, "end"))
    return [
        SchedulePoint(
            what, round(at * planned_steps), at, lr_factor(config, at, planned_steps), stage_at(config, at)
        )
        for at, what in sorted(moments, key=lambda moment: moment[0])
    ]
