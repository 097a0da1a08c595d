"""The content of a study's report, section by section."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deskside.report.document import (
    Block,
    Bullets,
    CodeBlock,
    Details,
    ReportDocument,
    Section,
    Table,
)
from deskside.report.run_plan import provenance_rows
from deskside.report.study_claims import claim_chips, claims_section, claims_sentence
from deskside.report.study_figures import Figures
from deskside.report.study_tables import (
    all_numbers,
    all_trials,
    finished_trial_counts,
    front_table,
    group_table,
    interaction_blocks,
    missing_metrics,
    unfinished_trials,
)
from deskside.report.study_verdicts import arms_table, best_sentence, best_table, is_better
from deskside.run.record import machine_name
from deskside.study.metrics import PRIMARY, SPEED, metric_named
from deskside.study.narrative.cautions import trials_on_shared_gpus
from deskside.study.narrative.findings import GOALS, has_time_budget, insights
from deskside.study.narrative.overfitting import overfit_arms
from deskside.study.results import EXACT, NO_DIFFERENCE, TOO_FEW, Group, Results, status_text
from deskside.utils.format import plural

MAX_SHOWN = 4  # findings per goal; the others are folded
MAX_TABLE_ROWS = 12  # a longer table of arms against their baselines is folded
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
    results: Results,
    folder: Path,
    overview: Figures,
    figures: Mapping[str, Figures],
    languages: Sequence[Block] = (),
    cautions: Sequence[str] = (),
) -> ReportDocument:
    """Return the report of the study in `folder`. `figures` has those of each group by its name.

    languages: The section about the languages of the data, which is left out if it is empty.
    cautions: Findings that limit what the comparison of the arms shows.
    """
    compared = sum(arm.id != arm.baseline for arm in results.arms)
    arms: list[Block] = [arms_table(results, results.arms)] if compared else []
    if compared > MAX_TABLE_ROWS:
        arms = [Details(f"Every arm against its baseline ({compared})", arms, printed=True)]
    groups = [
        Details(
            _group_summary(results, group), _group_blocks(results, group, figures.get(group.name, Figures()))
        )
        for group in results.groups
    ]
    unfinished = unfinished_trials(results)
    notes = [
        ("Setup", _setup_blocks(results)),
        ("Do the factors act independently?", interaction_blocks(results)),
        ("Best trade-offs (Pareto fronts)", front_table(results)),
        ("What was not measured", missing_metrics(results)),
        ("How arms were compared", _method_notes(results)),
        ("Machine", _machine_blocks(results)),
    ]
    sections = [
        Section("What is shown to be better", [*_bullets(cautions), *_best_blocks(results)]),
        *([claims_section(results)] if results.claims else []),
        Section("Arms against their baselines", [*overview.images, *_bullets(overview.missing), *arms]),
        *([Section("Languages", languages)] if languages else []),
        Section("Every number, chart and finding", [*groups, all_trials(results)]),
        *([Section("Trials that did not finish", unfinished)] if unfinished else []),
        Section("How this was measured", [Details(title, blocks) for title, blocks in notes]),
        Section("Next commands", [CodeBlock("\n".join(commands(results, folder)))]),
    ]
    return ReportDocument(f"Study {results.name}", verdict(results), sections, _opening(results))


def _opening(results: Results) -> list[Block]:
    """Return the question, the number of claims by verdict, and what the study consists of."""
    finished, total = finished_trial_counts(results.arms)
    facts = [
        machine_name(results.machine, "machine not recorded"),
        f"{plural(len(results.arms), 'arm')} in {plural(len(results.groups), 'group')}",
        f"{finished} of {plural(total, 'trial')} finished",
        plural(len(results.seeds), "seed"),
        *([results.created[:10]] if results.created else []),
    ]
    chips: list[Block] = [claim_chips(results)] if results.claims else []
    question: list[Block] = [results.question] if results.question else []
    return [*chips, *question, " \u00b7 ".join(facts)]


def _best_blocks(results: Results) -> list[Block]:
    if not any(arm.finished() for arm in results.arms):
        return [NOTHING_FINISHED]
    counts = _comparison_counts(results)
    if not counts:
        return ["Nothing to compare: no arm has a result in the same seed as its baseline."]
    return [
        best_table(results),
        "The largest improvement against an arm's own baseline that the seeds show, with its interval at 95 %. "
        "\u201cNot shown\u201d: no arm is shown to be better. All values are measured.",
        counts,
    ]


def _bullets(sentences: Sequence[str]) -> list[Block]:
    return [Bullets(sentences)] if sentences else []


def verdict(results: Results) -> str:
    """Return the main findings in one line, and a note if the study is not complete."""
    finished, total = finished_trial_counts(results.arms)
    if not finished:
        statuses = Counter(trial.status for arm in results.arms for trial in arm.trials)
        status_counts = ", ".join(f"{count} {status_text(name)}" for name, count in statuses.items())
        return f"Nothing to compare yet: no trial has finished ({status_counts or 'none has started'})."
    parts = [claims_sentence(results)] if results.claims else []
    parts += insights(results, "quality")[:1] if len(results.groups) == 1 else [best_sentence(results)]
    if overfit := overfit_arms(results):
        arms = plural(sum(bool(arm.finished()) for arm in results.arms), "arm")
        parts.append(f"{len(overfit)} of {arms} overfit, so the losses at the end are not their lowest.")
    if shared := trials_on_shared_gpus(results):
        parts.append(
            f"{plural(len(shared), 'trial')} shared a GPU with another process, so speeds are not comparable."
        )
    if not results.complete:
        parts.append(f"The study is not complete: {finished} of {total} trials have finished.")
    return " ".join(part for part in parts if part)


def _comparison_counts(results: Results) -> str:
    """Return how many arms are better or worse than their baselines in each primary metric."""
    parts = []
    for key in PRIMARY:
        counts: Counter[str] = Counter()
        for arm in results.arms:
            if (comparison := arm.comparison(key)) is not None:
                better = is_better(comparison)
                if better is not None:
                    counts["better" if better else "worse"] += 1
                else:
                    counts["the same" if comparison.verdict == EXACT else comparison.verdict] += 1
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
    return [Table(("setting", "value"), rows)]


def _budget_text(group: Group) -> str:
    if has_time_budget(group):
        return f"{group.budget}; compile, evaluation and checkpoints are not counted"
    return group.budget or "not recorded"


def _group_summary(results: Results, group: Group) -> str:
    heading = "All arms" if len(results.groups) == 1 else group.heading
    return (
        f"{heading} ({plural(len(results.arms_in(group)), 'arm')}, {group.budget or 'budget not recorded'})"
    )


def _group_blocks(results: Results, group: Group, figures: Figures) -> list[Block]:
    if not results.arms_in(group):
        return ["This group has no arms."]
    factors = ", ".join(factor.label for factor in group.factors)
    return [
        f"Base {group.base}; varied: {factors or 'nothing'}; budget per arm: {_budget_text(group)}.",
        group_table(results, group),
        "In brackets: intervals over seeds. Differences are from the baseline, paired by seed. "
        "All values are measured.",
        *figures.images,
        *(_findings_by_goal(_only_group(results, group)) or [NOTHING_FINISHED]),
        *_bullets(figures.missing),
        *all_numbers(results, group),
    ]


def _machine_blocks(results: Results) -> list[Block]:
    if not results.machine:
        return ["The machine is not recorded."]
    table = Table(("quantity", "value", "source"), provenance_rows(results.machine, "measured"))
    devices = sorted({trial.device for arm in results.arms for trial in arm.trials if trial.device})
    return [table, *([f"Devices used: {', '.join(devices)}."] if devices else [])]
