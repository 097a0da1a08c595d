"""The plan against what happened: what was expected at the start, after the last revision, and what came."""

import itertools
import statistics
from typing import Any

from deskside.report import words
from deskside.report.document import Block, Details, Paragraph, Table
from deskside.run.record import RunRecord, mapping, number, objects, text

SHOWN_ELSEWHERE = {"length", "clock", "initial", "revisions", "fit", "attention", "precision", "compile"}
PREDICTED = (
    ("tokens_per_second", "speed", ",.0f", "tokens/s"),
    ("memory_gib", "peak memory", ".2f", "GiB"),
    ("bpb", "validation loss", ".3f", "bits per byte"),
    ("tokens", "tokens", ",.0f", "in all"),
)
EXECUTIONS = {
    "fused": "hand-written kernels and gradients",
    "block": "torch.compile, each block",
    "model": "torch.compile, the whole model",
    "off": "eager",
}
SHOWN_IN_TABLE = {
    "step",
    "steps",
    "remaining",
    "tokens",
    "seconds",
    "step_seconds",
    "memory_gib",
    "peak_memory_gib",
}


def plan_blocks(record: RunRecord) -> tuple[Block, ...]:
    """The comparison, the journal of revisions, and how the batch and the attention backend were settled."""
    plan = record.plan
    if not plan:
        return (Paragraph("There is no plan to compare with."),)
    blocks: list[Block] = _predicted(record)
    length, clock = text(plan.get("length")), plan.get("clock")
    if length:
        told = f"; the clock: {words.plain(clock)}" if clock else ""
        blocks.append(Paragraph(f"Planned length: {length}{told}."))
    blocks.append(_comparison(record))
    revisions = objects(plan.get("revisions"))
    if revisions:
        blocks.append(Details(f"Every revision of the plan ({len(revisions)})", (_journal(revisions),)))
    stages = objects(plan.get("fit")) or [mapping(plan.get("fit"))]
    for number_, fit in enumerate(stages, start=1):
        blocks += _fit(fit, f" of stage {number_}" if len(stages) > 1 else "")
    blocks += _settled(plan)
    return tuple(blocks)


def precision_words(plan: dict[str, Any]) -> str:
    """The recipe that was settled on, and whether the card only emulated it; empty where nobody wrote it down."""
    precision = mapping(plan.get("precision"))
    chosen = text(precision.get("chosen"))
    return f"{chosen}, emulated" if chosen and precision.get("native") is False else chosen


def _predicted(record: RunRecord) -> list[Block]:
    """What the planner and the pilot of `deskside go` had said, against what came; nothing for other runs."""
    predicted = mapping(record.summary.get("predicted"))
    if not predicted:
        return []
    rows = []
    for key, name, form, unit in PREDICTED:
        found = mapping(predicted.get(key))
        measured = number(found.get("measured"))
        low, expected, high = _range(found.get("plan"))
        off = "" if expected is None or measured is None else f"{measured / expected - 1:+.1%}"
        pilot = found.get("pilot")
        leads = mapping(pilot) or {"expected": pilot}
        low_, expected_, high_ = (number(leads.get(end)) for end in ("low", "expected", "high"))
        shown = _ranged(low_, expected_, high_, form)
        told = "not known" if measured is None else f"{measured:{form}}"
        rows.append((f"{name}, {unit}", _ranged(low, expected, high, form), shown, told, off))
    source = text(record.summary.get("plan_source"))
    hours = number(record.summary.get("budget_hours"))
    words_ = [f"Budget: {hours:g} hours, everything included." if hours is not None else ""]
    words_.append(f"The plan was {source}." if source else "No plan was made before training.")
    head = ("", "plan (modelled)", "pilot (loss and tokens modelled)", "happened (measured)", "off the plan")
    return [Paragraph(" ".join(word for word in words_ if word)), Table(head, tuple(rows))]


def _range(value: object) -> tuple[float | None, float | None, float | None]:
    """Low, expected, high; all unknown where one of them is no number above zero."""
    found = [number(v) for v in value] if isinstance(value, list) else []
    if len(found) != 3 or any(v is None or v <= 0 for v in found):
        return None, None, None
    return found[0], found[1], found[2]


def _ranged(low: float | None, expected: float | None, high: float | None, form: str) -> str:
    if expected is None:
        return ""
    return f"{expected:{form}}" + ("" if low is None or high is None else f" ({low:{form}} to {high:{form}})")


def _settled(plan: dict[str, Any]) -> list[Block]:
    """What was chosen when the run began, and folded away, why."""
    rows: list[tuple[str, str, str]] = []
    for kind, choice in mapping(plan.get("attention")).items():
        name = text(choice) or text(mapping(choice).get("name"))
        taken = number(mapping(mapping(choice).get("milliseconds")).get(name))
        if name:
            speed = "" if taken is None else f", {taken:.3g} ms forward and backward"
            rows.append((f"attention, {words.label(kind)} layers", name + speed, "measured" if speed else ""))
    precision = mapping(plan.get("precision"))
    if told := precision_words(plan):
        rows.append(("precision", told, ""))
    if mode := text(plan.get("compile")):
        rows.append(("the step", EXECUTIONS.get(mode, mode), ""))
    initial = {k: v for k, v in mapping(plan.get("initial")).items() if k not in SHOWN_IN_TABLE}
    rest = {k: v for k, v in plan.items() if k not in SHOWN_ELSEWHERE}
    why = [
        *words.facts(mapping(plan.get("attention")), "measured", "attention: "),
        *words.facts(precision, "measured", "precision: "),
        *words.facts({**initial, **rest}, "modelled"),
    ]
    blocks: list[Block] = [Table(("settled at the start", "value", "source"), tuple(rows))] if rows else []
    if why:
        table = Table(("what", "value", "source"), tuple(why))
        blocks.append(Details("Everything that was settled at the start, and why", (table,)))
    return blocks


def _comparison(record: RunRecord) -> Table:
    initial = mapping(record.plan.get("initial"))
    revisions = objects(record.plan.get("revisions"))
    revised = revisions[-1] if len(revisions) > 1 else {}
    first = revisions[0] if revisions else {}
    times = [x for x in (_step_seconds(record)) if x > 0]

    def happened(summary: str, metric: str) -> float | None:
        value = number(record.summary.get(summary))
        return value if value is not None else record.last(metric)

    planned_steps = number(initial.get("steps"))
    rows = (
        (
            "steps",
            words.count(planned_steps if planned_steps is not None else _total(first)),
            words.count(_total(revised)),
            words.count(happened("steps", "step")),
        ),
        ("tokens", words.count(number(initial.get("tokens"))), "", words.count(happened("tokens", "tokens"))),
        (
            "time",
            words.seconds(number(initial.get("seconds"))),
            "",
            words.seconds(happened("seconds", "seconds")),
        ),
        (
            "time per step",
            words.seconds(_known(initial, "step_seconds") or _known(first, "step_seconds")),
            words.seconds(_known(revised, "step_seconds")),
            words.seconds(statistics.median(times) if times else None),
        ),
        (
            "peak memory",
            _gib(_known(initial, "memory_gib", "peak_memory_gib")),
            "",
            _gib(happened("peak_memory_gib", "memory_gib")),
        ),
    )
    revised_known = bool(revised)
    head = ("", "planned (modelled)", "last revision (modelled)", "happened (measured)")
    if revised_known:
        return Table(head, rows)
    return Table((head[0], head[1], head[3]), tuple((row[0], row[1], row[3]) for row in rows))


def _step_seconds(record: RunRecord) -> list[float]:
    """Seconds per step between neighbouring logged steps. A resume or an evaluation in between is an outlier."""
    points = [(number(line.get("step")), number(line.get("seconds"))) for line in record.metrics]
    known = [(step, second) for step, second in points if step is not None and second is not None]
    return [(s1 - s0) / (n1 - n0) for (n0, s0), (n1, s1) in itertools.pairwise(known) if n1 > n0]


def _journal(revisions: list[dict[str, object]]) -> Table:
    rows = tuple(
        (
            words.count(number(revision.get("step"))),
            words.seconds(number(revision.get("elapsed_seconds"))),
            words.seconds(number(revision.get("step_seconds"))),
            words.count(_total(revision)),
            text(revision.get("reason")),
        )
        for revision in revisions
    )
    return Table(
        ("at step", "elapsed (measured)", "time per step (measured)", "steps in all (modelled)", "reason"),
        rows,
    )


def _fit(fit: dict[str, object], which: str) -> list[Block]:
    attempts = objects(fit.get("attempts"))
    settled = {key: value for key, value in fit.items() if key != "attempts"}
    said = words.plain({words.label(key): value for key, value in settled.items()})
    blocks: list[Block] = (
        [Paragraph(f"Micro-batch{which}, settled by a dry step (measured): {said}.")] if settled else []
    )
    if attempts:
        keys = list(dict.fromkeys(key for attempt in attempts for key in attempt))
        rows = tuple(tuple(words.plain(attempt.get(key)) for key in keys) for attempt in attempts)
        table = Table(tuple(words.label(key) for key in keys), rows)
        blocks.append(Details(f"Micro-batches{which} that were tried ({len(attempts)}, measured)", (table,)))
    return blocks


def _total(revision: dict[str, object]) -> float | None:
    step, remaining = number(revision.get("step")), _known(revision, "remaining", "remaining_steps")
    return None if step is None or remaining is None else step + remaining


def _known(values: dict[str, object], *keys: str) -> float | None:
    return next((value for value in (number(values.get(key)) for key in keys) if value is not None), None)


def _gib(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f} GiB"
