"""Parser of a study's TOML file, a preset (study/presets/*.toml) or the user's own. spec.py has the schema."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deskside.config.base import plain_message
from deskside.study.spec.expressions import leaf_paths
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


def preset_names() -> list[str]:
    """Return the names of the studies that ship with deskside."""
    files = [file.name for file in resources.files("deskside.study").joinpath("presets").iterdir()]
    return sorted(file.removesuffix(".toml") for file in files if file.endswith(".toml"))


def load(name: str) -> StudySpec:
    """Load a study by the name of its preset, or from a .toml file. Raises UsageError if it is missing or invalid."""
    if name.endswith(".toml"):
        path = Path(name)
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            raise UsageError(f"{name}: no such file; the presets are {', '.join(preset_names())}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{name}: cannot be read as a TOML file: {error}") from None
        return parse(text, name, path.parent)
    if name not in preset_names():
        raise UsageError(f"{name}: no such study; {suggestion(name, [*preset_names(), 'a .toml file'])}")
    text = resources.files("deskside.study").joinpath("presets", f"{name}.toml").read_text("utf-8")
    return parse(text, f"study {name}")


def parse(text: str, label: str = "study", folder: Path = Path()) -> StudySpec:
    """Parse the text of a study's file. Raises UsageError with a one-line message if it is invalid.

    Args:
        label: The beginning of every error message.
        folder: Folder that the relative paths of presets in the file start from.
    """
    try:
        top = toml_table(text)
    except Unreadable as error:
        raise UsageError(f"{label}: not valid TOML: {error}") from None
    for key in top.keys() - {*STUDY_KEYS, *GROUP_KEYS}:
        raise UsageError(f"{label}: {key}: unknown key; {suggestion(key, [*STUDY_KEYS, *GROUP_KEYS])}")
    groups = top.get("group") or [{"name": DEFAULT_GROUP}]
    defaults = {key: value for key, value in top.items() if key in GROUP_KEYS}
    if isinstance(groups, list):  # otherwise the schema rejects it
        groups = [
            _with_defaults(defaults, group) if isinstance(group, Mapping) else group for group in groups
        ]
    study = {key: top[key] for key in STUDY_KEYS if key in top}
    study |= {"group": groups, "grouped": bool(top.get("group")), "text": text}
    try:
        return StudySpec.model_validate(study, context={"folder": folder})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = [label, *_location(first["loc"], study)]
        if not study["grouped"] and len(location) > 1 and location[1] == f"group {DEFAULT_GROUP}":
            del location[1]
        message = plain_message(first)
        if first["type"] == "missing":
            message = "is missing"
        elif not isinstance(first["input"], (Mapping, list)) and first["type"] != "value_error":
            message += f", not {first['input']!r}"
        raise UsageError(": ".join([*location, message])) from None


def with_overrides(study: StudySpec, overrides: Layer) -> StudySpec:
    """Append configuration from the command line to `set` of every group.

    Raises UsageError for a key that the study's budget, seeds or factors set, and for the other `RESERVED` keys.
    `expand` refuses one that a selected arm sets.
    """
    if not overrides:
        return study
    for path in leaf_paths(overrides):
        key = ".".join(path)
        if key in RESERVED:
            raise UsageError(f"--{key}: not an option of a study: {RESERVED[key]}")
        for group in study.groups:
            for factor in group.factors:
                if any(path in leaf_paths(level.set) for level in factor.levels):
                    raise UsageError(
                        f"--{key}: factor {factor.name} of the study varies this key; remove the option, or edit the "
                        f"study's file"
                    )
    groups = tuple(group.model_copy(update={"set": (*group.set, overrides)}) for group in study.groups)
    return study.model_copy(update={"groups": groups, "overrides": dict(overrides)})


def budget_from_options(
    minutes: float | None = None, tokens: str | int | None = None, steps: int | None = None
) -> Budget | None:
    """Return the budget per arm that command-line options give, or None. Raises UsageError if it is invalid."""
    given = {"minutes_per_arm": minutes, "tokens_per_arm": tokens, "steps_per_arm": steps}
    table = {key: value for key, value in given.items() if value is not None}
    if len(table) > 1:
        options = " and ".join(f"--{key.replace('_', '-')}" for key in table)
        raise UsageError(f"{options}: an arm has only one budget; give only one of these options")
    try:
        parsed = parse_budget(table or None)
    except ValueError as error:
        raise UsageError(str(error)) from None
    assert parsed is None or isinstance(parsed, Budget)
    return parsed


def check_seeds(given: Any, label: str) -> int:
    """Return the number of seeds. Raises UsageError, which begins with `label`, if it is invalid."""
    try:
        return TypeAdapter(SeedCount).validate_python(given)
    except ValidationError:
        raise UsageError(f"{label}: must be 1 to {MAX_SEEDS} seeds, not {given!r}") from None


def _with_defaults(defaults: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's TOML table with the top-level keys as defaults. Both `set` tables apply, the group's last."""
    merged = {**defaults, **group}
    layers = [table["set"] for table in (defaults, group) if "set" in table]
    if layers:
        merged["set"] = layers
    return merged


def _location(error_path: Sequence[str | int], table: Any) -> list[str]:
    """Return the readable location of an error in the file, such as ["factor size", "level small", "set"]."""
    parts: list[str] = []
    for key in error_path:
        if isinstance(key, int) and parts and parts[-1] != "set":
            name = table[key].get("name") if isinstance(table[key], Mapping) else None
            parts[-1] += f" {name or key + 1}"
        elif isinstance(key, str):
            parts.append(key)
        try:
            table = table[key]
        except (LookupError, TypeError):
            table = None
    return parts
