"""Studies as TOML: read, every key checked, one-line errors. The presets lie in presets/*.toml beside this file.

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
    preset = "medium"                    # above `base`, below `set`
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

design = "one-at-a-time" changes one factor at a time instead of combining all; [[arm]] adds one by hand. Top-level keys
are the defaults of every [[group]]; a file without groups is one group named "main". Configuration keys (`set`) are
checked by name here, and by value when the arms are built (`expand.py`).
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from deskside.config import merge, presets
from deskside.config.duration import Duration
from deskside.facts.claims import chosen, claims
from deskside.study.spec.spec import (
    MAIN,
    Budget,
    Design,
    Exclusion,
    ExtraArm,
    Factor,
    Layer,
    Level,
    Matrix,
    Study,
)
from deskside.study.spec.toml_table import (
    check_keys,
    named,
    one_of,
    table_at,
    tables_at,
    text_at,
    texts_at,
    unique,
)
from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, toml_table

OWN = ("name", "question", "memory_fraction", "claims", "group")  # of a study, not of a group
SHARED = (
    "title",
    "base",
    "seeds",
    "budget",
    "set",
    "factor",
    "design",
    "within",
    "baseline",
    "arm",
    "exclude",
)
BUDGETS = {"minutes_per_arm": "minutes", "tokens_per_arm": "tokens", "steps_per_arm": "steps"}
NAME = re.compile(r"[a-z0-9_]+")
LEVEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
ARM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
# What the study decides itself: the length comes from the budget, the seed from the trial.
DECIDED = {
    "seed": "every arm is run with several; give seeds = 3, or --seeds 3",
    **{
        f"schedule.{key}": "the budget gives it; use [budget], --minutes-per-arm or --tokens-per-arm"
        for key in ("length", "clock", *merge.LENGTH_ALIASES)
    },
}
MOST_SEEDS = 100
LONGEST = 100  # letters of a study's name
DEEPEST = 8  # tables within tables of a configuration


def names() -> list[str]:
    """The studies that ship with deskside."""
    folder = resources.files("deskside.study").joinpath("presets")
    return sorted(e.name.removesuffix(".toml") for e in folder.iterdir() if e.name.endswith(".toml"))


def load(name: str) -> Study:
    """A study by its preset's name, or from a .toml file. Raises UsageError with one line."""
    if name.endswith(".toml"):
        path = Path(name)
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            raise UsageError(f"{name}: no such file; studies that ship are {', '.join(names())}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{name}: cannot be read as a TOML file: {error}") from None
        return parse(text, name, path.parent)
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names())}, or a .toml file"
        raise UsageError(f"{name}: no such study; {hint}")
    text = resources.files("deskside.study").joinpath("presets", f"{name}.toml").read_text("utf-8")
    return parse(text, f"study {name}")


def parse(text: str, label: str = "study", folder: Path = Path()) -> Study:
    """A study from the text of its file. label: begins every error; folder: where files it names are looked for."""
    try:
        top = toml_table(text)
    except Unreadable as error:
        raise UsageError(f"{label}: not valid TOML: {error}") from None
    check_keys(top, (*OWN, *SHARED), label)
    if "name" not in top:
        raise UsageError(f'{label}: name is missing; give name = "my-study"')
    name = text_at(top, "name", label)
    if not ARM.fullmatch(name) or len(name) > LONGEST:
        raise UsageError(
            f"{label}: name: '{name[:40]}' is no folder name; use at most {LONGEST} letters, digits, - and _"
        )
    fraction = top.get("memory_fraction", 0.85)
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise UsageError(
            f"{label}: memory_fraction: is a share of the card's memory, such as 0.85, not {fraction!r}"
        )
    defaults = {key: value for key, value in top.items() if key in SHARED}
    tables = tables_at(top, "group", label)
    groups = [
        _group(defaults, table, label if not tables else named(table, "group", index, label), folder)
        for index, table in enumerate(tables or [{"name": MAIN}])
    ]
    unique([group.name for group in groups], "group", label)
    told = texts_at(top, "claims", label)
    try:
        chosen(told, claims())
    except UsageError as error:
        raise UsageError(f"{label}: {error}") from None
    return Study(
        name=name,
        question=text_at(top, "question", label, ""),
        memory_fraction=float(fraction),
        claims=told,
        groups=tuple(groups),
        text=text,
        grouped=bool(tables),
    )


def with_overrides(study: Study, overrides: Layer) -> Study:
    """The study with configuration from the command line, which ends `set` of every group.

    Raises UsageError for a key that the study decides or varies itself, where it would have no effect.
    """
    if not overrides:
        return study
    for path in _leaves(overrides):
        key = ".".join(path)
        if key in DECIDED:
            raise UsageError(f"--{key}: a study decides it: {DECIDED[key]}")
        for group in study.groups:
            for factor in group.factors:
                if any(path in _leaves(level.set) for level in factor.levels):
                    raise UsageError(
                        f"--{key}: the study varies it (factor {factor.name}); leave it out, or change the study's file"
                    )
            if any(path in _leaves(arm.set) for arm in group.arms):
                raise UsageError(
                    f"--{key}: an arm of the study sets it; leave it out, or change the study's file"
                )
    groups = tuple(replace(group, set=(*group.set, overrides)) for group in study.groups)
    return replace(study, groups=groups, overrides=overrides)


def budget(
    minutes: float | None = None, tokens: str | int | None = None, steps: int | None = None
) -> Budget | None:
    """The budget of the command line's options, None for none. Raises UsageError."""
    given = {"minutes_per_arm": minutes, "tokens_per_arm": tokens, "steps_per_arm": steps}
    table = {key: value for key, value in given.items() if value is not None}
    if len(table) > 1:
        options = " and ".join(f"--{key.replace('_', '-')}" for key in table)
        raise UsageError(f"{options}: an arm has one budget; give one of them")
    return _budget(table, "") if table else None


def _group(defaults: Mapping[str, Any], own: Mapping[str, Any], label: str, folder: Path) -> Matrix:
    check_keys(own, ("name", *SHARED), label)
    name = text_at(own, "name", label, "")
    if not LEVEL.fullmatch(name):
        raise UsageError(
            f"{label}: name: '{name}' is no name of a group; use letters and digits, such as \"speed\""
        )
    table = {**defaults, **own}
    base = _preset(text_at(table, "base", label), label, folder)
    layers = [table_at(source, "set", label) for source in (defaults, own) if "set" in source]
    for layer in layers:
        _check_set(layer, f"{label}: set")
    factors = tuple(
        _factor(entry, named(entry, "factor", index, label), folder)
        for index, entry in enumerate(tables_at(table, "factor", label))
    )
    unique([factor.name for factor in factors], "factor", label)
    by_name = {factor.name: factor for factor in factors}
    design = table.get("design", "full")
    if design not in get_args(Design):
        raise UsageError(f"{label}: design: is {' or '.join(get_args(Design))}, not {design!r}")
    within = texts_at(table, "within", label)
    for factor in within:
        one_of(factor, by_name, "factor", f"{label}: within")
    seeds = table.get("seeds", 1)
    arms = tuple(
        _arm(entry, by_name, named(entry, "arm", index, label))
        for index, entry in enumerate(tables_at(table, "arm", label))
    )
    unique([arm.name for arm in arms], "arm", label)
    exclusions = tuple(
        _exclusion(entry, by_name, f"{label}: exclude {index + 1}")
        for index, entry in enumerate(tables_at(table, "exclude", label))
    )
    return Matrix(
        name=name,
        title=text_at(table, "title", label, ""),
        base=base,
        budget=_budget(table_at(table, "budget", label), f"{label}: budget: ") if "budget" in table else None,
        seeds=check_seeds(seeds, f"{label}: seeds"),
        design=design,
        factors=factors,
        within=within,
        baseline=_baseline(table_at(table, "baseline", label), factors, within, f"{label}: baseline"),
        set=tuple(layers),
        arms=arms,
        exclusions=exclusions,
    )


def check_seeds(given: Any, label: str) -> int:
    """A number of seeds. Raises UsageError."""
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MOST_SEEDS:
        raise UsageError(
            f"{label}: is how many seeds every arm is run with, 1 to {MOST_SEEDS}, not {given!r}"
        )
    return given


def _factor(table: Mapping[str, Any], label: str, folder: Path) -> Factor:
    check_keys(table, ("name", "label", "level"), label)
    name = text_at(table, "name", label)
    if not NAME.fullmatch(name) or name == "arm":
        raise UsageError(
            f"{label}: name: '{name}' is no name of a factor; use a-z, 0-9 and _ (and not 'arm')"
        )
    said = text_at(table, "label", label, name.replace("_", " "))
    levels = []
    for index, entry in enumerate(tables_at(table, "level", label)):
        where = named(entry, "level", index, label)
        check_keys(entry, ("name", "label", "set", "preset"), where)
        level = text_at(entry, "name", where)
        if not LEVEL.fullmatch(level):
            raise UsageError(
                f"{where}: name: '{level}' is no name of a level; use letters, digits, ., + and -"
            )
        layer = table_at(entry, "set", where)
        _check_set(layer, f"{where}: set")
        preset = _preset(text_at(entry, "preset", where), where, folder) if "preset" in entry else None
        levels.append(Level(level, text_at(entry, "label", where, f"{said} {level}"), layer, preset))
    if len(levels) < 2:
        raise UsageError(f"{label}: a factor has two levels or more; put what all arms share into [set]")
    unique([level.name for level in levels], "level", label)
    return Factor(name, said, tuple(levels))


def _arm(table: Mapping[str, Any], factors: Mapping[str, Factor], label: str) -> ExtraArm:
    check_keys(table, ("name", "label", "levels", "set"), label)
    name = text_at(table, "name", label)
    if not ARM.fullmatch(name):
        raise UsageError(f"{label}: name: '{name}' is no folder name; use letters, digits, ., +, - and _")
    levels = {
        key: _level(value, key, factors, f"{label}: levels")
        for key, value in table_at(table, "levels", label).items()
    }
    layer = table_at(table, "set", label)
    _check_set(layer, f"{label}: set")
    return ExtraArm(name, text_at(table, "label", label, name), levels, layer)


def _exclusion(table: Mapping[str, Any], factors: Mapping[str, Factor], label: str) -> Exclusion:
    check_keys(table, ("where", "why"), label)
    where = {}
    for key, value in table_at(table, "where", label).items():
        values = value if isinstance(value, list) else [value]
        where[key] = tuple(_level(one, key, factors, f"{label}: where") for one in values)
    if not where:
        raise UsageError(f'{label}: where is missing; write where = {{size = "large"}}')
    return Exclusion(where, text_at(table, "why", label))


def _baseline(
    given: Mapping[str, Any], factors: tuple[Factor, ...], within: tuple[str, ...], label: str
) -> dict[str, str]:
    by_name = {factor.name: factor for factor in factors}
    chosen = {key: _level(value, key, by_name, label) for key, value in given.items()}
    for key in chosen:
        if key in within:
            raise UsageError(
                f"{label}: {key} has no effect: it is in `within`, so each of its levels has its own baseline"
            )
    return {f.name: chosen.get(f.name, f.levels[0].name) for f in factors if f.name not in within}


def _level(given: Any, factor: str, factors: Mapping[str, Factor], label: str) -> str:
    one_of(factor, factors, "factor", label)
    levels = [level.name for level in factors[factor].levels]
    if not isinstance(given, str):
        raise UsageError(f"{label}: {factor}: is the name of a level in quotes, not {given!r}")
    return one_of(given, levels, "level", f"{label}: {factor}")


def _budget(table: Mapping[str, Any], label: str) -> Budget:
    if len(table) != 1 or next(iter(table)) not in BUDGETS:
        wrong = [key for key in table if key not in BUDGETS]
        near = difflib.get_close_matches(wrong[0], BUDGETS, n=1) if wrong else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"{label}give exactly one of {', '.join(BUDGETS)}, not {', '.join(table) or 'none'}{hint}"
        )
    key, value = next(iter(table.items()))
    try:
        if key == "minutes_per_arm":
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"is a number of minutes above zero, not {value!r}")
            return Budget(Duration(round(60 * float(value), 6), "seconds"))
        unit = BUDGETS[key]
        text = str(value).strip()
        found = Duration.parse(text if unit[:-1] in text.lower() else f"{text} {unit}")
        if isinstance(value, (bool, float)) or found.unit != unit:
            raise ValueError(f"is a whole number of {unit}, not {value!r}")
        return Budget(found)
    except ValueError as error:
        raise UsageError(f"{label}{key}: {error}") from None


def _check_set(layer: Layer, label: str) -> None:
    """Raises UsageError for a key that no run has, or that the study decides."""
    known = _configuration_keys()
    try:
        paths = list(_leaves(layer))
    except UsageError as error:
        raise UsageError(f"{label}: {error}") from None
    for path in paths:
        key = ".".join(path)
        if key in DECIDED:
            raise UsageError(f"{label}.{key}: a study decides it: {DECIDED[key]}")
        if any(other[: len(path)] == path for other in known - {path}):
            raise UsageError(f"{label}: {key}: is a table of options, such as {key}.{_example(path)}")
        if path not in known:
            raise UsageError(f"{label}: {merge.unknown_key(key)}")


def _example(path: tuple[str, ...]) -> str:
    return next(
        ".".join(other[len(path) :]) for other in sorted(_configuration_keys()) if other[: len(path)] == path
    )


@cache
def _configuration_keys() -> frozenset[tuple[str, ...]]:
    return frozenset(dict(merge.keys()))


def _leaves(layer: Layer, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in layer.items():
        path = (*prefix, key)
        if len(path) > DEEPEST:
            raise UsageError(f"{'.'.join(path)}: tables are nested too deeply; no option is")
        if isinstance(value, Mapping) and path != ("data", "weights"):
            yield from _leaves(value, path)
        else:
            yield path


def _preset(name: str, label: str, folder: Path) -> str:
    """A preset's name as it is, a file's path from here. Raises UsageError when there is none."""
    found = str(folder / name) if name.endswith(".toml") else name
    try:
        presets.for_pretraining(found)
    except UsageError as error:
        raise UsageError(f"{label}: {error}") from None
    return found
