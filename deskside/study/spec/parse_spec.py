"""Load a study from a preset (study/presets/*.toml) or a TOML file, with one-line errors. spec.py has the schema."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deskside.study.spec.expressions import leaves
from deskside.study.spec.spec import (
    DEFAULT_GROUP,
    MAX_SEEDS,
    RESERVED,
    Budget,
    GroupSpec,
    Layer,
    SeedCount,
    StudySpec,
    parse_budget,
    suggestion,
)
from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, toml_table

STUDY_KEYS = ("name", "question", "memory_fraction", "claims", "group")
GROUP_KEYS = [field.alias or key for key, field in GroupSpec.model_fields.items() if key != "name"]


def names() -> list[str]:
    """Return the studies that ship with deskside."""
    folder = resources.files("deskside.study").joinpath("presets")
    return sorted(e.name.removesuffix(".toml") for e in folder.iterdir() if e.name.endswith(".toml"))


def load(name: str) -> StudySpec:
    """Load a study by the name of its preset, or from a .toml file. Raises UsageError."""
    if name.endswith(".toml"):
        path = Path(name)
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            raise UsageError(f"{name}: no such file; the presets are {', '.join(names())}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{name}: cannot be read as a TOML file: {error}") from None
        return parse(text, name, path.parent)
    if name not in names():
        raise UsageError(f"{name}: no such study; {suggestion(name, [*names(), 'a .toml file'])}")
    text = resources.files("deskside.study").joinpath("presets", f"{name}.toml").read_text("utf-8")
    return parse(text, f"study {name}")


def parse(text: str, label: str = "study", folder: Path = Path()) -> StudySpec:
    """Parse the text of a study's file.

    Args:
        label: The beginning of every error message.
        folder: Where the files that it names are looked up.
    """
    try:
        top = toml_table(text)
    except Unreadable as error:
        raise UsageError(f"{label}: not valid TOML: {error}") from None
    for key in top.keys() - {*STUDY_KEYS, *GROUP_KEYS}:
        raise UsageError(f"{label}: {key}: unknown key; {suggestion(key, [*STUDY_KEYS, *GROUP_KEYS])}")
    groups = top.get("group") or [{"name": DEFAULT_GROUP}]
    defaults = {key: value for key, value in top.items() if key in GROUP_KEYS}
    if isinstance(groups, list):  # else the schema refuses it
        groups = [_with_defaults(defaults, own) if isinstance(own, Mapping) else own for own in groups]
    study = {key: top[key] for key in STUDY_KEYS if key in top}
    study |= {"group": groups, "grouped": bool(top.get("group")), "text": text}
    try:
        return StudySpec.model_validate(study, context={"folder": folder})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = [label, *_names_of(first["loc"], study)]
        if not study["grouped"] and len(location) > 1 and location[1] == f"group {DEFAULT_GROUP}":
            del location[1]
        message = " ".join(first["msg"].removeprefix("Value error, ").split())
        if first["type"] == "missing":
            message = "is missing"
        elif not isinstance(first["input"], (Mapping, list)) and first["type"] != "value_error":
            message += f", not {first['input']!r}"
        raise UsageError(": ".join([*location, message])) from None


def with_overrides(study: StudySpec, overrides: Layer) -> StudySpec:
    """Append configuration from the command line to `set` of every group.

    Raises UsageError for a key that the study sets or varies itself, where it would have no effect.
    """
    if not overrides:
        return study
    for path in leaves(overrides):
        key = ".".join(path)
        if key in RESERVED:
            raise UsageError(f"--{key}: a study sets it: {RESERVED[key]}")
        for group in study.groups:
            for factor in group.factors:
                if any(path in leaves(level.set) for level in factor.levels):
                    raise UsageError(
                        f"--{key}: factor {factor.name} of the study varies it; leave it out, or edit the study's file"
                    )
            if any(path in leaves(arm.set) for arm in group.arms):
                raise UsageError(
                    f"--{key}: an arm of the study sets it; leave it out, or edit the study's file"
                )
    groups = tuple(group.model_copy(update={"set": (*group.set, overrides)}) for group in study.groups)
    return study.model_copy(update={"groups": groups, "overrides": dict(overrides)})


def budget(
    minutes: float | None = None, tokens: str | int | None = None, steps: int | None = None
) -> Budget | None:
    """Return the budget given by command-line options, or None. Raises UsageError."""
    given = {"minutes_per_arm": minutes, "tokens_per_arm": tokens, "steps_per_arm": steps}
    table = {key: value for key, value in given.items() if value is not None}
    if len(table) > 1:
        options = " and ".join(f"--{key.replace('_', '-')}" for key in table)
        raise UsageError(f"{options}: an arm has one budget; give one of them")
    try:
        parsed = parse_budget(table or None)
    except ValueError as error:
        raise UsageError(str(error)) from None
    assert parsed is None or isinstance(parsed, Budget)
    return parsed


def check_seeds(given: Any, label: str) -> int:
    """Return the number of seeds. Raises UsageError."""
    try:
        return TypeAdapter(SeedCount).validate_python(given)
    except ValidationError:
        raise UsageError(f"{label}: must be 1 to {MAX_SEEDS} seeds, not {given!r}") from None


def _with_defaults(defaults: Layer, own: Layer) -> dict[str, Any]:
    """Merge the keys of the top level into a group. Only `set` is added to rather than replaced."""
    layers = [source["set"] for source in (defaults, own) if "set" in source]
    return {**defaults, **own, **({"set": layers} if layers else {})}


def _names_of(location: Sequence[str | int], table: Any) -> list[str]:
    """Return the path of an error in the file, such as "factor size", "level small", "set"."""
    found: list[str] = []
    for key in location:
        if isinstance(key, int) and found and found[-1] != "set":
            name = table[key].get("name") if isinstance(table[key], Mapping) else None
            found[-1] += f" {name or key + 1}"
        elif isinstance(key, str):
            found.append(key)
        try:
            table = table[key]
        except (LookupError, TypeError):
            table = None
    return found
