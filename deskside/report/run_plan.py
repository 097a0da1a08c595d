"""The section of a run's report that compares the plan with the measurement."""

from collections.abc import Sequence
from typing import Any

from deskside.report.document import Block, Details, Table
from deskside.run.record import (
    RunRecord,
    first_number,
    mapping,
    number,
    objects,
    planned_steps,
    step_seconds,
    text,
)
from deskside.utils.format import UNKNOWN, count, elapsed, value_text

PROVENANCE = ("measured", "modelled", "published")
PROVENANCE_KEYS = ("provenance", "origin", "source")
PREDICTED = (
    ("tokens_per_second", "speed", ",.0f", "tokens/s"),
    ("memory_gib", "peak memory", ".2f", "GiB"),
    ("bpb", "validation loss", ".3f", "bits per byte"),
    ("tokens", "tokens", ",.0f", "in total"),
)
EXECUTION = {
    "fused": "hand-written kernels and gradients",
    "block": "torch.compile, each block",
    "model": "torch.compile, the whole model",
    "off": "eager",
}
# Keys of plan.json and of its initial estimate that other tables show.
SHOWN_ELSEWHERE = {"length", "clock", "initial", "revisions", "fit", "attention", "precision", "compile"}
INITIAL_IN_TABLE = {
    "step",
    "steps",
    "remaining",
    "tokens",
    "seconds",
    "step_seconds",
    "memory_gib",
    "peak_memory_gib",
}


def plan_blocks(record: RunRecord) -> list[Block]:
    """Return the comparison, the revisions of the plan, and the choices made at the start."""
    plan = record.plan
    if not plan:
        return ["There is no plan to compare with."]
    blocks = _predictions(record)
    if length := text(plan.get("length")):
        clock = f"; clock: {value_text(plan['clock'])}" if plan.get("clock") else ""
        blocks.append(f"Planned length: {length}{clock}.")
    blocks.append(_comparison(record))
    if revisions := objects(plan.get("revisions")):
        blocks.append(Details(f"All revisions of the plan ({len(revisions)})", [_revisions(revisions)]))
    stages = objects(plan.get("fit")) or [mapping(plan.get("fit"))]
    for place, fit in enumerate(stages, start=1):
        blocks += _batch_size_search(fit, f" of stage {place}" if len(stages) > 1 else "")
    return blocks + _choices(plan)


def recipe_used(plan: dict[str, Any]) -> str:
    """Return the precision recipe that was chosen and whether it was emulated, or the empty string."""
    precision = mapping(plan.get("precision"))
    chosen = text(precision.get("chosen"))
    return f"{chosen}, emulated" if chosen and precision.get("native") is False else chosen


def provenance_rows(
    values: dict[str, Any], default: str = "modelled", prefix: str = ""
) -> list[tuple[str, str, str]]:
    """Return (name, value, provenance) of every leaf of a JSON object.

    An object like {"value": 812, "unit": "TFLOP/s", "provenance": "measured"} is one leaf. A number without a
    provenance takes that of the object around it, or else `default`. Strings have none.
    """
    inherited = _provenance(values) or default
    rows = []
    for key, value in values.items():
        name = f"{prefix}{_key_text(key)}"
        if key in PROVENANCE_KEYS and value in PROVENANCE:
            continue
        if isinstance(value, dict) and "value" in value:
            shown = f"{value_text(value['value'])} {text(value.get('unit'))}".strip()
            rows.append((name, shown, _provenance(value) or inherited))
        elif isinstance(value, dict) and value:
            rows += provenance_rows(value, inherited, f"{name}: ")
        else:
            rows.append((name, value_text(value), inherited if number(value) is not None else ""))
    return rows


def _provenance(value: object) -> str:
    fields = mapping(value)
    return next((text(fields[k]) for k in PROVENANCE_KEYS if text(fields.get(k)) in PROVENANCE), "")


def _key_text(key: str) -> str:
    """Return a JSON key as words: gpu_memory_gib -> gpu memory gib."""
    return key.replace("_", " ").replace(".", ": ")


def _predictions(record: RunRecord) -> list[Block]:
    """Return what the planner and the pilot of `deskside go` predicted, beside the measurement."""
    predicted = mapping(record.summary.get("predicted"))
    if not predicted:
        return []
    rows = []
    for key, name, form, unit in PREDICTED:
        found = mapping(predicted.get(key))
        measured, plan, pilot = number(found.get("measured")), found.get("plan"), found.get("pilot")
        ends = [number(v) for v in plan] if isinstance(plan, list) else []
        if len(ends) != 3 or any(v is None or v <= 0 for v in ends):
            ends = [None, None, None]
        # The pilot gives a range for the loss and one number for everything else.
        ranged = mapping(pilot) or {"expected": pilot}
        pilot_ends = [number(ranged.get(end)) for end in ("low", "expected", "high")]
        error = "" if ends[1] is None or measured is None else f"{measured / ends[1] - 1:+.1%}"
        shown = UNKNOWN if measured is None else f"{measured:{form}}"
        rows.append((f"{name}, {unit}", _with_range(ends, form), _with_range(pilot_ends, form), shown, error))
    hours, source = number(record.summary.get("budget_hours")), text(record.summary.get("plan_source"))
    budget = "" if hours is None else f"Budget: {hours:g} hours, everything included. "
    origin = f"The plan was {source}." if source else "No plan was made before training."
    head = ("", "plan (modelled)", "pilot (loss and tokens modelled)", "measured", "error of the plan")
    return [budget + origin, Table(head, rows)]


def _with_range(ends: Sequence[float | None], form: str) -> str:
    low, expected, high = ends
    if expected is None:
        return ""
    return f"{expected:{form}}" + ("" if low is None or high is None else f" ({low:{form}} to {high:{form}})")


def _comparison(record: RunRecord) -> Table:
    """Return the estimate at the start, the one after the last revision, and the measurement."""
    initial = mapping(record.plan.get("initial"))
    revisions = objects(record.plan.get("revisions"))
    first = revisions[0] if revisions else {}
    revised = revisions[-1] if len(revisions) > 1 else {}
    steps = number(initial.get("steps"))
    steps = planned_steps(first) if steps is None else steps
    expected_seconds = first_number(initial, "step_seconds") or first_number(first, "step_seconds")
    rows = [
        ("steps", count(steps), count(planned_steps(revised)), count(record.newest("steps", "step"))),
        ("tokens", count(number(initial.get("tokens"))), "", count(record.newest("tokens", "tokens"))),
        ("time", elapsed(number(initial.get("seconds"))), "", elapsed(record.newest("seconds", "seconds"))),
        (
            "time per step",
            elapsed(expected_seconds),
            elapsed(first_number(revised, "step_seconds")),
            elapsed(step_seconds(record.metrics)),
        ),
        (
            "peak memory",
            _gib(first_number(initial, "memory_gib", "peak_memory_gib")),
            "",
            _gib(record.newest("peak_memory_gib", "memory_gib")),
        ),
    ]
    if revised:
        return Table(("", "planned (modelled)", "last revision (modelled)", "measured"), rows)
    return Table(("", "planned (modelled)", "measured"), [(row[0], row[1], row[3]) for row in rows])


def _revisions(revisions: list[dict[str, Any]]) -> Table:
    rows = [
        (
            count(number(revision.get("step"))),
            elapsed(number(revision.get("elapsed_seconds"))),
            elapsed(number(revision.get("step_seconds"))),
            count(planned_steps(revision)),
            text(revision.get("reason")),
        )
        for revision in revisions
    ]
    head = ("at step", "elapsed (measured)", "time per step (measured)", "total steps (modelled)", "reason")
    return Table(head, rows)


def _batch_size_search(fit: dict[str, Any], stage: str) -> list[Block]:
    """Return the micro-batch that the dry step settled on, and its attempts."""
    blocks: list[Block] = []
    if chosen := {_key_text(key): value for key, value in fit.items() if key != "attempts"}:
        blocks.append(f"Micro-batch{stage}, found by a dry step (measured): {value_text(chosen)}.")
    if attempts := objects(fit.get("attempts")):
        keys = list(dict.fromkeys(key for attempt in attempts for key in attempt))
        rows = [[value_text(attempt.get(key)) for key in keys] for attempt in attempts]
        table = Table([_key_text(key) for key in keys], rows)
        blocks.append(Details(f"Attempted micro-batches{stage} ({len(attempts)}, measured)", [table]))
    return blocks


def _choices(plan: dict[str, Any]) -> list[Block]:
    """Return what was chosen at the start, and everything that led to it, folded."""
    rows: list[tuple[str, str, str]] = []
    for kind, choice in mapping(plan.get("attention")).items():
        name = text(choice) or text(mapping(choice).get("name"))
        milliseconds = number(mapping(mapping(choice).get("milliseconds")).get(name))
        speed = "" if milliseconds is None else f", {milliseconds:.3g} ms forward and backward"
        if name:
            source = "measured" if speed else ""
            rows.append((f"attention, {_key_text(kind)} layers", name + speed, source))
    if recipe := recipe_used(plan):
        rows.append(("precision", recipe, ""))
    if mode := text(plan.get("compile")):
        rows.append(("execution", EXECUTION.get(mode, mode), ""))
    initial = {k: v for k, v in mapping(plan.get("initial")).items() if k not in INITIAL_IN_TABLE}
    rest = {k: v for k, v in plan.items() if k not in SHOWN_ELSEWHERE}
    everything = [
        *provenance_rows(mapping(plan.get("attention")), "measured", "attention: "),
        *provenance_rows(mapping(plan.get("precision")), "measured", "precision: "),
        *provenance_rows({**initial, **rest}),
    ]
    blocks: list[Block] = [Table(("chosen at the start", "value", "source"), rows)] if rows else []
    if everything:
        table = Table(("quantity", "value", "source"), everything)
        blocks.append(Details("Everything that was chosen at the start, and why", [table]))
    return blocks


def _gib(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f} GiB"
