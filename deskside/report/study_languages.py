"""The languages in the report of a study: each arm in each language, its experts by language, and samples."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from deskside.report.charts import draw_forest
from deskside.report.document import Block, Bullets, Chip, Details, Image, Table
from deskside.report.run_experts import draw_languages
from deskside.report.run_report import samples
from deskside.report.study_text import NOT_MEASURED, estimate_text, short_labels
from deskside.report.study_verdicts import comparison_chip
from deskside.report.svg import save
from deskside.run.expert_load import load_by_language
from deskside.run.record import mapping, number, objects
from deskside.study.metrics import QUALITY, metric_named
from deskside.study.results import Arm, Results
from deskside.study.stats.languages import MEAN, ByLanguage, Records, by_language
from deskside.utils.format import UNKNOWN

NOTE = (
    "Bits per byte at the end of the training: mean over seeds (measured, lower is better). Differences are from the "
    "arm's baseline, paired by seed, with intervals at 95 %; a verdict holds among all languages of the arm (Benjamini "
    "and Hochberg). The mean weighs all languages equally; the validation loss of the study weighs them by bytes. "
    "Scripts differ in bytes per character, so compare arms in one language, not languages with each other."
)


def blocks(results: Results, records: Records, folder: Path) -> list[Block]:
    """Return the section about languages, and draw its plots in `folder`. It is empty without several languages.

    records: What the finished trials have written. Raises OSError if the folder cannot be written.
    """
    found: list[Block] = []
    for group in results.groups:
        languages = by_language(results, group, records)
        if languages is None:
            continue
        arms = results.arms_in(group)
        found += [f"{group.heading}:"] if len(results.groups) > 1 else []
        found.append(_table(results, arms, languages, records))
        found += [Bullets(languages.missing)] if languages.missing else []
        images = [*_differences(results, arms, languages, folder), *_experts(results, arms, records, folder)]
        found += [*images, *_samples(arms, records)]
    return [NOTE, *found] if found else []


def _table(results: Results, arms: Sequence[Arm], languages: ByLanguage, records: Records) -> Table:
    """Return a table of languages by arm, with the differences of each arm from its baseline."""
    labels = short_labels(results, arms) if len({arm.baseline for arm in arms}) == 1 else {}
    head = ["language"]
    for arm in arms:
        label = labels.get(arm.id, arm.label)
        head += [arm.label] if arm.id == arm.baseline else [label, f"{label}: difference"]
    epochs = [
        mapping(records[trial.run].summary.get("mixture_epochs"))
        for arm in arms
        for trial in arm.finished()
        if trial.run in records
    ]
    has_epochs = any(not parts.keys().isdisjoint(languages.languages) for parts in epochs)
    rows: list[list[str | Chip]] = []
    for language in (*languages.languages, MEAN):
        row: list[str | Chip] = [language]
        for arm in arms:
            one = languages.arms.get((arm.id, language))
            row.append(
                NOT_MEASURED
                if one is None
                else estimate_text(metric_named(QUALITY), one.estimate(QUALITY), with_interval=False)
            )
            if arm.id != arm.baseline:
                row.append("" if one is None else comparison_chip(one, QUALITY))
        if has_epochs:
            times = [value for parts in epochs if (value := number(parts.get(language))) is not None]
            unread = "" if language == MEAN else UNKNOWN
            ends = dict.fromkeys(f"{end:.1f}" for end in (min(times), max(times))) if times else [unread]
            row.append(" to ".join(ends))
        rows.append(row)
    return Table([*head, *(["epochs trained"] if has_epochs else [])], rows, stacked=True)


def _differences(
    results: Results, arms: Sequence[Arm], languages: ByLanguage, folder: Path
) -> Iterator[Image]:
    """Draw the difference of each arm from its baseline in every language."""
    for arm in arms:
        baseline = results.arm(arm.baseline)
        if baseline is None or baseline is arm:
            continue
        # With the same baseline for all, the plot has no heading above each language.
        rows = [
            replace(one, baseline=baseline.id)
            for language in languages.languages
            if (one := languages.arms.get((arm.id, language))) is not None
        ]
        title = f"{arm.label} against {baseline.label}, by language"
        plot = draw_forest(results, rows, QUALITY, title, "languages")
        if not isinstance(plot, str):
            path = folder / f"languages_{results.arms.index(arm) + 1}.svg"
            save(plot.figure, path)
            yield Image(path, title, f"{title}. {plot.caption}")


def _experts(results: Results, arms: Sequence[Arm], records: Records, folder: Path) -> Iterator[Image]:
    """Draw the load of the experts by language, for the first seed of each arm that has it."""
    for arm in arms:
        loads = (
            (trial.seed, load)
            for trial in arm.finished()
            if trial.run in records and len(load := load_by_language(records[trial.run])) > 1
        )
        for seed, load in islice(loads, 1):
            figure, title, caption = draw_languages(load)
            path = folder / f"expert_languages_{results.arms.index(arm) + 1}.svg"
            save(figure, path)
            yield Image(path, title, f"{arm.label}, seed {seed}: {caption}")


def _samples(arms: Sequence[Arm], records: Records) -> Iterator[Details]:
    """Yield the folded samples of the first seed of each arm that has any."""
    for arm in arms:
        trials = (
            t for t in arm.finished() if t.run in records and objects(records[t.run].summary.get("samples"))
        )
        for trial in islice(trials, 1):
            yield Details(f"Samples of {arm.label}, seed {trial.seed}", samples(records[trial.run]))
