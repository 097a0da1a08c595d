"""The content of a study's report, section by section."""

import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

from deskside.report.document import (
    Block,
    Bullets,
    CodeBlock,
    Details,
    Image,
    ReportDocument,
    Section,
    Table,
)
from deskside.report.run_plan import provenance_rows
from deskside.report.study_claims import claims_section, verdict_counts
from deskside.report.study_tables import (
    all_numbers,
    all_trials,
    arms_table,
    finished_trial_counts,
    front_table,
    interaction_blocks,
    missing_metrics,
    unfinished_trials,
)
from deskside.study.narrative.findings import GOALS, has_time_budget, insights
from deskside.study.results import NO_DIFFERENCE, TOO_FEW, Group, Results, status_text
from deskside.study.stats.metrics import PRIMARY, SPEED, metric_named
from deskside.utils.format import plural

MAX_SHOWN = 4  # findings per goal; the others are folded
DESIGN_TEXT = {"full": "every combination", "one-at-a-time": "the baseline, and each other level alone"}
NOTHING_FINISHED = "Nothing yet: no trial has finished."
METHOD_NOTES = {
    "paired t": (
        "The interval of a difference is Student's t at 95 %, of logarithms of ratios seed by seed. A difference is "
        "called higher or lower only if it also holds among all comparisons of that metric in its group "
        "(Benjamini and Hochberg): of twenty arms without any effect, about one such interval excludes zero. So an "
        "interval may exclude zero while the verdict is still \u201cno difference shown\u201d."
    ),
    "exact": "\u201cExactly\u201d: the number is the same for all seeds of an arm, to the last digit.",
    "one seed": "With one seed there is no interval and no verdict, only the two numbers.",
}


def compose(
    results: Results, folder: Path, images: dict[str, list[Image]], missing: dict[str, list[str]]
) -> ReportDocument:
    """Return the report of the study in `folder`.

    `images` has the drawn plots of each group, and `missing` a sentence for each plot that could not be drawn.
    """
    one_group = len(results.groups) == 1
    groups = [
        Section(
            "Results" if one_group else group.heading,
            _group_blocks(results, group, images.get(group.name, []), missing.get(group.name, [])),
        )
        for group in results.groups
    ]
    sections = [
        Section("What the data says", _finding_blocks(results)),
        Section("Setup", _setup_blocks(results)),
        *groups,
        *([claims_section(results)] if results.claims else []),
        Section("Do the factors act independently?", interaction_blocks(results)),
        Section("Best trade-offs (Pareto fronts)", front_table(results)),
        Section("Trials that did not finish", [*unfinished_trials(results), all_trials(results)]),
        Section("What was not measured", missing_metrics(results)),
        Section("How arms were compared", _method_notes(results)),
        Section("Machine", _machine_blocks(results)),
        Section("Commands", [CodeBlock("\n".join(commands(results, folder)))]),
    ]
    return ReportDocument(f"Study {results.name}", verdict(results), sections)


def verdict(results: Results) -> str:
    """Return the main findings in one line, and a note if the study is not complete."""
    finished, total = finished_trial_counts(results.arms)
    if not finished:
        statuses = Counter(trial.status for arm in results.arms for trial in arm.trials)
        status_counts = ", ".join(f"{count} {status_text(name)}" for name, count in statuses.items())
        return f"Nothing to compare yet: no trial has finished ({status_counts or 'none has started'})."
    claims = [verdict_counts(results)] if results.claims else []
    best = insights(results, "quality")[:1] if len(results.groups) == 1 else []
    state = (
        "" if results.complete else f"The study is not complete: {finished} of {total} trials have finished."
    )
    return " ".join(line for line in (*claims, *best, _comparison_counts(results), state) if line)


def _comparison_counts(results: Results) -> str:
    """Return how many arms are better or worse than their baselines in each primary metric."""
    parts = []
    for key in PRIMARY:
        counts: Counter[str] = Counter()
        for arm in results.arms:
            if (comparison := arm.comparison(key)) is not None:
                outcome = comparison.verdict
                if outcome in ("lower", "higher", "exact"):
                    sign = 1 if metric_named(key).better == "higher" else -1
                    improvement = sign * comparison.relative
                    outcome = "better" if improvement > 0 else "worse" if improvement < 0 else "the same"
                counts[outcome] += 1
        order = ("better", "worse", "the same", NO_DIFFERENCE, TOO_FEW)
        counts_text = ", ".join(f"{counts[outcome]} {outcome}" for outcome in order if counts[outcome])
        if counts_text:
            parts.append(f"{metric_named(key).label}: {counts_text}")
    if not parts:
        return ""
    arms = sum(any(arm.comparison(key) for key in PRIMARY) for arm in results.arms)
    emulated = sum(arm.emulated for arm in results.arms if arm.comparison(SPEED))
    note = f" ({emulated} of them emulated)" if emulated else ""
    return f"{plural(arms, 'arm')}{note} against their baselines: {'; '.join(parts)}."


def _finding_blocks(results: Results) -> list[Block]:
    """Return all findings if there is one group, else the main ones of each group; the others are in its section."""
    if len(results.groups) == 1:
        return _findings_by_goal(results) or [NOTHING_FINISHED]
    lines = [
        f"{group.heading}: {sentence}"
        for group in results.groups
        for goal in ("quality", "speed")
        for sentence in insights(_only_group(results, group), goal)[:1]
    ]
    return [Bullets(lines)] if lines else [NOTHING_FINISHED]


def _findings_by_goal(results: Results) -> list[Block]:
    """Return the findings of a group by goal, each sentence only once, with the less important ones folded."""
    seen: set[str] = set()
    blocks: list[Block] = []
    for goal in GOALS:
        new = [sentence for sentence in insights(results, goal) if sentence not in seen]
        seen.update(new)
        if new:
            blocks += [f"For {goal}:", Bullets(new[:MAX_SHOWN])]
        if rest := new[MAX_SHOWN:]:
            blocks.append(Details(f"{len(rest)} more for {goal}", [Bullets(rest)]))
    return blocks


def _only_group(results: Results, group: Group) -> Results:
    """Return the study as if it had only this group."""
    return replace(results, groups=[group], arms=results.arms_in(group))


def _method_notes(results: Results) -> list[Block]:
    """Return notes on how differences, intervals and verdicts are computed, and on what they do not show."""
    notes = [
        "Differences are paired: a trial is compared with its baseline's trial of the same seed, which has the same "
        "data order. A seed that one of the two lacks is left out.",
        "\u201cNo difference shown\u201d proves nothing: the interval says how large a difference may still be.",
    ]
    methods = dict.fromkeys(comparison.method for arm in results.arms for comparison in arm.comparisons)
    notes += [METHOD_NOTES.get(method, f"Method: {method}.") for method in methods if method]
    if any(has_time_budget(group) for group in results.groups):
        notes.append(
            "In a budget of time a slower arm sees fewer tokens, and its learning rate decays over the steps that it "
            "has. The final loss is therefore what the time buys. Loss at equal tokens is read off each arm's curve: a "
            "slower arm is later in its decay at that point than a faster one, which favors the slower."
        )
    if any(arm.emulated for arm in results.arms):
        notes.append(
            "Arms marked emulated compute a number format that this machine has no hardware for. Their loss is that of "
            "the format, their speed and energy are not."
        )
    notes.append("A number that was not measured is never counted as zero.")
    return [Bullets([*notes, *results.notes])]


def commands(results: Results, folder: Path) -> list[str]:
    """Return commands to run next."""
    where = shlex.quote(str(folder))
    lines = [f"deskside report {where}", f"deskside dashboard {shlex.quote(str(folder.parent))}"]
    return lines if results.complete else [f"deskside study {where} --resume", *lines]


def _setup_blocks(results: Results) -> list[Block]:
    finished, total = finished_trial_counts(results.arms)
    rows = []
    for group in results.groups:
        factors = "; ".join(f"{factor.label}: {', '.join(factor.levels)}" for factor in group.factors)
        within = f", each {' and '.join(group.within)} with its own baseline" if group.within else ""
        rows += [
            *([("group", group.heading)] if len(results.groups) > 1 else []),
            ("base", group.base),
            ("varied", factors or "nothing"),
            ("design", DESIGN_TEXT.get(group.design, group.design) + within),
            ("arms", str(len(results.arms_in(group)))),
            ("budget of every arm", _budget_text(group)),
        ]
    rows += [
        ("seeds", ", ".join(str(seed) for seed in results.seeds)),
        ("trials", f"{finished} of {total} finished"),
        ("GPU memory", f"at most {100 * results.memory_fraction:.0f} % for every trial"),
        ("started", results.created or "not recorded"),
        ("newest result", results.updated or "not recorded"),
    ]
    opening: list[Block] = [results.question] if results.question else []
    return [*opening, Table(("setting", "value"), rows)]


def _budget_text(group: Group) -> str:
    if has_time_budget(group):
        return f"{group.budget}; compile, evaluation and checkpoints are not counted"
    return group.budget or "not recorded"


def _group_blocks(results: Results, group: Group, images: list[Image], missing: list[str]) -> list[Block]:
    if not results.arms_in(group):
        return ["This group has no arms."]
    several, factors = len(results.groups) > 1, ", ".join(factor.label for factor in group.factors)
    opening = f"Base {group.base}; varied: {factors or 'nothing'}; budget per arm: {_budget_text(group)}."
    return [
        *([opening] if several else []),
        arms_table(results, group),
        "In brackets: intervals over seeds. Differences are from the baseline, paired by seed. "
        "All values are measured.",
        *images,
        *(_findings_by_goal(_only_group(results, group)) if several else []),
        *([Bullets(missing)] if missing else []),
        *all_numbers(results, group),
    ]


def _machine_blocks(results: Results) -> list[Block]:
    if not results.machine:
        return ["The machine is not recorded."]
    table = Table(("quantity", "value", "source"), provenance_rows(results.machine, "measured"))
    devices = sorted({trial.device for arm in results.arms for trial in arm.trials if trial.device})
    return [table, *([f"Devices used: {', '.join(devices)}."] if devices else [])]
