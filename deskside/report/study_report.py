"""Content of a study's report, section by section. The statistics are the study's own."""

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
    finished_trials,
    fronts,
    interactions,
    missing_numbers,
    unfinished_trials,
)
from deskside.study.narrative.findings import GOALS, insights
from deskside.study.results import NO_DIFFERENCE, TOO_FEW, Group, Results, status_text
from deskside.study.stats.metrics import PRIMARY, SPEED, metric_named
from deskside.utils.format import plural

MAX_SENTENCES = 4  # per goal, before the rest is folded
TIMED = "of training"  # a budget in time ends so
DESIGNS = {"full": "every combination", "one-at-a-time": "the baseline, and each other level alone"}
NOTHING_FINISHED = "Nothing yet: no trial has finished."
METHODS = {
    "paired t": (
        "Intervals are Student's t at 95 %, each for its one number, of logarithms of ratios seed by seed. A "
        "difference is called higher or lower only if it also holds among all comparisons of that metric in its group "
        "(Benjamini and Hochberg): of twenty arms without any effect, about one such interval excludes zero. So an "
        "interval may exclude zero while the verdict is still \u201cno difference shown\u201d."
    ),
    "exact": "\u201cExactly\u201d: the number is the same for all seeds of an arm, to the last digit.",
    "one seed": "With one seed there is no interval and no verdict, only the two numbers.",
}


def compose(
    results: Results, folder: Path, images: dict[str, list[Image]], absent: dict[str, list[str]]
) -> ReportDocument:
    """Return the report of the study in `folder`. `images` and `absent` hold the plots by group, drawn already."""
    one_group = len(results.groups) == 1
    groups = [
        Section(
            "Results" if one_group else group.heading,
            _group(results, group, images.get(group.name, []), absent.get(group.name, [])),
        )
        for group in results.groups
    ]
    sections = [
        Section("What the data says", _findings(results)),
        Section("Setup", _setup(results)),
        *groups,
        *([claims_section(results)] if results.claims else []),
        Section("Do the factors act independently?", interactions(results)),
        Section("Best trade-offs (Pareto fronts)", fronts(results)),
        Section("Trials that did not finish", [*unfinished_trials(results), all_trials(results)]),
        Section("What was not measured", missing_numbers(results)),
        Section("How arms were compared", _method(results)),
        Section("Machine", _machine(results)),
        Section("Commands", [CodeBlock("\n".join(commands(results, folder)))]),
    ]
    return ReportDocument(f"Study {results.name}", verdict(results), sections)


def verdict(results: Results) -> str:
    """Return the main findings in one line, and whether the study is complete."""
    done, total = finished_trials(results.arms)
    if not done:
        ended = Counter(trial.status for arm in results.arms for trial in arm.trials)
        how = ", ".join(f"{count} {status_text(name)}" for name, count in ended.items())
        return f"Nothing to compare yet: no trial has finished ({how or 'none has started'})."
    claims = [verdict_counts(results)] if results.claims else []
    best = insights(results, "quality")[:1] if len(results.groups) == 1 else []
    state = "" if results.complete else f"The study is not complete: {done} of {total} trials have finished."
    return " ".join(line for line in (*claims, *best, _comparison_counts(results), state) if line)


def _comparison_counts(results: Results) -> str:
    """Return how many arms are better or worse than their baselines in each primary metric."""
    parts = []
    for key in PRIMARY:
        found: Counter[str] = Counter()
        for arm in results.arms:
            if (c := arm.comparison(key)) is not None:
                word = c.verdict
                if word in ("lower", "higher", "exact"):
                    sign = c.relative if metric_named(key).better == "higher" else -c.relative
                    word = "better" if sign > 0 else "worse" if sign < 0 else "the same"
                found[word] += 1
        order = ("better", "worse", "the same", NO_DIFFERENCE, TOO_FEW)
        counts = ", ".join(f"{found[word]} {word}" for word in order if found[word])
        parts += [f"{metric_named(key).label}: {counts}"] if counts else []
    if not parts:
        return ""
    arms = sum(any(arm.comparison(key) for key in PRIMARY) for arm in results.arms)
    emulated = sum(arm.emulated for arm in results.arms if arm.comparison(SPEED))
    note = f" ({emulated} of them emulated)" if emulated else ""
    return f"{plural(arms, 'arm')}{note} against their baselines: {'; '.join(parts)}."


def _findings(results: Results) -> list[Block]:
    """Return all findings of a single group, or the best of each group, whose sections have the rest."""
    if len(results.groups) == 1:
        return _sentences(results) or [NOTHING_FINISHED]
    lines = [
        f"{group.heading}: {sentence}"
        for group in results.groups
        for goal in ("quality", "speed")
        for sentence in insights(_only(results, group), goal)[:1]
    ]
    return [Bullets(lines)] if lines else [NOTHING_FINISHED]


def _sentences(results: Results) -> list[Block]:
    """Return the findings of one group by goal, each sentence once, the less important ones folded."""
    seen: set[str] = set()
    blocks: list[Block] = []
    for goal in GOALS:
        fresh = [sentence for sentence in insights(results, goal) if sentence not in seen]
        seen.update(fresh)
        if fresh:
            blocks += [f"For {goal}:", Bullets(fresh[:MAX_SENTENCES])]
        if rest := fresh[MAX_SENTENCES:]:
            blocks.append(Details(f"{len(rest)} more for {goal}", [Bullets(rest)]))
    return blocks


def _only(results: Results, group: Group) -> Results:
    """Return the study as if it had only this group."""
    return replace(results, groups=[group], arms=results.arms_in(group))


def _method(results: Results) -> list[Block]:
    """Return how differences, intervals and verdicts are computed, and what they do not show."""
    notes = [
        "Differences are paired: a trial is compared with its baseline's trial of the same seed, which has the same "
        "data order. A seed that one of the two lacks is left out.",
        "\u201cNo difference shown\u201d proves nothing: the interval says how large a difference may still be.",
    ]
    used = dict.fromkeys(c.method for arm in results.arms for c in arm.comparisons)
    notes += [METHODS.get(one, f"Method: {one}.") for one in used if one]
    if any(group.budget.endswith(TIMED) for group in results.groups):
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
    """Return commands that continue from this study."""
    where = shlex.quote(str(folder))
    lines = [f"deskside report {where}", f"deskside dashboard {shlex.quote(str(folder.parent))}"]
    return lines if results.complete else [f"deskside study {where} --resume", *lines]


def _setup(results: Results) -> list[Block]:
    done, total = finished_trials(results.arms)
    rows = []
    for group in results.groups:
        factors = "; ".join(f"{factor.label}: {', '.join(factor.levels)}" for factor in group.factors)
        within = f", each {' and '.join(group.within)} with its own baseline" if group.within else ""
        rows += [
            *([("group", group.heading)] if len(results.groups) > 1 else []),
            ("base", group.base),
            ("varied", factors or "nothing"),
            ("design", DESIGNS.get(group.design, group.design) + within),
            ("arms", str(len(results.arms_in(group)))),
            ("budget of every arm", _budget(group)),
        ]
    rows += [
        ("seeds", ", ".join(str(seed) for seed in results.seeds)),
        ("trials", f"{done} of {total} finished"),
        ("memory", f"{100 * results.memory_fraction:.0f} % of the device for every trial"),
        ("started", results.created or "not recorded"),
        ("newest result", results.updated or "not recorded"),
    ]
    question: list[Block] = [results.question] if results.question else []
    return [*question, Table(("setting", "value"), rows)]


def _budget(group: Group) -> str:
    excluded = "; compile, evaluation and checkpoints are not counted" if group.budget.endswith(TIMED) else ""
    return (group.budget or "not recorded") + excluded


def _group(results: Results, group: Group, images: list[Image], absent: list[str]) -> list[Block]:
    if not results.arms_in(group):
        return ["This group has no arms."]
    several, factors = len(results.groups) > 1, ", ".join(factor.label for factor in group.factors)
    opening = f"Base {group.base}; varied: {factors or 'nothing'}; budget per arm: {_budget(group)}."
    return [
        *([opening] if several else []),
        arms_table(results, group),
        "In brackets: intervals over seeds. Differences are from the baseline, paired by seed. Measured.",
        *images,
        *(_sentences(_only(results, group)) if several else []),
        *([Bullets(absent)] if absent else []),
        *all_numbers(results, group),
    ]


def _machine(results: Results) -> list[Block]:
    if not results.machine:
        return ["The machine is not recorded."]
    table = Table(("quantity", "value", "source"), provenance_rows(results.machine, "measured"))
    used = sorted({trial.device for arm in results.arms for trial in arm.trials if trial.device})
    return [table, *([f"Devices used: {', '.join(used)}."] if used else [])]
