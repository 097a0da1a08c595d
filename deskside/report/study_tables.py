"""Tables of a study's report: arms, interactions, Pareto fronts, trials, and missing metrics."""

from collections.abc import Sequence

from deskside.report.document import Block, Bullets, Details, Table
from deskside.report.study_text import (
    NOT_MEASURED,
    difference_text,
    estimate_text,
    measured_arms,
    relative_text,
    trials_text,
)
from deskside.run.record import number
from deskside.study.metrics import ENERGY, MEMORY, METRICS, PRIMARY, QUALITY, SPEED, metric_named
from deskside.study.results import Arm, Group, Interaction, Results, status_text
from deskside.utils.format import count, elapsed, plural


def group_table(results: Results, group: Group) -> Table:
    """Return a table of arms: finished trials, the primary metrics with their differences, and power if measured."""
    arms = results.arms_in(group)
    power = [metric_named(key) for key in ("watts", ENERGY) if measured_arms(arms, key)]
    head = ["arm", "trials finished"]
    for key in PRIMARY:
        head += [metric_named(key).heading, "difference from its baseline"]
    rows = []
    for position, arm in enumerate(arms, start=1):
        baseline_mark = " (baseline)" if arm.id == arm.baseline and not arm.label.endswith("baseline") else ""
        row = [f"{position}. {arm.label}{baseline_mark}", trials_text(arm)]
        for key in PRIMARY:
            mean = estimate_text(metric_named(key), arm.estimate(key), with_interval=key == QUALITY)
            emulated = " (emulated)" if key == SPEED and arm.emulated and mean != NOT_MEASURED else ""
            row += [mean + emulated, difference_text(arm, key)]
        rows.append([*row, *(estimate_text(m, arm.estimate(m.key), with_interval=False) for m in power)])
    return Table([*head, *(metric.heading for metric in power)], rows)


def all_numbers(results: Results, group: Group) -> list[Block]:
    """Return folded tables of the differences in metrics that can be better or worse, and of all measured numbers."""
    arms = results.arms_in(group)
    blocks: list[Block] = []
    compared = [m for m in METRICS if m.better and any(arm.comparison(m.key) for arm in arms)]
    others = [arm for arm in arms if arm.id != arm.baseline]
    if compared and others:
        rows = [(arm.label, *(difference_text(arm, m.key) for m in compared)) for arm in others]
        table = Table(("arm", *(m.label for m in compared)), rows)
        blocks.append(Details("Every difference from the baseline", [table]))
    if measured := [m for m in METRICS if measured_arms(arms, m.key)]:
        rows = [(arm.label, *(estimate_text(m, arm.estimate(m.key)) for m in measured)) for arm in arms]
        table = Table(("arm", *(m.heading for m in measured)), rows)
        definitions = Bullets([f"{m.label}: {m.about}" for m in measured if m.about])
        blocks.append(Details("Every measured number, with intervals over seeds", [table, definitions]))
    return blocks


def interaction_blocks(results: Results) -> list[Block]:
    """Return a table of the pairs of factors that are shown to interact, and a folded table of the other pairs."""
    if not results.interactions:
        return ["No two factors of this study were varied together in enough trials to say."]
    dependent: list[tuple[str, ...]] = []
    others: list[tuple[str, ...]] = []
    for interaction in results.interactions:
        row = (
            *_group_cell(results, interaction.group),
            f"{_factor_text(interaction, interaction.first)} x {_factor_text(interaction, interaction.second)}",
            metric_named(interaction.metric).label,
            relative_text(
                interaction.effect, number(interaction.low), number(interaction.high), interaction.verdict
            ),
            str(interaction.n),
        )
        (dependent if interaction.is_shown else others).append(row)
    head = (*_group_header(results), "factors", "metric", "effect beyond the product of both", "seeds")
    blocks: list[Block] = [
        (
            "Zero means that one factor has the same relative effect at both levels of the other, by the difference "
            "of differences of logarithms."
        ),
        Table(head, dependent) if dependent else "No two factors are shown to depend on each other.",
    ]
    if others:
        blocks.append(Details(f"Not shown to depend on each other ({len(others)})", [Table(head, others)]))
    return blocks


def _factor_text(interaction: Interaction, name: str) -> str:
    return f"{name.replace('_', ' ')} {interaction.levels.get(name, '')}".strip()


def _group_header(results: Results) -> tuple[str, ...]:
    """Return the header of the group column; no column if there is only one group."""
    return ("group",) if len(results.groups) > 1 else ()


def _group_cell(results: Results, name: str) -> tuple[str, ...]:
    """Return the cell of the group column; no column if there is only one group."""
    headings = {group.name: group.heading for group in results.groups}
    return (headings.get(name, name),) if len(headings) > 1 else ()


def front_table(results: Results) -> list[Block]:
    """Return a table of Pareto fronts: the arms that no other arm dominates (study/stats/pareto.py)."""
    if not results.fronts:
        return ["There is no Pareto front: no arm has the numbers for one."]

    def arm_names(arm_ids: list[str]) -> str:
        arms = {arm.id: arm for arm in results.arms}
        return "; ".join(
            f"{arms[arm_id].label}{' (emulated)' if arms[arm_id].emulated else ''}"
            if arm_id in arms
            else arm_id
            for arm_id in arm_ids
        )

    rows = [
        (
            *_group_cell(results, front.group),
            ", ".join(metric_named(key).label for key in front.metrics),
            arm_names(front.arms) or "no arm has all of these numbers",
            arm_names(front.unclear) or "none",
        )
        for front in results.fronts
    ]
    on_front = "on the front: no other arm is as good in all metrics and better in one"
    head = ("metrics", on_front, "undecided by the intervals")
    return [Table((*_group_header(results), *head), rows)]


def unfinished_trials(results: Results) -> list[Block]:
    """Return a table of unfinished trials with the reasons; trials of an arm with the same reason share a row.

    Nothing if every trial finished.
    """
    seeds_by_outcome: dict[tuple[str, str, str, str], list[int]] = {}
    for arm in results.arms:
        for trial in arm.trials:
            if trial.status not in ("finished", "pending"):
                outcome = (arm.group, arm.label, status_text(trial.status), trial.reason)
                seeds_by_outcome.setdefault(outcome, []).append(trial.seed)
    pending = sum(trial.status == "pending" for arm in results.arms for trial in arm.trials)
    blocks: list[Block] = [f"Not run yet: {plural(pending, 'trial')}."] if pending else []
    if seeds_by_outcome:
        rows = [
            (
                *_group_cell(results, group),
                arm,
                ", ".join(str(seed) for seed in seeds),
                status,
                reason or "not recorded",
            )
            for (group, arm, status, reason), seeds in seeds_by_outcome.items()
        ]
        blocks.append(Table((*_group_header(results), "arm", "seed", "status", "reason"), rows))
    return blocks


def missing_metrics(results: Results) -> list[Block]:
    """Return sentences about which metrics are missing in which arms."""
    sentences = []
    for group in results.groups:
        arms = [arm for arm in results.arms_in(group) if arm.finished()]
        prefix = f"{group.heading}: " if len(results.groups) > 1 else ""
        if not arms:
            sentences.append(f"{prefix}Nothing was measured: no trial has finished.")
            continue
        arms_without = {m.label: [arm.label for arm in arms if arm.estimate(m.key) is None] for m in METRICS}
        if unmeasured := [
            label for label, arm_labels in arms_without.items() if len(arm_labels) == len(arms)
        ]:
            sentences.append(f"{prefix}Measured in no arm: {', '.join(unmeasured)}.")
        sentences += [
            f"{prefix}Without {label}, {plural(len(arm_labels), 'arm')}: {'; '.join(arm_labels)}."
            for label, arm_labels in arms_without.items()
            if 0 < len(arm_labels) < len(arms)
        ]
    if sentences:
        return [Bullets(sentences)]
    return ["Every metric was measured in every finished arm."]


def all_trials(results: Results) -> Details:
    """Return a folded table of every trial with its main metrics and its directory."""
    rows = []
    for arm in results.arms:
        for trial in arm.trials:

            def metric_text(key: str, metrics: dict[str, float] = trial.metrics) -> str:
                value = number(metrics.get(key))
                return NOT_MEASURED if value is None else metric_named(key).text(value)

            speed, seconds = number(trial.metrics.get(SPEED)), number(trial.metrics.get("total_seconds"))
            rows.append(
                (
                    arm.label,
                    str(trial.seed),
                    status_text(trial.status),
                    metric_text(QUALITY),
                    NOT_MEASURED if speed is None else count(speed),
                    metric_text(MEMORY),
                    NOT_MEASURED if seconds is None else elapsed(seconds),
                    trial.device or "not recorded",
                    trial.run,
                )
            )
    quality, memory = metric_named(QUALITY).heading, metric_named(MEMORY).heading
    head = ("arm", "seed", "status", quality, "tokens/s", memory, "total time", "device", "directory")
    return Details(f"Every trial ({len(rows)})", [Table(head, rows)])


def finished_trial_counts(arms: Sequence[Arm]) -> tuple[int, int]:
    """Return (number of finished trials, number of all trials)."""
    return sum(len(arm.finished()) for arm in arms), sum(len(arm.trials) for arm in arms)
