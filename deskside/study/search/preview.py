"""Terminal output of a search: its plan before it starts (`--dry-run`), and its best trials at the end."""

from typing import Any

from deskside.budget.shape import num_params
from deskside.study.search.memory_check import MemoryCheck
from deskside.study.search.outcome import Outcome, settings_text
from deskside.study.search.search_budget import Division
from deskside.study.search.search_folder import SearchPlan
from deskside.study.search.suggestions import METHODS, REDUCTION_FACTOR, RUNGS
from deskside.utils.format import count, duration, gib, plural
from deskside.utils.printer import Printer

SHOWN = 5  # trials at the end


def plan_json(plan: SearchPlan, division: Division | None, check: MemoryCheck) -> dict[str, Any]:
    """Return the plan as data for --json. division: None for a search that has begun."""
    target, trial = plan.target(), plan.trial()
    return {
        "name": plan.name,
        "base": plan.base,
        "hours": plan.hours,
        "sampler": plan.sampler,
        "pruner": "halving" if plan.prune else "none",
        "space": [
            {"key": one.key, "default": one.default, "kind": one.kind, "range": one.range_text}
            for one in plan.space
        ],
        "proxy": plan.proxy.why,
        "target": {"seconds": plan.target_seconds, "parameters": num_params(target.model)},
        "trial": {"seconds": plan.trial_seconds, "parameters": num_params(trial.model)},
        "whole_trials": None if division is None else division.whole_trials,
        "trials": plan.max_trials,
        "confirmation": {
            "seeds": plan.seeds,
            "at_target": plan.confirm_at_target,
            "seconds": None if division is None else division.confirm_seconds,
        },
        "memory_gib": check.capacity / 2**30,
    }


def print_plan(plan: SearchPlan, division: Division | None, check: MemoryCheck, printer: Printer) -> None:
    """Print the plan. division: None for a search that has begun."""
    printer.text(f"search: {plan.name}", "strong")
    rows = [[one.key, str(one.default).lower(), one.range_text] for one in plan.space]
    printer.table(["searched", "default", "range"], rows, "lrl")
    printer.text()
    how = METHODS[plan.sampler]
    if plan.prune:
        how += f"; trials end early unless they are in the better 1/{REDUCTION_FACTOR} at 1/{RUNGS} and 1/2 of the time"
    memory = f"every trial is checked against {gib(check.capacity)} of {check.card.name} before it starts"
    where = (
        "at full size and length"
        if plan.confirm_at_target
        else f"on {plan.confirmed_on}, because more does not fit"
    )
    confirm = f"the best trial against the default, {plural(plan.seeds, 'fresh seed')} each, {where}"
    if division is not None:
        confirm += f": {duration(division.confirm_seconds)}"
        most = plan.max_trials or round(division.whole_trials * (2 if plan.prune else 1))
        how += f"; about {plural(most, 'trial')} of {duration(plan.trial_seconds)} or less"
    parameters = count(num_params(plan.trial().model))
    fields = [
        ("time", f"{duration(3600 * plan.hours)} in all"),
        ("trials", how),
        ("trained", f"{plan.proxy.why} (default: {parameters} parameters)"),
        ("memory", memory),
        ("confirmed", confirm),
    ]
    printer.fields(fields)


def print_trials(outcome: Outcome, printer: Printer) -> None:
    """Print the best trials of a search, and how many of each status there were."""
    finished = sorted(
        (one for one in outcome.trials if one.status == "finished" and one.loss is not None),
        key=lambda one: one.loss or 0.0,
    )
    rows = [
        [
            str(one.number),
            f"{one.loss:.4f}",
            settings_text(one.settings) + (" (default)" if one.number == 0 else ""),
        ]
        for one in finished[:SHOWN]
    ]
    if rows:
        printer.table(["trial", "bits per byte", "settings"], rows, "rrl")
    printer.text(", ".join(f"{number} {status}" for status, number in outcome.counts().items()))
