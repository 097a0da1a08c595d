"""Length of a run, and the schedule of its learning rate and batch shape.

All values are functions of progress, the completed fraction of the run, so a schedule works with a length in time,
tokens, steps or epochs. `optim/lr_schedule.py` evaluates it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from deskside.config.base import Part
from deskside.config.duration import Duration


def _parse_warmup(given: Any) -> Any:
    """Return a fraction of the run (0.02), 0.0 for no warm-up (0), or a Duration (40, "40 steps", "10m")."""
    if isinstance(given, str):
        try:
            number = float(given)
        except ValueError:
            return Duration.parse(given)
        given = int(given) if given.strip().isdigit() else number
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return given
    if isinstance(given, int):
        return Duration.parse(given) if given else 0.0
    if not 0 <= given < 1:
        raise ValueError(
            f"a fraction of the run must be in [0, 1), not {given}; write steps as 40 or '40 steps'"
        )
    return given


Warmup = Annotated[Duration | float, BeforeValidator(_parse_warmup)]


class Stage(Part):
    """A part of the run with its own sequence length, batch and window."""

    until: float = Field(
        gt=0,
        le=1,
        description="progress at which this stage ends, as a fraction of the run; 1.0 for the last stage",
    )
    sequence_length: PositiveInt = Field(description="tokens per row in this stage")
    batch_tokens: PositiveInt | None = Field(
        None, description="tokens per step in this stage; if unset, batch.tokens"
    )
    window: PositiveInt | None = Field(
        None, description="attention window of the window layers, in tokens; if unset, model.sliding_window"
    )


class _Schedule(Part):
    """Fields of every schedule."""

    length: Duration | None = Field(
        None, description="length of the run: 24h, 1.5B tokens, 2000 steps, 3 epochs"
    )
    clock: Literal["wall", "training"] = Field(
        "wall",
        description="clock of a length in time: wall counts the whole time of the run's processes; training only "
        "counts the training steps, without compilation, evaluation and checkpoints",
    )
    warmup: Warmup = Field(
        0.02,
        description="fraction of the run, or a length such as 40 steps, over which the learning rate rises",
    )
    stages: tuple[Stage, ...] = Field(
        (), description="parts of the run with their own sequence length, batch and window"
    )

    batch_growth: PositiveInt = Field(
        1,
        le=64,
        description="sizes of the batch: n starts with 1/n of batch.tokens and adds as much n - 1 times, at equal "
        "distances (3: modded-nanogpt PR 163; a small start: arXiv 2505.23971)",
    )
    batch_growth_until: float = Field(
        0.67, gt=0, le=1, description="progress at which batch_growth reaches batch.tokens"
    )
    batch_lr: Literal["constant", "sqrt"] = Field(
        "constant",
        description="learning rate where the batch changes; sqrt: times the root of a step's tokens, relative to the "
        "mean of the run, as between runs (arXiv 2405.14578)",
    )

    tied_until: float = Field(
        0.0,
        ge=0,
        le=1,
        description="progress until which the embedding of an untied model equals its head, which has head_lr "
        "(modded-nanogpt PR 178: 2/3, and then the head's rate for both: set optim.embedding_lr)",
    )

    @model_validator(mode="after")
    def _check_warmup_and_stages(self) -> "_Schedule":
        if isinstance(self.warmup, Duration) and self.length is not None and self.warmup.unit != "steps":
            if self.warmup.unit != self.length.unit:
                raise ValueError(
                    f"warmup: '{self.warmup}' cannot be compared with a length in {self.length.unit}; "
                    f"write it in {self.length.unit}, in steps, or as a fraction such as 0.02"
                )
            if self.warmup.value >= self.length.value:
                raise ValueError(
                    f"warmup: '{self.warmup}' is not shorter than the run of {self.length}; shorten it"
                )
        ends = [stage.until for stage in self.stages]
        if ends != sorted(set(ends)):
            raise ValueError(f"stages: 'until' must ascend, not {ends}")
        if ends and ends[-1] != 1.0:
            raise ValueError(f"stages: the last stage must have until = 1.0, not {ends[-1]}")
        if self.batch_growth > 1 and any(stage.batch_tokens for stage in self.stages):
            raise ValueError("batch_growth: the stages have batch_tokens of their own; leave one of them out")
        return self


class WsdConfig(_Schedule):
    """Warm-up, constant learning rate, decay (WSD; Hu et al., arXiv 2404.06395)."""

    name: Literal["wsd"] = Field("wsd", description="learning-rate schedule: wsd, cosine or constant")
    decay: float = Field(
        0.65, ge=0, le=1, description="fraction of the run, at its end, over which the learning rate decays"
    )
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = Field(
        "linear", description="shape of the decay (1-sqrt and cosine: arXiv 2405.18392)"
    )
    decay_power: PositiveFloat = Field(
        1.0,
        description="exponent of a linear decay: 1.2 falls faster at first (modded-nanogpt PR 291), 0.5 later "
        "(slowrun PR 82), 3 is a cube",
    )
    final_lr_fraction: float = Field(
        0.05, ge=0, le=1, description="learning rate at the end, as a fraction of the peak"
    )

    @model_validator(mode="after")
    def _check_decay(self) -> "WsdConfig":
        if isinstance(self.warmup, float) and self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup: {self.warmup} and decay {self.decay} together exceed the run; lower one of them"
            )
        if isinstance(self.warmup, Duration) and self.decay == 1:
            raise ValueError(
                f"warmup: '{self.warmup}' has no time before a decay of 1; lower decay, or use warmup 0"
            )
        if self.decay_power != 1 and self.decay_shape != "linear":
            raise ValueError(
                f"decay_power: is for the shape linear, not {self.decay_shape}; remove it, or use decay_shape linear"
            )
        return self


class CosineConfig(_Schedule):
    """Warm-up, then cosine decay (Loshchilov and Hutter, arXiv 1608.03983)."""

    name: Literal["cosine"] = Field("cosine", description="learning-rate schedule: wsd, cosine or constant")
    final_lr_fraction: float = Field(
        0.1, ge=0, le=1, description="learning rate at the end, as a fraction of the peak"
    )


class ConstantConfig(_Schedule):
    """Warm-up, then a constant learning rate."""

    name: Literal["constant"] = Field(
        "constant", description="learning-rate schedule: wsd, cosine or constant"
    )


ScheduleConfig = Annotated[WsdConfig | CosineConfig | ConstantConfig, Field(discriminator="name")]


def grown(schedule: ScheduleConfig, stages: Sequence[Stage], tokens: int) -> tuple[Stage, ...]:
    """Return the stages, divided further where `batch_growth` changes the batch. tokens: per step at the end."""
    sizes = schedule.batch_growth
    ends = [schedule.batch_growth_until * size / (sizes - 1) for size in range(1, sizes)]
    divided, start = [], 0.0
    for until in sorted({*ends, *(stage.until for stage in stages)}):
        stage = next(stage for stage in stages if start < stage.until)
        own = tokens * (1 + sum(end <= start for end in ends)) // sizes
        divided.append(stage.model_copy(update={"until": until, "batch_tokens": own}))
        start = until
    return tuple(divided)
