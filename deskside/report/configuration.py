"""Which options of a run differ from the defaults."""

from typing import Any

from pydantic import ValidationError

from deskside.config.run import RunConfig
from deskside.report.words import plain
from deskside.run.record import mapping, text

OPTIONAL = ("align", "adapter")  # parts that a plain run does not have


def differences(config: dict[str, Any]) -> tuple[list[tuple[str, Any, str]], list[tuple[str, Any]]]:
    """([(option, value, default)] that differ, [(option, value)] of everything); options are dotted.

    An alternative such as `optim` is compared with the defaults of the alternative that was chosen. An option that
    this version does not know counts as different.
    """
    given, defaults = _flat(config), _defaults(config)
    changed = [
        (key, value, plain(defaults[key]) if key in defaults else _absent(key))
        for key, value in given
        if key not in defaults or defaults[key] != value
    ]
    return changed, given


def _absent(key: str) -> str:
    """What stands beside an option that has no default: a run may be without an objective of its own, or adapters."""
    part = key.split(".")[0]
    return "(none)" if part in OPTIONAL else "(unknown option)"


def _defaults(config: dict[str, Any]) -> dict[str, Any]:
    standard = RunConfig()
    chosen = {}
    for part in ("optim", "schedule"):
        name = text(mapping(config.get(part)).get("name"))
        if name:
            chosen[part] = {"name": name}
    try:
        base = RunConfig.model_validate(chosen)
    except ValidationError:  # an alternative that this version does not have
        base = standard
    flat = dict(_flat(base.model_dump(mode="json")))
    names = {f"{part}.name": getattr(standard, part).name for part in chosen}
    return {**flat, **names}


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{name}.")
        else:
            rows.append((name, value))
    return rows
