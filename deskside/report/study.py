"""What a study's report says, section by section, from its results. The statistics are the study's own."""

import shlex
from dataclasses import replace
from pathlib import Path

from deskside.report import words
from deskside.report.document import (
    Block,
    Bullets,
    Code,
    Details,
    Document,
    Figure,
    Paragraph,
    Section,
    Table,
)
from deskside.report.study_claims import claims_section, counts
from deskside.report.study_tables import (
    arms_table,
    finished,
    fronts,
    interactions,
    not_measured,
    numbers,
    trials,
    unfinished,
)
from deskside.report.study_words import (
    NO_DIFFERENCE,
    PRIMARY,
    SPEED,
    TOO_FEW,
    arms_of,
    comparison,
    group_title,
    metric,
    several,
    status,
)
from deskside.study.narrative.findings import GOALS, insights
from deskside.study.results import Group, Results

SENTENCES = 4  # for each goal, before the rest is folded away
TIMED = "of training"  # how a budget in time ends, in words
METHODS = {
    "paired t": (
        "Intervals are Student's at 95 %, each for its one number, of logarithms of ratios seed by seed. A difference "
        "is called higher or lower when it also stands among all comparisons of that metric in its group (Benjamini "
        "and Hochberg's rule): of twenty arms that do nothing, about one such interval leaves out zero. So an interval "
        "may leave out zero and the verdict still be \u201cno difference shown\u201d."
    ),
    "exact": "\u201cExactly\u201d: no seed changes the number in either arm, to the last digit.",
    "one seed": "With one seed there is no interval and no verdict, only the two numbers.",
}


def compose(
    results: Results, folder: Path, figures: dict[str, list[Figure]], absent: dict[str, list[str]]
) -> Document:
    """The whole report. folder: the study's directory; figures, absent: by group, drawn already."""
    parts = [Section("What the data says", said(results)), Section("What was asked", _asked(results))]
    for group in results.groups:
        parts.append(
            Section(
                "Results" if len(results.groups) == 1 else group_title(group),
                _group(results, group, figures.get(group.name, []), absent.get(group.name, [])),
            )
        )
    if results.claims:
        parts.append(claims_section(results))
    parts += [
        Section("Do the factors act independently?", tuple(interactions(results))),
        Section("Best trade-offs (Pareto fronts)", tuple(fronts(results))),
        Section("Trials that did not finish", (*unfinished(results), trials(results))),
        Section("What was not measured", tuple(not_measured(results))),
        Section("How arms were compared", method(results)),
        Section("Machine", _machine(results)),
        Section("Commands", (Code("\n".join(commands(results, folder))),)),
    ]
    return Document(f"Study {results.name}", verdict(results), tuple(parts))


def verdict(results: Results) -> str:
    """The first things that the data says, and whether the study is whole."""
    done, all_ = finished(results.arms)
    if not done:
        ended: dict[str, int] = {}
        for arm in results.arms:
            for trial in arm.trials:
                ended[trial.status] = ended.get(trial.status, 0) + 1
        how = ", ".join(f"{count} {status(name)}" for name, count in ended.items())
        return f"Nothing to compare yet: no trial has come to its end ({how or 'none has begun'})."
    whole = (
        ""
        if results.complete
        else f"The study is not complete: {done} of {all_} trials have come to their end."
    )
    best = insights(results, "quality")[:1] if len(results.groups) == 1 else []
    judged = [counts(results)] if results.claims else []
    return " ".join(line for line in (*judged, *best, tally(results), whole) if line)


def tally(results: Results) -> str:
    """How many arms are better or worse than their baselines in each of the three metrics that matter the most."""
    told = []
    for key in PRIMARY:
        found: dict[str, int] = {}
        for arm in results.arms:
            if (c := comparison(arm, key)) is not None:
                word = c.verdict
                if word in ("lower", "higher", "exact"):
                    sign = c.relative if metric(key).better == "higher" else -c.relative
                    word = "better" if sign > 0 else "worse" if sign < 0 else "the same"
                found[word] = found.get(word, 0) + 1
        order = ("better", "worse", "the same", NO_DIFFERENCE, TOO_FEW)
        if found:
            told.append(
                f"{metric(key).label}: {', '.join(f'{found[word]} {word}' for word in order if word in found)}"
            )
    arms = sum(any(comparison(arm, key) for key in PRIMARY) for arm in results.arms)
    emulated = sum(arm.emulated for arm in results.arms if comparison(arm, SPEED))
    note = f" ({emulated} of them emulated)" if emulated else ""
    return f"{several(arms, 'arm')}{note} against their baselines: {'; '.join(told)}." if told else ""


def said(results: Results) -> tuple[Block, ...]:
    """What the data says: all of it for one group, the best of each of several, whose sections have the rest."""
    if len(results.groups) == 1:
        return tuple(_sentences(results)) or (Paragraph("Nothing yet: no trial has come to its end."),)
    lines = [
        f"{group_title(group)}: {sentence}"
        for group in results.groups
        for goal in ("quality", "speed")
        for sentence in insights(_part(results, group), goal)[:1]
    ]
    return (Bullets(tuple(lines)),) if lines else (Paragraph("Nothing yet: no trial has come to its end."),)


def _sentences(results: Results) -> list[Block]:
    """What one group says for each goal, every sentence once, the less important ones folded away."""
    seen: set[str] = set()
    blocks: list[Block] = []
    for goal in GOALS:
        fresh = [sentence for sentence in insights(results, goal) if sentence not in seen]
        seen.update(fresh)
        if fresh:
            blocks += [Paragraph(f"For {goal}:"), Bullets(tuple(fresh[:SENTENCES]))]
        if fresh[SENTENCES:]:
            blocks.append(
                Details(f"{len(fresh) - SENTENCES} more for {goal}", (Bullets(tuple(fresh[SENTENCES:])),))
            )
    return blocks


def _part(results: Results, group: Group) -> Results:
    """The study as if it had this group alone."""
    return replace(results, groups=[group], arms=arms_of(results, group))


def method(results: Results) -> tuple[Block, ...]:
    """How differences, intervals and verdicts came about, and what they do not say."""
    notes = [
        "Differences are paired: a trial is compared with its baseline's trial of the same seed, which has the same "
        "data order. A seed that one of the two lacks is left out.",
        "\u201cNo difference shown\u201d proves nothing: the interval says how large a difference may still be.",
    ]
    used = dict.fromkeys(c.method for arm in results.arms for c in arm.comparisons)
    notes += [METHODS.get(one, f"Method: {one}.") for one in used if one]
    if any(group.budget.endswith(TIMED) for group in results.groups):
        notes.append(
            "In a budget of time a slower arm sees fewer tokens, and decays its learning rate over the steps it has. "
            "Loss at the end is therefore what the time buys. Loss at equal tokens takes each arm on its way: "
            "a slower arm is later in its decay at that point than a faster one, which favours the slower."
        )
    if any(arm.emulated for arm in results.arms):
        notes.append(
            "Arms marked emulated compute a number format that this machine has no hardware for. Their loss is that of "
            "the format, their speed and energy are not."
        )
    notes.append("What was not measured is written so and never counted as zero.")
    return (Bullets((*notes, *results.notes)),)


def commands(results: Results, folder: Path) -> list[str]:
    """What a person may want to type now."""
    where = shlex.quote(str(folder))
    lines = [f"deskside report {where}", f"deskside dashboard {shlex.quote(str(folder.parent))}"]
    return lines if results.complete else [f"deskside study {where} --resume", *lines]


def _asked(results: Results) -> tuple[Block, ...]:
    blocks: list[Block] = [Paragraph(results.question)] if results.question else []
    done, all_ = finished(results.arms)
    rows = []
    for group in results.groups:
        many = len(results.groups) > 1
        factors = "; ".join(f"{factor.label}: {', '.join(factor.levels)}" for factor in group.factors)
        design = {"full": "every combination", "one-at-a-time": "the baseline, and each other level alone"}
        within = f", each {' and '.join(group.within)} with its own baseline" if group.within else ""
        rows += [
            *([("group", group_title(group))] if many else []),
            ("base", group.base),
            ("varied", factors or "nothing"),
            ("design", design.get(group.design, group.design) + within),
            ("arms", str(len(arms_of(results, group)))),
            ("budget of every arm", _budget(group)),
        ]
    rows += [
        ("seeds", ", ".join(str(seed) for seed in results.seeds)),
        ("trials", f"{done} of {all_} came to their end"),
        ("memory", f"{100 * results.memory_fraction:.0f} % of the device for every trial"),
        ("begun", results.created or "not recorded"),
        ("newest result", results.updated or "not recorded"),
    ]
    return (*blocks, Table(("what", "value"), tuple(rows)))


def _budget(group: Group) -> str:
    excluded = "; compile, evaluation and checkpoints are not counted" if group.budget.endswith(TIMED) else ""
    return (group.budget or "not recorded") + excluded


def _group(results: Results, group: Group, figures: list[Figure], absent: list[str]) -> tuple[Block, ...]:
    arms = arms_of(results, group)
    if not arms:
        return (Paragraph("This group has no arms."),)
    blocks: list[Block] = []
    if len(results.groups) > 1:
        factors = ", ".join(factor.label for factor in group.factors)
        blocks.append(
            Paragraph(f"Base {group.base}; varied: {factors or 'nothing'}; every arm had {_budget(group)}.")
        )
    blocks += [
        arms_table(results, group),
        Paragraph(
            "In brackets: intervals over seeds. Differences are against the baseline, paired by seed. Measured."
        ),
        *figures,
        *(_sentences(_part(results, group)) if len(results.groups) > 1 else ()),
    ]
    if absent:
        blocks.append(Bullets(tuple(absent)))
    return (*blocks, *numbers(results, group))


def _machine(results: Results) -> tuple[Block, ...]:
    if not results.machine:
        return (Paragraph("The machine is not recorded."),)
    used = sorted({trial.device for arm in results.arms for trial in arm.trials if trial.device})
    blocks: list[Block] = [
        Table(("what", "value", "source"), tuple(words.facts(results.machine, otherwise="measured")))
    ]
    return (*blocks, Paragraph(f"Devices used: {', '.join(used)}.")) if used else tuple(blocks)
