"""The preview of a study (`--dry-run`): its question, each arm with its changes and forecast, and the totals."""

from collections.abc import Mapping, Sequence
from typing import Any

from deskside.budget.shape import num_params
from deskside.run.record import flatten
from deskside.study.forecast import LocalMachine, TrialForecast, total_seconds
from deskside.study.spec.expand import Expansion, PlannedArm
from deskside.study.spec.spec import StudySpec
from deskside.utils.format import count, duration, plural
from deskside.utils.printer import Printer

MAX_VALUE_LENGTH = 24  # characters of a list or table
Forecasts = Mapping[str, TrialForecast]  # arm id -> forecast of one of its trials


def print_plan(
    study: StudySpec,
    expansion: Expansion,
    forecasts: Forecasts,
    machine: LocalMachine,
    devices: int = 1,
    printer: Printer | None = None,
) -> None:
    """Print the preview. devices: the number of GPUs that share the trials."""
    plan = plan_json(study, expansion, forecasts, machine, devices)
    printer = printer or Printer()
    printer.text(f"study: {study.name}", "strong")
    if study.question:
        printer.text(study.question)
    for group in expansion.groups:
        printer.text()
        heading = ": ".join(part for part in (group.name if study.grouped else "", group.title) if part)
        if heading:
            printer.text(heading, "strong")
        seeds = plural(expansion.seeds[group.name], "seed")
        printer.text(f"each arm: {group.budget}, {seeds}, base {group.base}")
        if len(group.factors) > 1 and group.design == "full":
            sizes = " x ".join(f"{factor.label} ({len(factor.levels)})" for factor in group.factors)
            printer.text(f"every combination of: {sizes}")
        elif len(group.factors) > 1:
            printer.text("one factor at a time is varied")
        arms = [arm for arm in plan["arms"] if arm["group"] == group.name]
        _show_arms(printer, arms)
        _show_mixture(printer, arms)
    if expansion.excluded:
        printer.heading("excluded")
        for line in expansion.excluded:
            printer.text(f"- {line}", hanging=2)
    total = f"{plan['trials']} trials of {plural(len(expansion.arms), 'arm')}"
    if devices > 1:
        total += f", on {devices} GPUs"
    if plan["seconds"] is not None:
        lines = [f"{total}: about {duration(plan['seconds'])} in all", f"times: {plan['source']}"]
    else:
        setup = duration(plan["trials"] * machine.setup_seconds / devices)
        lines = [f"{total}: starting them takes about {setup}, training: not known", plan["source"]]
    printer.text()
    for line in lines:
        printer.text(line)


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
            "epochs": dict(forecast.epochs),
            "mixture": forecast.mixture,
        },
    }


def _show_arms(printer: Printer, arms: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of arms, which are entries of "arms" in `plan_json`."""
    forecasts = [arm["forecast"] for arm in arms]
    has_seconds = any(forecast["seconds"] is not None for forecast in forecasts)
    has_memory = any(forecast["memory_gib"] is not None for forecast in forecasts)
    headings = ["arm (* baseline)", "changes from its baseline", "params"]
    headings += ["a trial"] * has_seconds + ["GiB"] * has_memory
    rows = []
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
        rows.append(cells)
    printer.table(headings, rows, "ll" + "r" * (len(headings) - 2))


def _show_mixture(printer: Printer, arms: Sequence[Mapping[str, Any]]) -> None:
    """Print the line about the mixture of the arm that reads some text the most often."""
    mixed = [arm for arm in arms if arm["forecast"]["epochs"]]
    if mixed:
        arm = max(mixed, key=lambda one: max(one["forecast"]["epochs"].values()))
        printer.text(f"{arm['label']}: {arm['forecast']['mixture']}")


def _value_text(value: Any) -> str:
    """Return a configuration value as short text; a long list or table as its number of entries."""
    if isinstance(value, bool):
        return str(value).lower()
    text = "none" if value is None else str(value)
    return text if isinstance(value, str) or len(text) <= MAX_VALUE_LENGTH else f"({len(value)} entries)"
