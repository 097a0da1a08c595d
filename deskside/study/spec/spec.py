"""What a study is, before it is expanded: factors with levels, designs, budgets, exclusions.

A study has one or more groups (sub-matrices), each with a base configuration and a budget of its own. `definition.py`
reads them from TOML, `expand.py` turns them into arms.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deskside.config.duration import Duration

Design = Literal["full", "one-at-a-time"]
Layer = Mapping[str, Any]

MAIN = "main"  # the group of a study that names none
EVALUATIONS = 6  # per trial, the last one at its end, so that arms can be compared at equal tokens


@dataclass(frozen=True)
class Budget:
    """What every arm of a group is given: time (of training alone), tokens or steps."""

    length: Duration

    @property
    def words(self) -> str:
        """As a person says it: "30 minutes of training", "100M tokens", "400 steps"."""
        if self.length.unit != "seconds":
            return str(self.length)
        seconds = self.length.value
        value, unit = (seconds / 60, "minute") if seconds >= 60 else (seconds, "second")
        return f"{value:g} {unit}{'' if value == 1 else 's'} of training"

    @property
    def default_layer(self) -> dict[str, Any]:
        """Configuration that a study may overrule: how often a trial is evaluated on the way.

        An interval is the budget over EVALUATIONS, rounded up where it is whole: the last evaluation is the one at the
        end.
        """
        unit, value = self.length.unit, self.length.value
        every = (
            max(1e-3, round(value / EVALUATIONS, 3)) if unit == "seconds" else -(-int(value) // EVALUATIONS)
        )
        return {"evaluate": {"every": str(Duration(every, unit))}}

    @property
    def layer(self) -> dict[str, Any]:
        """Configuration that it decides: the run's length, and that time is counted without compile and evaluation."""
        schedule = {"length": str(self.length)}
        if self.length.unit == "seconds":
            schedule["clock"] = "training"
        return {"schedule": schedule}


@dataclass(frozen=True)
class Level:
    """One value of a factor: configuration keys, and perhaps a preset beneath them. label: as it stands in a table."""

    name: str
    label: str
    set: Layer = field(default_factory=dict)
    preset: str | None = None


@dataclass(frozen=True)
class Factor:
    """What is varied."""

    name: str
    label: str
    levels: tuple[Level, ...]

    def level(self, name: str) -> Level:
        """The level of this name; it is known to be there."""
        return next(level for level in self.levels if level.name == name)


@dataclass(frozen=True)
class ExtraArm:
    """An arm written by hand: the baseline's levels but for `levels`, and `set` on top."""

    name: str
    label: str
    levels: dict[str, str]
    set: Layer


@dataclass(frozen=True)
class Exclusion:
    """Combinations that are not run. where: factor -> levels."""

    where: dict[str, tuple[str, ...]]
    why: str

    def covers(self, levels: Mapping[str, str]) -> bool:
        """Whether an arm with these levels is left out."""
        return all(levels.get(factor) in names for factor, names in self.where.items())


@dataclass(frozen=True)
class Matrix:
    """One group. set: layers of configuration for every arm, lowest first; within: factors whose levels are each
    compared with their own baseline; baseline: the level of every other factor that the others are compared with."""

    name: str
    title: str
    base: str
    budget: Budget | None
    seeds: int
    design: Design
    factors: tuple[Factor, ...]
    within: tuple[str, ...]
    baseline: dict[str, str]
    set: tuple[Layer, ...]
    arms: tuple[ExtraArm, ...]
    exclusions: tuple[Exclusion, ...]


@dataclass(frozen=True)
class Study:
    """A study as it was written. text: the TOML; claims: ids of facts/claims.toml that it speaks to; grouped: whether
    it names groups; overrides: configuration from the command line, which every group's `set` ends with."""

    name: str
    question: str
    memory_fraction: float
    claims: tuple[str, ...]
    groups: tuple[Matrix, ...]
    text: str
    grouped: bool
    overrides: Layer = field(default_factory=dict)
