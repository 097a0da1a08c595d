"""The preview of a study (`--dry-run`): its question, each arm with its changes and forecast, and the totals."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deskside.budget.shape import num_params
from deskside.run.record import flatten
from deskside.study.forecast import LocalMachine, TrialForecast, total_seconds
from deskside.study.spec.expand import Expansion, PlannedArm
from deskside.study.spec.spec import StudySpec
from deskside.utils.format import count, duration, plural

MAX_WIDTH = 100
MAX_VALUE_LENGTH = 24  # characters of a list or table
Forecasts = Mapping[str, TrialForecast]  # arm id -> forecast of one of its trials


def print_plan(
    study: StudySpec,
    expansion: Expansion,
    forecasts: Forecasts,
    machine: LocalMachine,
    devices: int = 1,
    console: Console | None = None,
) -> None:
    """Print the preview. devices: the number of GPUs that share the trials."""
    plan = plan_json(study, expansion, forecasts, machine, devices)
    console = console or Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    console.print(Text(f"study: {study.name}", style="bold"))
    if study.question:
        console.print(Text(study.question))
    for group in expansion.groups:
        console.print()
        heading = ": ".join(part for part in (group.name if study.grouped else "", group.title) if part)
        if heading:
            console.print(Text(heading, style="bold"))
        seeds = plural(expansion.seeds[group.name], "seed")
        console.print(Text(f"each arm: {group.budget}, {seeds}, base {group.base}"))
        if len(group.factors) > 1 and group.design == "full":
            sizes = " x ".join(f"{factor.label} ({len(factor.levels)})" for factor in group.factors)
            console.print(Text(f"every combination of: {sizes}"))
        elif len(group.factors) > 1:
            console.print(Text("one factor at a time is varied"))
        console.print(_arms_table([arm for arm in plan["arms"] if arm["group"] == group.name]))
    if expansion.excluded:
        console.print(Text("\nexcluded", style="bold"))
        for line in expansion.excluded:
            console.print(Text(f"- {line}"))
    total = f"{plan['trials']} trials of {plural(len(expansion.arms), 'arm')}"
    if devices > 1:
        total += f", on {devices} GPUs"
    if plan["seconds"] is not None:
        lines = [f"{total}: about {duration(plan['seconds'])} in all", f"times: {plan['source']}"]
    else:
        setup = duration(plan["trials"] * machine.setup_seconds / devices)
        lines = [f"{total}: starting them takes about {setup}, training: not known", plan["source"]]
    console.print()
    for line in lines:
        console.print(Text(line))


def plan_json(
    study: StudySpec, expansion: Expansion, forecasts: Forecasts, machine: LocalMachine, devices: int = 1
) -> dict[str, Any]:
    """Return the preview as data for --json."""
    trials = [arm for arm in expansion.arms for _ in range(expansion.seeds[arm.group])]
    source = machine.why_unknown
    if machine.request is not None:
        calibration = machine.request.calibration
        source = f"{calibration.source}, within {calibration.speed_spread:.0%}: {calibration.basis}"
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
        "source": source,
    }


def changes(study: StudySpec, arm: PlannedArm, baseline: PlannedArm) -> dict[str, Any]:
    """Return the configuration of an arm that differs from its baseline, as {key: the arm's value}.

    Only the keys that the levels or the arm's own `set` name are compared.
    """
    group = next(group for group in study.groups if group.name == arm.group)
    values = flatten(arm.config.model_dump(mode="json"))
    baseline_values = flatten(baseline.config.model_dump(mode="json"))
    layers = [
        factor.level(levels[factor.name]).set
        for levels in (arm.levels, baseline.levels)
        for factor in group.factors
    ]
    layers += [spec.set for spec in group.arms if spec.name == arm.levels.get("arm")]
    keys = dict.fromkeys(key for layer in layers for key in flatten(layer))
    return {key: values[key] for key in keys if key in values and values[key] != baseline_values.get(key)}


def _arm_json(
    study: StudySpec, expansion: Expansion, forecasts: Forecasts, arm: PlannedArm
) -> dict[str, Any]:
    forecast = forecasts[arm.id]
    baseline = next(other for other in expansion.arms if other.id == arm.baseline)
    return {
        "id": arm.id,
        "label": arm.label,
        "group": arm.group,
        "levels": arm.levels,
        "baseline": arm.baseline,
        "budget": arm.budget,
        "parameters": num_params(arm.config.model),
        "changes": changes(study, arm, baseline),
        "forecast": {
            "seconds": forecast.seconds_total,
            "training_seconds": forecast.seconds_training,
            "tokens": forecast.tokens,
            "memory_gib": forecast.memory_gib,
            "source": forecast.source or None,
            "note": forecast.note,
        },
    }


def _arms_table(arms: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of arms, which are entries of "arms" in `plan_json`."""
    table = Table(box=None, pad_edge=False)
    table.add_column("arm (* baseline)", ratio=5)
    table.add_column("changes from its baseline", ratio=6)
    table.add_column("params", justify="right", no_wrap=True)
    forecasts = [arm["forecast"] for arm in arms]
    has_seconds = any(forecast["seconds"] is not None for forecast in forecasts)
    has_memory = any(forecast["memory_gib"] is not None for forecast in forecasts)
    if has_seconds:
        table.add_column("a trial", justify="right", no_wrap=True)
    if has_memory:
        table.add_column("GiB", justify="right", no_wrap=True)
    for arm, forecast in zip(arms, forecasts, strict=True):
        lines = [f"{key} {_value_text(value)}" for key, value in arm["changes"].items()]
        if forecast["note"]:
            lines.append(f"({forecast['note']})")
        cells = [f"{arm['label']}{' *' if arm['id'] == arm['baseline'] else ''}", "\n".join(lines)]
        cells.append(count(arm["parameters"]))
        if has_seconds:
            cells.append("-" if forecast["seconds"] is None else duration(forecast["seconds"]))
        if has_memory:
            cells.append("-" if forecast["memory_gib"] is None else f"{forecast['memory_gib']:.1f}")
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _value_text(value: Any) -> str:
    """Return a configuration value as short text; a long list or table as its number of entries."""
    if isinstance(value, bool):
        return str(value).lower()
    text = "none" if value is None else str(value)
    return text if isinstance(value, str) or len(text) <= MAX_VALUE_LENGTH else f"({len(value)} entries)"
