"""The preview of a study: its question, each arm with its changes and forecast, and the totals."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deskside.budget.shape import num_params
from deskside.config.run import RunConfig
from deskside.study.forecast import Here, TrialForecast, total_seconds
from deskside.study.results import Group
from deskside.study.spec.expand import Expansion, PlannedArm
from deskside.study.spec.spec import StudySpec
from deskside.utils.format import count, duration

MAX_WIDTH = 100
MAX_VALUE_LENGTH = 24
Forecasts = Mapping[str, TrialForecast]  # by the arm's id


def plan_table(
    study: StudySpec,
    expansion: Expansion,
    forecasts: Forecasts,
    here: Here,
    devices: int = 1,
    console: Console | None = None,
) -> None:
    """Print the preview. devices: the number of GPUs that share the trials."""
    console = console or Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    console.print(Text(f"study: {study.name}", style="bold"))
    if study.question:
        console.print(Text(study.question))
    for group in expansion.groups:
        console.print()
        if heading := _heading(study, group):
            console.print(Text(heading, style="bold"))
        for line in _group_lines(group, expansion.seeds[group.name]):
            console.print(Text(line))
        console.print(_arms(study, expansion, forecasts, group))
    if expansion.excluded:
        console.print(Text("\nexcluded", style="bold"))
        for line in expansion.excluded:
            console.print(Text(f"- {line}"))
    console.print()
    for line in _total_lines(expansion, forecasts, here, devices):
        console.print(Text(line))


def plan_json(
    study: StudySpec, expansion: Expansion, forecasts: Forecasts, here: Here, devices: int = 1
) -> dict[str, Any]:
    """Return the preview as data for --json."""
    trials = _trials(expansion)
    return {
        "name": study.name,
        "question": study.question,
        "memory_fraction": study.memory_fraction,
        "claims": list(study.claims),
        "groups": [
            {
                "name": group.name,
                "title": group.title,
                "base": group.base,
                "design": group.design,
                "budget": group.budget,
                "seeds": expansion.seeds[group.name],
                "within": group.within,
                "factors": {factor.name: factor.levels for factor in group.factors},
            }
            for group in expansion.groups
        ],
        "arms": [_arm_json(study, expansion, forecasts, arm) for arm in expansion.arms],
        "excluded": expansion.excluded,
        "trials": len(trials),
        "devices": devices,
        "seconds": total_seconds([forecasts[arm.id] for arm in trials], devices),
        "source": _source(here),
    }


def changes(study: StudySpec, arm: PlannedArm, baseline: PlannedArm) -> dict[str, Any]:
    """Return the keys that the study sets for this arm or its baseline and whose values differ, with the arm's
    values.
    """
    group = next(group for group in study.groups if group.name == arm.group)
    mine, other = flat(arm.config), flat(baseline.config)
    written: dict[str, None] = {}
    for levels in (arm.levels, baseline.levels):
        for factor in group.factors:
            written.update(dict.fromkeys(_keys(factor.level(levels[factor.name]).set)))
    for extra in group.arms:
        if extra.name == arm.levels.get("arm"):
            written.update(dict.fromkeys(_keys(extra.set)))
    return {key: mine[key] for key in written if key in mine and mine[key] != other.get(key)}


def flat(config: RunConfig) -> dict[str, Any]:
    """Return every dotted key of a configuration with its JSON value."""
    return dict(_items(config.model_dump(mode="json")))


def _arm_json(
    study: StudySpec, expansion: Expansion, forecasts: Forecasts, arm: PlannedArm
) -> dict[str, Any]:
    found = forecasts[arm.id]
    return {
        "id": arm.id,
        "label": arm.label,
        "group": arm.group,
        "levels": arm.levels,
        "baseline": arm.baseline,
        "budget": arm.budget,
        "parameters": num_params(arm.config.model),
        "changes": changes(study, arm, _baseline(expansion, arm)),
        "forecast": {
            "seconds": found.seconds_total,
            "training_seconds": found.seconds_training,
            "tokens": found.tokens,
            "memory_gib": found.memory_gib,
            "source": found.source or None,
            "note": found.note,
        },
    }


def _heading(study: StudySpec, group: Group) -> str:
    if not study.grouped:
        return group.title
    return f"{group.name}: {group.title}" if group.title else group.name


def _group_lines(group: Group, seeds: int) -> list[str]:
    lines = [f"each arm: {group.budget}, {seeds} seed{'' if seeds == 1 else 's'}, base {group.base}"]
    if len(group.factors) > 1 and group.design == "full":
        sizes = " x ".join(f"{factor.label} ({len(factor.levels)})" for factor in group.factors)
        lines.append(f"every combination of: {sizes}")
    elif len(group.factors) > 1:
        lines.append("one factor at a time is varied")
    return lines


def _arms(study: StudySpec, expansion: Expansion, forecasts: Forecasts, group: Group) -> Table:
    arms = [arm for arm in expansion.arms if arm.group == group.name]
    known = [forecasts[arm.id] for arm in arms]
    table = Table(box=None, pad_edge=False)
    table.add_column("arm (* baseline)", ratio=5)
    table.add_column("changes from its baseline", ratio=6)
    table.add_column("params", justify="right", no_wrap=True)
    timed = any(found.seconds_total is not None for found in known)
    sized = any(found.memory_gib is not None for found in known)
    if timed:
        table.add_column("a trial", justify="right", no_wrap=True)
    if sized:
        table.add_column("GiB", justify="right", no_wrap=True)
    for arm, found in zip(arms, known, strict=True):
        differing = changes(study, arm, _baseline(expansion, arm))
        told = [f"{key} {_value(value)}" for key, value in differing.items()]
        if found.note:
            told.append(f"({found.note})")
        cells = [f"{arm.label}{' *' if arm.id == arm.baseline else ''}", "\n".join(told)]
        cells.append(count(num_params(arm.config.model)))
        if timed:
            cells.append("-" if found.seconds_total is None else duration(found.seconds_total))
        if sized:
            cells.append("-" if found.memory_gib is None else f"{found.memory_gib:.1f}")
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _total_lines(expansion: Expansion, forecasts: Forecasts, here: Here, devices: int) -> list[str]:
    trials = _trials(expansion)
    arms = len(expansion.arms)
    text = f"{len(trials)} trials of {arms} arm{'' if arms == 1 else 's'}"
    if devices > 1:
        text += f", on {devices} GPUs"
    seconds = total_seconds([forecasts[arm.id] for arm in trials], devices)
    if seconds is not None:
        return [f"{text}: about {duration(seconds)} in all", f"times: {_source(here)}"]
    least = len(trials) * here.setup_seconds / devices
    return [
        f"{text}: starting them takes about {duration(least)}, training: not known",
        _source(here),
    ]


def _source(here: Here) -> str:
    if here.request is None:
        return here.why_not
    calibration = here.request.calibration
    return f"{calibration.source}, within {calibration.speed_spread:.0%}: {calibration.basis}"


def _trials(expansion: Expansion) -> list[PlannedArm]:
    """Return every arm, repeated once for each of its seeds."""
    return [arm for arm in expansion.arms for _ in range(expansion.seeds[arm.group])]


def _baseline(expansion: Expansion, arm: PlannedArm) -> PlannedArm:
    return next(other for other in expansion.arms if other.id == arm.baseline)


def _items(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += _items(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _keys(layer: Mapping[str, Any]) -> Sequence[str]:
    return [key for key, _ in _items(layer)]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = "none" if value is None else str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"({len(value)} entries)"
