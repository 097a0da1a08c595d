"""The schema of a study's TOML file: factors with levels, designs, budgets, exclusions.

    name = "gqa"
    question = "What does grouped-query attention cost?"
    base = "small"                       # a preset or .toml, as in deskside train
    seeds = 3
    within = ["size"]                    # each size has its own baseline
    [budget]
    minutes_per_arm = 30                 # or tokens_per_arm = "100M", or steps_per_arm = 400
    [set]
    batch.tokens = 65536                 # configuration of every arm
    [[factor]]
    name = "size"
    [[factor.level]]
    name = "small"
    [[factor.level]]
    name = "medium"
    preset = "medium"                    # applied after `base` and before `set`
    [[factor]]
    name = "gqa"
    [[factor.level]]                     # the first level is the baseline, unless [baseline] names another
    name = "off"
    set.model.num_key_value_heads = "= model.num_attention_heads"
    [[factor.level]]
    name = "on"
    set.model.num_key_value_heads = "= model.num_attention_heads / 4"
    [[exclude]]
    where = { size = "medium", gqa = "off" }
    why = "it does not fit"

With design = "one-at-a-time", one factor at a time differs from the baseline, instead of all combinations. [[arm]] adds
an arm by hand. Top-level keys are the defaults of every [[group]]; a file without groups has one group named "main".
The names of the configuration keys in `set` are checked here, and their values when the arms are built (`expand.py`).
"""

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from deskside.config import merge, presets
from deskside.config.base import Part
from deskside.config.duration import Duration
from deskside.facts.claims import claims, matching_ids
from deskside.study.results import Design
from deskside.study.spec.expressions import leaf_paths
from deskside.utils.errors import UsageError

Layer = Mapping[str, Any]

DEFAULT_GROUP = "main"  # name of the only group of a file without groups
# Evaluations per trial, the last one at its end; the comparison at equal tokens interpolates between them.
EVALUATIONS = 6
MAX_SEEDS = 100
BUDGETS = {"minutes_per_arm": "minutes", "tokens_per_arm": "tokens", "steps_per_arm": "steps"}
# Configuration keys that neither a study's file nor its command line may set, with the reason.
RESERVED = {
    "seed": "every arm runs with several seeds; give their number as seeds = 3, or --seeds 3",
    **{
        f"schedule.{key}": "the budget sets it; use [budget], or an option such as --minutes-per-arm"
        for key in ("length", "clock", *merge.LENGTH_ALIASES)
    },
}


@dataclass(frozen=True)
class Budget:
    """The training time, tokens or steps of every trial of a group."""

    length: Duration

    @property
    def text(self) -> str:
        """The budget as text: "30 minutes of training", "100M tokens", "400 steps"."""
        if self.length.unit != "seconds":
            return str(self.length)
        seconds = self.length.value
        value, unit = (seconds / 60, "minute") if seconds >= 60 else (seconds, "second")
        return f"{value:g} {unit}{'' if value == 1 else 's'} of training"

    @property
    def default_layer(self) -> dict[str, Any]:
        """Configuration layer with the evaluation interval budget / EVALUATIONS, which a study may override.

        Tokens and steps are rounded up, so that there are at most EVALUATIONS and the last one is at the end.
        """
        unit, value = self.length.unit, self.length.value
        if unit == "seconds":
            interval = max(1e-3, round(value / EVALUATIONS, 3))
        else:
            interval = math.ceil(int(value) / EVALUATIONS)
        return {"evaluate": {"every": str(Duration(interval, unit))}}

    @property
    def layer(self) -> dict[str, Any]:
        """Configuration layer with the run's length; a time budget counts training, not compilation or evaluation."""
        schedule = {"length": str(self.length)}
        if self.length.unit == "seconds":
            schedule["clock"] = "training"
        return {"schedule": schedule}


def parse_budget(given: object) -> object:
    """Parse {"minutes_per_arm": 30}, {"tokens_per_arm": "100M"} or {"steps_per_arm": 400} into a Budget.

    None and a Budget are returned unchanged. Raises ValueError for anything else.
    """
    if given is None or isinstance(given, Budget):
        return given
    if not isinstance(given, Mapping) or len(given) != 1 or not given.keys() <= BUDGETS.keys():
        raise ValueError(f"give exactly one of {', '.join(BUDGETS)}, not {given!r}")
    ((key, value),) = given.items()
    unit = BUDGETS[key]
    if key == "minutes_per_arm":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{key}: must be a positive number of minutes, not {value!r}")
        return Budget(Duration(round(60 * float(value), 6), "seconds"))
    text = str(value).strip()
    try:
        length = Duration.parse(text if unit[:-1] in text.lower() else f"{text} {unit}")
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    if isinstance(value, (bool, float)) or length.unit != unit:
        raise ValueError(f"{key}: must be a whole number of {unit}, not {value!r}")
    return Budget(length)


def suggestion(given: str, known: Collection[str]) -> str:
    """Return "did you mean X?", or "use one of ..." if no known name is similar."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean {near[0]}?" if near else f"use one of {', '.join(known) or '(none)'}"


def _check_known(given: str, known: Collection[str], kind: str, where: str) -> None:
    if given not in known:
        raise ValueError(f"{where}: {given}: unknown {kind}; {suggestion(given, known)}")


def _check_unique(names: Iterable[str], kind: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{kind} {name}: duplicate name; rename one of them")
        seen.add(name)


def _check_set(layer: Layer) -> Layer:
    """Refuse configuration keys that are unknown, reserved, or tables."""
    known = _configuration_keys()
    for path in leaf_paths(layer):
        key = ".".join(path)
        if key in RESERVED:
            raise ValueError(f"{key}: must not be in `set`: {RESERVED[key]}")
        options = [other for other in known if other[: len(path)] == path and other != path]
        if options:
            raise ValueError(f"{key}: is a table; set one of its options, such as {'.'.join(min(options))}")
        if path not in known:
            raise ValueError(str(merge.unknown_key(key)))
    return layer


@cache
def _configuration_keys() -> frozenset[tuple[str, ...]]:
    return frozenset(dict(merge.config_fields()))


def _check_preset(name: str, info: ValidationInfo) -> str:
    """Resolve a .toml path relative to the folder of the study's file, and check that the preset can be loaded."""
    folder = (info.context or {}).get("folder", Path())
    preset = str(folder / name) if name.endswith(".toml") else name
    try:
        presets.for_pretraining(preset)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return preset


def _check_claims(patterns: tuple[str, ...]) -> tuple[str, ...]:
    try:
        matching_ids(patterns, claims())
    except UsageError as error:
        raise ValueError(str(error).removeprefix("claims: ")) from None
    return patterns


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


FactorName = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
LevelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+-]*$")]
FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", max_length=100)]
PresetName = Annotated[str, AfterValidator(_check_preset)]
Settings = Annotated[dict[str, Any], AfterValidator(_check_set)]
SeedCount = Annotated[int, Field(ge=1, le=MAX_SEEDS, strict=True)]


class SpecPart(Part):
    """The base of the models below, which refuse unknown keys and accept field names as well as aliases."""

    model_config = ConfigDict(populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: object) -> object:
        if isinstance(data, Mapping):
            known = {name for key, field in cls.model_fields.items() for name in (field.alias or key, key)}
            for key in data.keys() - known:
                aliases = [field.alias or name for name, field in cls.model_fields.items()]
                raise ValueError(f"{key}: unknown key; {suggestion(key, aliases)}")
        return data


class LevelSpec(SpecPart):
    """One value of a factor: configuration keys, and optionally a preset applied before them."""

    name: LevelName
    label: str = ""
    set: Settings = Field(default_factory=dict)
    preset: PresetName | None = None


class FactorSpec(SpecPart):
    """A varied factor. The labels of its levels default to "FACTOR LEVEL"."""

    name: FactorName
    label: str = ""
    levels: tuple[LevelSpec, ...] = Field(alias="level")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.levels) < 2:
            raise ValueError(
                "a factor needs two or more levels; a key that is the same in all arms belongs in [set]"
            )
        _check_unique((level.name for level in self.levels), "level")
        label = self.label or self.name.replace("_", " ")
        labelled = tuple(
            level if level.label else level.model_copy(update={"label": f"{label} {level.name}"})
            for level in self.levels
        )
        object.__setattr__(self, "label", label)  # the model is frozen
        object.__setattr__(self, "levels", labelled)
        return self

    def level(self, name: str) -> LevelSpec:
        """Return the level of this name."""
        return next(level for level in self.levels if level.name == name)


class ArmSpec(SpecPart):
    """An arm written by hand: the baseline with other `levels` and additional configuration `set`."""

    name: FolderName
    label: str = ""
    levels: dict[str, str] = Field(default_factory=dict)
    set: Settings = Field(default_factory=dict)

    @model_validator(mode="after")
    def _set_label(self) -> Self:
        object.__setattr__(self, "label", self.label or self.name)
        return self


class Exclusion(SpecPart):
    """Combinations that are not run.

    Attributes:
        where: Factor -> levels. A combination is excluded if it has one of the listed levels of every listed factor.
        why: The reason, for the output.
    """

    where: dict[str, Annotated[tuple[str, ...], BeforeValidator(_as_list)]] = Field(min_length=1)
    why: str

    def covers(self, levels: Mapping[str, str]) -> bool:
        """Return True if a combination of these levels is excluded. levels: factor -> level."""
        return all(levels.get(factor) in names for factor, names in self.where.items())


class GroupSpec(SpecPart):
    """A set of arms with the same base configuration, budget and factors.

    Attributes:
        base: Preset or .toml file of the base configuration.
        within: Factors of which every level has its own baseline.
        baseline: The baseline's level of every other factor, by default the first.
        set: Configuration layers for every arm, lowest priority first.
    """

    name: LevelName
    title: str = ""
    base: PresetName
    budget: Annotated[Budget | None, BeforeValidator(parse_budget)] = None
    seeds: SeedCount = 1
    design: Design = "full"
    factors: tuple[FactorSpec, ...] = Field((), alias="factor")
    within: tuple[str, ...] = ()
    baseline: dict[str, str] = Field(default_factory=dict)
    set: Annotated[tuple[Settings, ...], BeforeValidator(lambda v: [v] if isinstance(v, Mapping) else v)] = ()
    arms: tuple[ArmSpec, ...] = Field((), alias="arm")
    exclusions: tuple[Exclusion, ...] = Field((), alias="exclude")

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_unique((factor.name for factor in self.factors), "factor")
        if any(factor.name == "arm" for factor in self.factors):
            raise ValueError("factor arm: this name is reserved for arms written by hand; rename it")
        _check_unique((arm.name for arm in self.arms), "arm")
        by_name = {factor.name: [level.name for level in factor.levels] for factor in self.factors}
        for factor in self.within:
            _check_known(factor, by_name, "factor", "within")
        chosen_levels: list[tuple[str, Iterable[tuple[str, str]]]] = [("baseline", self.baseline.items())]
        chosen_levels += [(f"arm {arm.name}: levels", arm.levels.items()) for arm in self.arms]
        for number, exclusion in enumerate(self.exclusions, 1):
            # An empty list of levels is checked as the level "", which is unknown.
            pairs = {(factor, name) for factor, names in exclusion.where.items() for name in names or ("",)}
            chosen_levels.append((f"exclude {number}: where", pairs))
        for where, levels in chosen_levels:
            for factor, name in levels:
                _check_known(factor, by_name, "factor", where)
                _check_known(name, by_name[factor], "level", f"{where}: {factor}")
        for factor in self.baseline.keys() & set(self.within):
            raise ValueError(
                f"baseline: {factor} has no effect, because each level of a factor in `within` has its own baseline; "
                f"remove it"
            )
        baseline = {
            factor: self.baseline.get(factor, names[0])
            for factor, names in by_name.items()
            if factor not in self.within
        }
        object.__setattr__(self, "baseline", baseline)  # the model is frozen
        return self


class StudySpec(SpecPart):
    """A whole study.

    Attributes:
        memory_fraction: Share of the GPU memory that a trial may use.
        claims: Ids in facts/claims.toml, with * and ?, that the study judges.
        grouped: True if the file has [[group]] entries.
        text: The text of the file.
        overrides: Configuration from the command line, which is also the last layer of every group's `set`.
    """

    name: FolderName
    question: str = ""
    memory_fraction: float = Field(0.85, gt=0, le=1, strict=True)
    claims: Annotated[tuple[str, ...], AfterValidator(_check_claims)] = ()
    groups: tuple[GroupSpec, ...] = Field(alias="group")
    grouped: bool = False
    text: str = ""
    overrides: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_unique((group.name for group in self.groups), "group")
        return self
