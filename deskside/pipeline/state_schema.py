"""Schema of go.json, checked before a pipeline is resumed.

The file may have been edited, truncated or written by another version. It is validated when it is opened: types and
ranges, the results that the current phase needs, the planned configuration, and the files of the run.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from deskside.config import merge
from deskside.config.base import Part, first_problem
from deskside.config.duration import Duration
from deskside.run.continuing import PIPELINE_FILE
from deskside.utils.errors import UsageError

SCHEMA = 1
MAX_HOURS, MAX_GIB = 1e6, 1e6  # more than a century; more than the memory of any GPU
MAX_GPUS = 10**4
Phase = Literal["doctor", "probe", "plan", "train", "report", "done"]
PHASES: tuple[Phase, ...] = ("doctor", "probe", "plan", "train", "report", "done")
PHASES_WITH_RESULT = PHASES[: PHASES.index("train")]

Hours = Annotated[float, Field(gt=0, le=MAX_HOURS)]
Count = Annotated[float, Field(gt=0, le=1e18)]
Bits = Annotated[float, Field(gt=0, le=1e3)]
Gib = Annotated[float, Field(ge=0, le=MAX_GIB)]
ThreeValues = Field(min_length=3, max_length=3)  # low, expected, high
Fits = Literal["fits", "tight", "no"]
Configuration = dict[str, Any]


class Strict(Part):
    """Base class that does not convert text to numbers."""

    model_config = ConfigDict(strict=True)


class GoOptionsRecord(Strict):
    """The options of `deskside go`. given: configuration options, checked as on the command line."""

    preset: str | None
    data: str | None
    given: dict[str, Any]
    gpu_budget: Annotated[float, Field(gt=0, le=MAX_GIB)] | None
    target_loss: Annotated[float, Field(gt=0)] | None
    probes: str
    own_corpus: bool = False  # not in older files
    gpus: Annotated[int, Field(gt=0, le=MAX_GPUS)] = 1  # processes that train. Not in older files
    length: str | None = None  # such as "10M tokens"; None: train for the given hours. Not in older files
    directory: str | None = None  # the working directory; not in older files
    yes: bool = False  # the plan needs no confirmation, also when resumed; not in older files

    @model_validator(mode="after")
    def _check_options(self) -> "GoOptionsRecord":
        if self.preset is None and self.data is None:
            raise ValueError("names neither a preset nor data")
        _accepted(merge.merge, "given", self.given)
        return self


class PhaseResult(Strict):
    """The result of a phase. Keys that are not declared are allowed."""

    model_config = ConfigDict(extra="allow")


class DoctorRecord(PhaseResult):
    status: Literal["fit", "unfit", "skipped"]


class ProbeRecord(PhaseResult):
    status: Literal["measured", "stored", "nothing", "skipped"]


class BandRecord(PhaseResult):
    """A band of the plan: one of up to three suggested models (safe, target, stretch), with its predictions.

    The first steps of training, the pilot, compare the predictions with measurements. weights: number of weights
    that a token is multiplied with, the size in the scaling law.
    """

    name: str
    preset: str
    params: Annotated[int, Field(gt=0, le=10**15)]
    weights: Count
    tokens: Annotated[list[Count], ThreeValues]
    tokens_per_second: Annotated[list[Count], ThreeValues]
    bpb: Annotated[list[Bits], ThreeValues]
    fits: Fits
    config: Configuration
    # For a run that ends before the hours are over: its length as in the configuration, and its expected duration.
    length: str = "1 steps"
    seconds: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    # Missing on a CPU, whose memory is not modelled.
    memory_gib: Annotated[list[Gib], ThreeValues] = Field(default_factory=lambda: [0.0] * 3)

    @model_validator(mode="after")
    def _in_order(self) -> "BandRecord":
        for name in ("tokens", "tokens_per_second", "bpb", "memory_gib"):
            if getattr(self, name) != sorted(getattr(self, name)):
                raise ValueError(f"{name}: low, expected and high are not in order")
        _accepted(merge.build, "config", self.config)
        Duration.parse(self.length)
        return self


class CompletedPlan(BandRecord):
    status: Literal["made"]
    pretrain_seconds: Annotated[float, Field(gt=0)]
    reasons: list[str]
    source: str
    bands: list[BandRecord]

    @model_validator(mode="after")
    def _is_a_band(self) -> "CompletedPlan":
        names = [band.name for band in self.bands]
        if len(set(names)) < len(names) or (names and self.name not in names):
            raise ValueError("bands: must be empty, or list each band once, including the trained one")
        return self


class SkippedPlan(PhaseResult):
    status: Literal["skipped"]
    reason: str
    pretrain_seconds: Annotated[float, Field(gt=0)]
    config: Configuration

    @model_validator(mode="after")
    def _can_be_built(self) -> "SkippedPlan":
        _accepted(merge.build, "config", self.config)
        return self


class PhaseResults(Strict):
    """Results of the finished phases."""

    doctor: DoctorRecord | None = None
    probe: ProbeRecord | None = None
    plan: Annotated[CompletedPlan | SkippedPlan, Field(discriminator="status")] | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_null(cls, data: object) -> object:
        if isinstance(data, Mapping) and None in data.values():
            raise ValueError("a result is null")
        return data


class GoFile(Strict):
    """The content of go.json."""

    schema_version: Annotated[int, Field(ge=SCHEMA, le=SCHEMA)]
    hours: Hours
    spent_seconds: Annotated[float, Field(ge=0, le=1e12)]
    phase: Phase
    command: str
    options: GoOptionsRecord
    results: PhaseResults
    continued_in: str | None

    @model_validator(mode="after")
    def _has_what_the_phase_needs(self) -> "GoFile":
        for earlier in PHASES_WITH_RESULT[: PHASES.index(self.phase)]:
            if getattr(self.results, earlier) is None:
                raise ValueError(f"phase: {self.phase}, but there is no result of {earlier}")
        plan = self.results.plan
        if plan is not None and plan.pretrain_seconds > self.hours * 3600:
            raise ValueError("results.plan.pretrain_seconds: longer than the time budget")
        name = self.continued_in
        if name is not None:
            if not name.isprintable() or name in ("", ".", "..") or "/" in name or "\\" in name:
                raise ValueError("continued_in: is not a folder name")
            if self.phase != "train":
                raise ValueError("continued_in: only the train phase continues in another run")
        return self


def problem(state: Mapping[str, Any], run: Path) -> str | None:
    """Return the first problem of the state of a pipeline in this run directory, as one line; None if it is valid."""
    try:
        _finite(state)
        checked = GoFile.model_validate(state)
    except ValidationError as error:
        return re.sub(r"results\.plan\.(made|skipped)", "results.plan", first_problem(error), count=1)
    except (ValueError, RecursionError) as error:
        return str(error)
    if checked.phase in ("report", "done"):
        for needed in ("run.json", "summary.json"):
            if not (run / needed).is_file():
                return f"phase: {checked.phase}, but there is no {needed}"
    if checked.continued_in is not None:
        other = run.absolute().parent / checked.continued_in
        if other == run.absolute():
            return "continued_in: is this run itself"
        if (other / "run.json").exists() and not (other / PIPELINE_FILE).exists():
            return f"continued_in: {checked.continued_in} was not started by deskside go"
    return None


def _accepted(check: Callable[[list[Configuration]], object], key: str, config: Configuration) -> None:
    """Raise ValueError if `check` rejects a configuration. key: where it is in the file, for the message."""
    try:
        check([config])
    except UsageError as error:
        # The part after the semicolon is advice for the command line.
        raise ValueError(f"{key}: {str(error).partition('; ')[0]}") from None


def _finite(value: Any) -> None:
    """Raise ValueError for a number that is not finite. JSON forbids such numbers, but Python's parser accepts them."""
    remaining = [value]
    while remaining:
        item = remaining.pop()
        if isinstance(item, float) and not abs(item) < float("inf"):
            raise ValueError(f"{item} is not a finite number")
        if isinstance(item, Mapping):
            remaining.extend(item.values())
        elif isinstance(item, list):
            remaining.extend(item)
