"""Tables of a study's report: arms, interactions, fronts, trials, and what was not measured."""

from collections.abc import Callable, Sequence

from deskside.report.document import Block, Bullets, Details, Table
from deskside.report.study_text import NOT_MEASURED, difference, estimate, measured_arms, relative, trials
from deskside.run.record import number
from deskside.study.results import Arm, Group, Interaction, Results, status_text
from deskside.study.stats.metrics import ENERGY, MEMORY, METRICS, PRIMARY, QUALITY, SPEED, metric_named
from deskside.utils.format import count, elapsed, plural


def arms_table(results: Results, group: Group) -> Table:
    """Return one row per arm: finished trials, quality, speed and memory, each with its difference, and power."""
    arms = results.arms_in(group)
    power = [metric_named(key) for key in ("watts", ENERGY) if measured_arms(arms, key)]
    head = ["arm", "trials finished"]
    for key in PRIMARY:
        head += [metric_named(key).heading, "difference from its baseline"]
    rows = []
    for place, arm in enumerate(arms, start=1):
        base = " (baseline)" if arm.id == arm.baseline and not arm.label.endswith("baseline") else ""
        row = [f"{place}. {arm.label}{base}", trials(arm)]
        for key in PRIMARY:
            mean = estimate(metric_named(key), arm.estimate(key), interval=key == QUALITY)
            emulated = " (emulated)" if key == SPEED and arm.emulated and mean != NOT_MEASURED else ""
            row += [mean + emulated, difference(arm, key)]
        rows.append([*row, *(estimate(m, arm.estimate(m.key), interval=False) for m in power)])
    return Table([*head, *(metric.heading for metric in power)], rows)


def all_numbers(results: Results, group: Group) -> list[Block]:
    """Return every difference and every measured number of a group, folded."""
    arms = results.arms_in(group)
    blocks: list[Block] = []
    compared = [m for m in METRICS if m.better and any(arm.comparison(m.key) for arm in arms)]
    others = [arm for arm in arms if arm.id != arm.baseline]
    if compared and others:
        rows = [(arm.label, *(difference(arm, m.key) for m in compared)) for arm in others]
        table = Table(("arm", *(m.label for m in compared)), rows)
        blocks.append(Details("Every difference from the baseline", [table]))
    if have := [m for m in METRICS if measured_arms(arms, m.key)]:
        rows = [(arm.label, *(estimate(m, arm.estimate(m.key)) for m in have)) for arm in arms]
        table = Table(("arm", *(m.heading for m in have)), rows)
        definitions = Bullets([f"{m.label}: {m.about}" for m in have if m.about])
        blocks.append(Details("Every measured number, with intervals over seeds", [table, definitions]))
    return blocks


def interactions(results: Results) -> list[Block]:
    """Return whether factors act independently: dependent pairs first, the others folded."""
    if not results.interactions:
        return ["No two factors of this study were varied together in enough trials to say."]
    titles = _group_column(results)
    dependent: list[tuple[str, ...]] = []
    others: list[tuple[str, ...]] = []
    for found in results.interactions:
        row = (
            *titles(found.group),
            f"{_factor(found, found.first)} x {_factor(found, found.second)}",
            metric_named(found.metric).label,
            relative(found.effect, number(found.low), number(found.high), found.verdict),
            str(found.n),
        )
        (dependent if found.is_shown else others).append(row)
    head = (*titles("", "group"), "factors", "metric", "effect of both beyond the sum of each", "seeds")
    blocks: list[Block] = [
        (
            "Zero means that one factor has the same effect at every level of the other. Relative, from the difference "
            "of differences of logarithms."
        ),
        Table(head, dependent) if dependent else "No two factors are shown to depend on each other.",
    ]
    if others:
        blocks.append(Details(f"Not shown to depend on each other ({len(others)})", [Table(head, others)]))
    return blocks


def _factor(found: Interaction, name: str) -> str:
    return f"{name.replace('_', ' ')} {found.levels.get(name, '')}".strip()


def _group_column(results: Results) -> Callable[..., tuple[str, ...]]:
    """Return a function that gives the cells of the group column: none if there is one group."""
    titles = {group.name: group.heading for group in results.groups}

    def cells(name: str, head: str = "") -> tuple[str, ...]:
        return (head or titles.get(name, name),) if len(titles) > 1 else ()

    return cells


def fronts(results: Results) -> list[Block]:
    """Return the arms that no other arm beats in all metrics at once."""
    if not results.fronts:
        return ["There is no Pareto front: no arm has the numbers for one."]
    titles = _group_column(results)

    def listed(ids: list[str]) -> str:
        arms = {arm.id: arm for arm in results.arms}
        return "; ".join(
            f"{arms[name].label}{' (emulated)' if arms[name].emulated else ''}" if name in arms else name
            for name in ids
        )

    rows = [
        (
            *titles(front.group),
            ", ".join(metric_named(key).label for key in front.metrics),
            listed(front.arms) or "no arm has all of these numbers",
            listed(front.unclear) or "none",
        )
        for front in results.fronts
    ]
    head = ("metrics", "on the front: no other arm is better in all metrics", "undecided by the intervals")
    return [Table((*titles("", "group"), *head), rows)]


def unfinished_trials(results: Results) -> list[Block]:
    """Return the trials that did not finish with their reasons; equal ones of an arm share a row."""
    seeds: dict[tuple[str, str, str], list[int]] = {}
    for arm in results.arms:
        for trial in arm.trials:
            if trial.status not in ("finished", "pending"):
                seeds.setdefault((arm.label, status_text(trial.status), trial.reason), []).append(trial.seed)
    pending = sum(trial.status == "pending" for arm in results.arms for trial in arm.trials)
    blocks: list[Block] = [f"Not run yet: {plural(pending, 'trial')}."] if pending else []
    if seeds:
        rows = [
            (arm, ", ".join(str(seed) for seed in of), how, reason or "not recorded")
            for (arm, how, reason), of in seeds.items()
        ]
        blocks.append(Table(("arm", "seed", "status", "reason"), rows))
    return blocks or ["Every trial finished."]


def missing_numbers(results: Results) -> list[Block]:
    """Return which numbers are missing, and of which arms."""
    sentences = []
    for group in results.groups:
        arms = [arm for arm in results.arms_in(group) if arm.finished()]
        where = f"{group.heading}: " if len(results.groups) > 1 else ""
        if not arms:
            sentences.append(f"{where}Nothing was measured: no trial has finished.")
            continue
        lacking = {m.label: [arm.label for arm in arms if arm.estimate(m.key) is None] for m in METRICS}
        if nowhere := [label for label, without in lacking.items() if len(without) == len(arms)]:
            sentences.append(f"{where}Measured in no arm: {', '.join(nowhere)}.")
        sentences += [
            f"{where}Without {label}, {plural(len(without), 'arm')}: {'; '.join(without)}."
            for label, without in lacking.items()
            if 0 < len(without) < len(arms)
        ]
    if sentences:
        return [Bullets(sentences)]
    return ["Every metric was measured in every finished arm."]


def all_trials(results: Results) -> Details:
    """Return every trial with its directory, folded."""
    rows = []
    for arm in results.arms:
        for trial in arm.trials:

            def shown(key: str, metrics: dict[str, float] = trial.metrics) -> str:
                found = number(metrics.get(key))
                return NOT_MEASURED if found is None else metric_named(key).text(found)

            speed, seconds = number(trial.metrics.get(SPEED)), number(trial.metrics.get("total_seconds"))
            rows.append(
                (
                    arm.label,
                    str(trial.seed),
                    status_text(trial.status),
                    shown(QUALITY),
                    NOT_MEASURED if speed is None else count(speed),
                    shown(MEMORY),
                    NOT_MEASURED if seconds is None else elapsed(seconds),
                    trial.device or "not recorded",
                    trial.run,
                )
            )
    quality, memory = metric_named(QUALITY).heading, metric_named(MEMORY).heading
    head = ("arm", "seed", "status", quality, "tokens/s", memory, "total time", "device", "directory")
    return Details(f"Every trial ({len(rows)})", [Table(head, rows)])


def finished_trials(arms: Sequence[Arm]) -> tuple[int, int]:
    """Return (finished trials, all trials)."""
    return sum(len(arm.finished()) for arm in arms), sum(len(arm.trials) for arm in arms)
