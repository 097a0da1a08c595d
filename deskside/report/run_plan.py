"""The section of a run's report that compares the plan with the measurement."""

from collections.abc import Callable, Sequence
from typing import Any

from deskside.report.document import Block, Chip, Details, Table
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
from deskside.utils.format import UNKNOWN, count, elapsed, percent, percent_digits, value_text

PROVENANCE = ("measured", "reported", "modelled", "published")
PROVENANCE_KEYS = ("provenance", "origin", "source")
# (key of `predicted` in summary.json, name, number format, unit)
PREDICTED_QUANTITIES = (
    ("tokens_per_second", "speed", ",.0f", "tokens/s"),
    ("memory_gib", "peak memory", ".2f", "GiB"),
    ("bpb", "validation loss", ".3f", "bits per byte"),
    ("tokens", "tokens", ",.0f", "in total"),
)
EXECUTION_TEXT = {
    "fused": "hand-written kernels and gradients",
    "block": "torch.compile, each block",
    "model": "torch.compile, the whole model",
    "off": "eager",
}
# Keys of plan.json, and of the initial estimate in it, that are not among the last rows of the table of all choices.
OMITTED_KEYS = {"length", "clock", "initial", "revisions", "fit", "attention", "precision", "compile"}
OMITTED_INITIAL_KEYS = {
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
    """Return the predictions, their comparison with the measurement, the revisions, and the choices at the start."""
    plan = record.plan
    if not plan:
        return ["There is no plan to compare with."]
    blocks = _prediction_blocks(record)
    if length := text(plan.get("length")):
        clock = f", by the {value_text(plan['clock'])} clock" if plan.get("clock") else ""
        again = "Planned again from the first steps of training; length" if blocks else "Planned length"
        blocks.append(f"{again}: {length}{clock}.")
    blocks.append(_comparison_table(record))
    if revisions := objects(plan.get("revisions")):
        blocks.append(Details(f"All revisions of the plan ({len(revisions)})", [_revision_table(revisions)]))
    stages = objects(plan.get("fit")) or [mapping(plan.get("fit"))]
    dry_steps: list[Block] = []
    for stage_number, fit in enumerate(stages, start=1):
        dry_steps += _dry_step_blocks(fit, f" of stage {stage_number}" if len(stages) > 1 else "")
    if dry_steps:
        blocks.append(Details("Micro-batches, found by trial steps", dry_steps))
    return blocks + _choice_blocks(plan)


def recipe_used(plan: dict[str, Any]) -> str:
    """Return the precision recipe that was chosen, that of experts if it differs, and whether they were emulated.

    The empty string if the plan names none.
    """
    precision = mapping(plan.get("precision"))
    experts = mapping(precision.get("experts"))
    used = [_with_emulation(precision)]
    if experts and (experts.get("chosen"), experts.get("native")) != (
        precision.get("chosen"),
        precision.get("native"),
    ):
        used.append(f"experts {_with_emulation(experts)}")
    return "; ".join(filter(None, used))


def _with_emulation(facts: dict[str, Any]) -> str:
    """Return the recipe in "precision" of plan.json, or in its "experts", and whether it was emulated."""
    chosen = text(facts.get("chosen"))
    return f"{chosen}, emulated" if chosen and facts.get("native") is False else chosen


def provenance_rows(values: dict[str, Any], default: str, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return (name, value, provenance) of every leaf of a JSON object.

    An object like {"value": 812, "unit": "TFLOP/s", "provenance": "measured"} is one leaf. Leaves without
    a provenance inherit that of the enclosing object, or else get `default`; plain strings and lists get "".
    """
    inherited = _own_provenance(values) or default
    rows = []
    for key, value in values.items():
        name = f"{prefix}{_key_text(key)}"
        if key in PROVENANCE_KEYS and value in PROVENANCE:
            continue
        if isinstance(value, dict) and "value" in value:
            shown = f"{value_text(value['value'])} {text(value.get('unit'))}".strip()
            rows.append((name, shown, _own_provenance(value) or inherited))
        elif isinstance(value, dict) and value:
            rows += provenance_rows(value, inherited, f"{name}: ")
        else:
            rows.append((name, value_text(value), inherited if number(value) is not None else ""))
    return rows


def _own_provenance(value: object) -> str:
    """Return the provenance that a JSON object states about itself, or the empty string."""
    fields = mapping(value)
    return next((text(fields[key]) for key in PROVENANCE_KEYS if text(fields.get(key)) in PROVENANCE), "")


def _key_text(key: str) -> str:
    """Return a JSON key as words: gpu_memory_gib -> gpu memory gib."""
    return key.replace("_", " ").replace(".", ": ")


def _prediction_blocks(record: RunRecord) -> list[Block]:
    """Return a table of the predictions by the planner and by the pilot (pipeline/pilot.py), and the measurements."""
    predicted = mapping(record.summary.get("predicted"))
    if not predicted:
        return []
    rows = []
    for key, name, number_format, unit in PREDICTED_QUANTITIES:
        quantity = mapping(predicted.get(key))
        measured, plan, pilot = number(quantity.get("measured")), quantity.get("plan"), quantity.get("pilot")
        plan_range = [number(value) for value in plan] if isinstance(plan, list) else []
        if len(plan_range) != 3 or any(value is None or value <= 0 for value in plan_range):
            plan_range = [None, None, None]
        # The pilot gives a range for the loss and one number for everything else.
        pilot_values = mapping(pilot) or {"expected": pilot}
        pilot_range = [number(pilot_values.get(end)) for end in ("low", "expected", "high")]
        deviation = _deviation(measured, plan_range)
        measured_text = UNKNOWN if measured is None else f"{measured:{number_format}}"
        ranges = (_range_text(plan_range, number_format), _range_text(pilot_range, number_format))
        rows.append((f"{name}, {unit}", *ranges, measured_text, deviation))
    hours, source = number(record.summary.get("budget_hours")), text(record.summary.get("plan_source"))
    budget = "" if hours is None else f"Budget: {hours:g} hours, everything included. "
    origin = f"The plan was {source}." if source else "No plan was made before training."
    head = ("", "plan (modelled)", "pilot (loss and tokens modelled)", "measured", "measured against plan")
    return [budget + origin, Table(head, rows)]


def _deviation(measured: float | None, plan_range: Sequence[float | None]) -> str | Chip:
    """Return how far a measurement is from the plan: in color if the plan has a range, else as text."""
    low, expected, high = plan_range
    if measured is None or not expected:
        return ""
    share = measured / expected - 1
    difference = percent(share, percent_digits(share), signed=True)
    if low is None or high is None:
        return difference
    return (
        Chip(difference, "better", "in the range")
        if low <= measured <= high
        else Chip(difference, "worse", "outside")
    )


def _range_text(ends: Sequence[float | None], number_format: str) -> str:
    low, expected, high = ends
    if expected is None:
        return ""
    spread = "" if low is None or high is None else f" ({low:{number_format}} to {high:{number_format}})"
    return f"{expected:{number_format}}{spread}"


def _comparison_table(record: RunRecord) -> Table:
    """Return a table of the initial estimate, the last of several revisions, the measurement, and its deviation."""
    initial = mapping(record.plan.get("initial"))
    revisions = objects(record.plan.get("revisions"))
    first = revisions[0] if revisions else {}
    last = revisions[-1] if len(revisions) > 1 else {}
    steps = number(initial.get("steps"))
    planned_seconds = first_number(initial, "step_seconds") or first_number(first, "step_seconds")
    planned_memory = first_number(initial, "memory_gib", "peak_memory_gib")
    # (quantity, how it is written, planned, planned last, measured)
    quantities: list[tuple[str, Callable[[float | None], str], float | None, float | None, float | None]] = [
        (
            "steps",
            count,
            planned_steps(first) if steps is None else steps,
            planned_steps(last),
            record.newest("steps", "step"),
        ),
        ("tokens", count, number(initial.get("tokens")), None, record.newest("tokens", "tokens")),
        ("time", elapsed, number(initial.get("seconds")), None, record.newest("seconds", "seconds")),
        (
            "time per step",
            elapsed,
            planned_seconds,
            first_number(last, "step_seconds"),
            step_seconds(record.metrics),
        ),
        ("peak memory", _gib, planned_memory, None, record.newest("peak_memory_gib", "memory_gib")),
    ]
    head = (
        "",
        "planned (modelled)",
        *(("last revision (modelled)",) if last else ()),
        "measured",
        "measured against plan",
    )
    rows = []
    for name, written, planned, revised, measured in quantities:
        # Only steps and time per step are revised.
        revision = ("" if revised is None and name not in ("steps", "time per step") else written(revised),)
        error = _deviation(measured, (None, planned, None))
        rows.append((name, written(planned), *(revision if last else ()), written(measured), error))
    return Table(head, rows)


def _revision_table(revisions: list[dict[str, Any]]) -> Table:
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


def _dry_step_blocks(fit: dict[str, Any], stage: str) -> list[Block]:
    """Return the micro-batch that was found by dry steps (steps that change no weight), and the attempts."""
    blocks: list[Block] = []
    if chosen := {_key_text(key): value for key, value in fit.items() if key != "attempts"}:
        blocks.append(
            f"Micro-batch{stage}, found by trial steps that change no weight (measured): {value_text(chosen)}."
        )
    if attempts := objects(fit.get("attempts")):
        keys = list(dict.fromkeys(key for attempt in attempts for key in attempt))
        rows = [[value_text(attempt.get(key)) for key in keys] for attempt in attempts]
        table = Table([_key_text(key) for key in keys], rows)
        blocks += [f"Attempted micro-batches{stage} ({len(attempts)}, measured):", table]
    return blocks


def _choice_blocks(plan: dict[str, Any]) -> list[Block]:
    """Return a table of the choices at the start, and a collapsed table of the values behind them."""
    rows: list[tuple[str, str, str]] = []
    for kind, choice in mapping(plan.get("attention")).items():
        name = text(choice) or text(mapping(choice).get("name"))
        milliseconds = number(mapping(mapping(choice).get("milliseconds")).get(name))
        timing = "" if milliseconds is None else f", {milliseconds:.3g} ms forward and backward"
        if name:
            source = "measured" if timing else ""
            rows.append((f"attention, {_key_text(kind)} layers", name + timing, source))
        if shared := text(mapping(choice).get("shared_rows")):
            rows.append((f"attention of shared rows, {_key_text(kind)} layers", shared, ""))
    if recipe := recipe_used(plan):
        rows.append(("precision", recipe, ""))
    if mode := text(plan.get("compile")):
        rows.append(("execution", EXECUTION_TEXT.get(mode, mode), ""))
    initial = {k: v for k, v in mapping(plan.get("initial")).items() if k not in OMITTED_INITIAL_KEYS}
    rest = {k: v for k, v in plan.items() if k not in OMITTED_KEYS}
    # What is left are counts and settings, which have no source, but for one time.
    if "save_seconds" in rest:
        rest["save_seconds"] = {"value": rest["save_seconds"], "unit": "s", "provenance": "measured"}
    detail_rows = [
        *provenance_rows(mapping(plan.get("attention")), "measured", "attention: "),
        *provenance_rows(mapping(plan.get("precision")), "measured", "precision: "),
        *provenance_rows(initial, "modelled"),
        *provenance_rows(rest, ""),
    ]
    blocks: list[Block] = [Table(("chosen at the start", "value", "source"), rows)] if rows else []
    if detail_rows:
        table = Table(("quantity", "value", "source"), detail_rows)
        blocks.append(Details("All choices at the start, and the values behind them", [table]))
    return blocks


def _gib(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f} GiB"
