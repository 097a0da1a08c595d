"""The tables of a study's report: arms, comparisons, interactions, fronts, trials, and what was not measured."""

from deskside.report import words
from deskside.report.document import Block, Bullets, Details, Paragraph, Table
from deskside.report.study_words import (
    ENERGY,
    MEMORY,
    NOT_MEASURED,
    PRIMARY,
    QUALITY,
    SPEED,
    arms_of,
    comparison,
    difference,
    estimate,
    group_title,
    known,
    measured,
    metric,
    relative,
    several,
    state,
    status,
    unit,
    value,
)
from deskside.run.record import number
from deskside.study.results import Arm, Group, Interaction, Results
from deskside.study.stats.metrics import METRICS


def arms_table(results: Results, group: Group) -> Table:
    """An arm per row: how many trials came to their end, quality, speed, memory, each beside its difference."""
    arms = arms_of(results, group)
    power = [key for key in ("watts", ENERGY) if measured(arms, key)]
    head = ["arm", "trials finished"]
    for key in PRIMARY:
        head += [unit(metric(key)), "against its baseline"]
    head += [unit(metric(key)) for key in power]
    rows = []
    for place, arm in enumerate(arms, start=1):
        base = " (baseline)" if arm.id == arm.baseline and not arm.label.endswith("baseline") else ""
        row = [f"{place}. {arm.label}{base}", state(arm)]
        for key in PRIMARY:
            plain = estimate(metric(key), known(arm, key), interval=key == QUALITY)
            emulated = " (emulated)" if key == SPEED and arm.emulated and plain != NOT_MEASURED else ""
            row += [plain + emulated, difference(arm, key)]
        row += [estimate(metric(key), known(arm, key), interval=False) for key in power]
        rows.append(tuple(row))
    return Table(tuple(head), tuple(rows))


def numbers(results: Results, group: Group) -> list[Block]:
    """Everything else that was compared and measured, folded away: an arm per row, a metric per column."""
    arms = arms_of(results, group)
    blocks: list[Block] = []
    compared = [m for m in METRICS if m.better and any(comparison(arm, m.key) for arm in arms)]
    against = [arm for arm in arms if arm.id != arm.baseline]
    if compared and against:
        rows = tuple((arm.label, *(difference(arm, m.key) for m in compared)) for arm in against)
        table = Table(("arm", *(m.label for m in compared)), rows)
        blocks.append(Details("Every difference against the baseline", (table,)))
    have = [m for m in METRICS if measured(arms, m.key)]
    if have:
        rows = tuple((arm.label, *(estimate(m, known(arm, m.key)) for m in have)) for arm in arms)
        table = Table(("arm", *(unit(m) for m in have)), rows)
        about = Bullets(tuple(f"{m.label}: {m.about}" for m in have if m.about))
        blocks.append(Details("Every measured number, with intervals over seeds", (table, about)))
    return blocks


def interactions(results: Results) -> list[Block]:
    """Whether factors act independently: what is shown to depend first, the rest folded away."""
    if not results.interactions:
        return [Paragraph("No two factors of this study were varied together in enough trials to say.")]
    shown: list[tuple[str, ...]] = []
    rest: list[tuple[str, ...]] = []
    for found in results.interactions:
        row = (
            *((_title(results, found.group),) if len(results.groups) > 1 else ()),
            f"{_factor(found, found.first)} x {_factor(found, found.second)}",
            metric(found.metric).label,
            relative(found.effect, number(found.low), number(found.high), found.verdict),
            str(found.n),
        )
        depends = found.verdict in ("lower", "higher") or (found.verdict == "exact" and found.effect != 0)
        (shown if depends else rest).append(row)
    head = (
        *(("group",) if len(results.groups) > 1 else ()),
        "factors",
        "metric",
        "both beyond each alone",
        "seeds",
    )
    blocks: list[Block] = [
        Paragraph(
            "An effect of zero: what one factor does is the same at every level of the other. "
            "Relative, from the difference of differences of logarithms."
        )
    ]
    if shown:
        blocks.append(Table(head, tuple(shown)))
    else:
        blocks.append(Paragraph("No two factors are shown to depend on each other."))
    if rest:
        blocks.append(
            Details(f"Not shown to depend on each other ({len(rest)})", (Table(head, tuple(rest)),))
        )
    return blocks


def _factor(found: Interaction, name: str) -> str:
    level = found.levels.get(name)
    return f"{name.replace('_', ' ')} {level}" if level else name.replace("_", " ")


def fronts(results: Results) -> list[Block]:
    """The arms that no other arm beats in everything at once."""
    if not results.fronts:
        return [Paragraph("There is no Pareto front: no arm has the numbers for one.")]
    many = len(results.groups) > 1
    rows = tuple(
        (
            *((_title(results, front.group),) if many else ()),
            ", ".join(metric(key).label for key in front.metrics),
            _listed(results, front.arms) or "no arm has all of these numbers",
            _listed(results, front.unclear) or "none",
        )
        for front in results.fronts
    )
    head = (
        "weighed together",
        "on the front: no other arm is better in all of it",
        "left open by the intervals",
    )
    return [Table((("group", *head) if many else head), rows)]


def _listed(results: Results, ids: list[str]) -> str:
    names = []
    for name in ids:
        arm = results.arm(name)
        names.append((arm.label if arm else name) + (" (emulated)" if arm and arm.emulated else ""))
    return "; ".join(names)


def unfinished(results: Results) -> list[Block]:
    """The trials that did not come to their end, with their reasons; equal ones of an arm in one row."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    for arm in results.arms:
        for trial in arm.trials:
            if trial.status not in ("finished", "pending"):
                rows.setdefault((arm.label, status(trial.status), trial.reason), []).append(trial.seed)
    pending = sum(trial.status == "pending" for arm in results.arms for trial in arm.trials)
    waiting: list[Block] = [Paragraph(f"Not run yet: {several(pending, 'trial')}.")] if pending else []
    if not rows:
        return waiting or [Paragraph("Every trial came to its end.")]
    table = tuple(
        (arm, ", ".join(str(seed) for seed in seeds), how, reason or "not recorded")
        for (arm, how, reason), seeds in rows.items()
    )
    return [*waiting, Table(("arm", "seed", "status", "reason"), table)]


def not_measured(results: Results) -> list[Block]:
    """Which numbers are missing, and where: absent is never zero."""
    sentences = []
    for group in results.groups:
        arms = [arm for arm in arms_of(results, group) if arm.finished()]
        where = f"{group_title(group)}: " if len(results.groups) > 1 else ""
        if not arms:
            sentences.append(f"{where}Nothing was measured: no trial has come to its end.")
            continue
        nowhere = [shown.label for shown in METRICS if not measured(arms, shown.key)]
        if nowhere:
            sentences.append(f"{where}Measured in no arm: {', '.join(nowhere)}.")
        for shown in METRICS:
            lacking = [arm.label for arm in arms if known(arm, shown.key) is None]
            if lacking and shown.label not in nowhere:
                sentences.append(
                    f"{where}Lacking {shown.label}, {several(len(lacking), 'arm')}: {'; '.join(lacking)}."
                )
    return (
        [Bullets(tuple(sentences))]
        if sentences
        else [Paragraph("Every metric was measured in every finished arm.")]
    )


def trials(results: Results) -> Details:
    """Every trial with its directory."""
    rows = []
    for arm in results.arms:
        for trial in arm.trials:
            loss = number(trial.metrics.get(QUALITY))
            rows.append(
                (
                    arm.label,
                    str(trial.seed),
                    status(trial.status),
                    NOT_MEASURED if loss is None else value(metric(QUALITY), loss),
                    words.count(number(trial.metrics.get(SPEED))).replace("not known", NOT_MEASURED),
                    _shown(trial.metrics, MEMORY),
                    words.seconds(number(trial.metrics.get("total_seconds"))).replace(
                        "not known", NOT_MEASURED
                    ),
                    trial.device or "not recorded",
                    trial.run,
                )
            )
    head = (
        "arm",
        "seed",
        "status",
        unit(metric(QUALITY)),
        "tokens/s",
        unit(metric(MEMORY)),
        "whole time",
        "device",
        "directory",
    )
    return Details(f"Every trial ({len(rows)})", (Table(head, tuple(rows)),))


def _shown(metrics: dict[str, float], key: str) -> str:
    found = number(metrics.get(key))
    return NOT_MEASURED if found is None else value(metric(key), found)


def _title(results: Results, name: str) -> str:
    return next((group_title(group) for group in results.groups if group.name == name), name)


def finished(arms: list[Arm]) -> tuple[int, int]:
    """(trials that came to their end, all trials)."""
    return sum(len(arm.finished()) for arm in arms), sum(len(arm.trials) for arm in arms)
