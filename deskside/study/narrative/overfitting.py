"""Findings on overfitting in a study: the arms whose validation loss rose after its lowest value.

The trend test of train/loop/overfitting.py needs seven evaluations, and a trial of a few minutes has about five, but an
arm has several seeds. An arm overfits if, in every finished seed, the last evaluation is more than `MARGIN` above the
lowest one, and the training loss fell between the two. If the training loss rose as well, the arm is unstable instead.

Only evaluations of the same text are compared, which are those during the training: `Trial.curve` includes the final
evaluation only if the others read the whole validation split too. In 97 trials of earlier studies, with five
evaluations each, the last one was always the lowest (docs/statistics.md), so a rise of `MARGIN` is not noise.

Each language of the validation text is judged by the same rule: one with little text may have overfitted long before
the loss of the whole text rises.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from deskside.budget.loss import MAX_EPOCHS
from deskside.run.record import LANGUAGE_METRIC, mapping, number, read_metrics, series
from deskside.study.narrative.findings import MAX_NAMES, has_time_budget, listed
from deskside.study.results import Arm, Group, Results, Trial
from deskside.study.stats.languages import Records
from deskside.utils.format import percent, span

MARGIN = 0.01
MAX_PARTS = 12  # languages, or parts of the data, that one sentence names
Points = Sequence[tuple[float, float]]  # (tokens, loss) in order of tokens


@dataclass(frozen=True)
class Rise:
    """The rise of a validation loss after its lowest value, in bits per byte.

    share: Part of the training after which the loss was lowest, by tokens.
    """

    lowest: float
    share: float
    last: float


LanguageRises = dict[str, list[Rise | None]]  # language -> rise in each finished seed


def overfit_arms(results: Results) -> list[Arm]:
    """Return the arms that overfit."""
    return [arm for arm in results.arms if _rises(arm)]


def overfitting(results: Results, records: Records) -> list[str]:
    """Return findings on overfitting: in which arms and languages, on which text, what it means and what to do.

    Each one begins with the heading of its group if there are several groups. Without overfitting there are none.
    """
    several = len(results.groups) > 1
    return [
        f"{group.heading}: {line}" if several else line
        for group in results.groups
        for line in _group_findings(results, group, records)
    ]


def _group_findings(results: Results, group: Group, records: Records) -> list[str]:
    arms = results.arms_in(group)
    overfit = [(arm, rises) for arm in arms if (rises := _rises(arm))]
    by_language = [(arm, _language_rises(arm, records)) for arm in arms]
    affected = [
        (arm, languages)
        for arm, languages in by_language
        if any(arm is other for other, _ in overfit) or any(all(rises) for rises in languages.values())
    ]
    if not affected:
        return []
    lines = [_arms_finding(overfit)] if overfit else []
    lines += _language_findings(affected)
    found = [records[trial.run] for arm, _ in affected for trial in arm.finished() if trial.run in records]
    repeated = _repeated([mapping(record.summary.get("mixture_epochs")) for record in found])
    if repeated:
        lines.append(
            f"Text that was read more than {MAX_EPOCHS} times, beyond which it is worth less than new text (arXiv "
            f"2305.16264): {repeated} times."
        )
    if found and all("best_step" in record.summary for record in found):
        return lines  # they are compared with the weights of their lowest loss (checkpoint.keep_best)
    advice = ["fewer minutes" if has_time_budget(group) else "a smaller budget", "more text"]
    for name in ("language_temperature", "source_temperature"):
        values = [number(mapping(record.config.get("data")).get(name)) for record in found]
        highest = max((value for value in values if value is not None), default=1.0)
        if repeated and highest > 1:
            advice.append(f"--data.{name} closer to 1 (here {highest:g})")
    lines.append(
        "The arms are compared after that, so a difference between them is as much one of how strongly they overfit as "
        f"of how well they learn. To compare how well they learn, use {', '.join(advice[:-1])} or {advice[-1]}."
    )
    return lines


def _arms_finding(overfit: Sequence[tuple[Arm, list[Rise]]]) -> str:
    """Return the finding about the arms that overfit on the whole validation text."""
    details = []
    for arm, rises in overfit[:MAX_NAMES]:
        shares = sorted(round(100 * rise.share) for rise in rises)
        details.append(
            f"{arm.label}: lowest {fmean(rise.lowest for rise in rises):.4f} at {span((shares[0], shares[-1]))} % of "
            f"the training, last {fmean(rise.last for rise in rises):.4f}"
        )
    return (
        f"Overfitting in {_quoted(arm for arm, _ in overfit)}: in every seed, the validation loss rose by more than "
        f"{percent(MARGIN, 0)} after its lowest value while the training loss fell ({'; '.join(details)}; bits per "
        "byte at the evaluations during the training, means over seeds)."
    )


def _language_findings(by_language: Sequence[tuple[Arm, LanguageRises]]) -> list[str]:
    """Return a finding for each set of languages that rose in every seed of the same arms."""
    arms_of: dict[tuple[tuple[str, ...], tuple[str, ...]], list[tuple[Arm, LanguageRises]]] = {}
    for arm, languages in by_language:
        rose = tuple(language for language, rises in languages.items() if all(rises))
        others = tuple(language for language, rises in languages.items() if not any(rises))
        if rose:
            arms_of.setdefault((rose, others), []).append((arm, languages))
    lines = []
    for (rose, others), members in arms_of.items():
        sizes = {language: _mean_rise(languages[language] for _, languages in members) for language in rose}
        most = max(sizes, key=lambda language: sizes[language])
        line = (
            f"Overfitting by language in {_quoted(arm for arm, _ in members)}: in every seed, the loss of "
            f"{_some(rose)} rose by more than {percent(MARGIN, 0)} after its lowest value ({most} most, by "
            f"{percent(sizes[most], 0)} on average)"
        )
        mixed = [name for name in members[0][1] if name not in (*rose, *others)]
        line += f"; that of {_some(mixed)} did in some seeds" if mixed else ""
        lines.append(f"{line}; that of {_some(others)} did in no seed." if others else f"{line}.")
    return lines


def _mean_rise(found: Iterable[Sequence[Rise | None]]) -> float:
    return fmean(rise.last / rise.lowest - 1 for rises in found for rise in rises if rise is not None)


def _rises(arm: Arm) -> list[Rise]:
    """Return the rise of every finished seed of an arm that overfits; an empty list for other arms."""
    found = [_rise(trial, _points(trial, "val_bpb")) for trial in arm.finished()]
    rises = [rise for rise in found if rise is not None]
    return rises if len(rises) == len(found) else []


def _language_rises(arm: Arm, records: Records) -> LanguageRises:
    """Return the rises in each language, without the seeds that have no evaluations in it."""
    found: LanguageRises = {}
    for trial in arm.finished():
        record = records.get(trial.run)
        languages = mapping(record.summary.get("val_languages")) if record is not None else {}
        if record is None or not languages:
            continue
        rows = read_metrics(record.path).rows
        for language in languages:
            tokens, losses = series(rows, LANGUAGE_METRIC + language, "tokens")
            if tokens:
                points = list(zip(tokens, losses, strict=True))
                found.setdefault(language, []).append(_rise(trial, points))
    return found


def _rise(trial: Trial, evaluations: Points) -> Rise | None:
    """Return how a trial's validation loss rose after its lowest value while the training loss fell, or None."""
    if not evaluations:
        return None
    lowest_at, lowest = min(evaluations, key=lambda point: point[1])
    last_at, last = evaluations[-1]
    # Its own halves are compared, because a mean before the lowest value may include the steep fall at the start.
    between = [loss for tokens, loss in _points(trial, "loss") if lowest_at < tokens <= last_at]
    half = len(between) // 2
    if not 0 < (1 + MARGIN) * lowest < last or not half or fmean(between[half:]) >= fmean(between[:half]):
        return None
    return Rise(lowest, lowest_at / max(last_at, trial.metrics.get("tokens", 0.0)), last)


def _points(trial: Trial, key: str) -> Points:
    """Return (tokens, value) of the points of a trial's curve that have this value."""
    pairs = [(number(point.get("tokens")), number(point.get(key))) for point in trial.curve]
    return [(tokens, value) for tokens, value in pairs if tokens is not None and value is not None]


def _repeated(epochs: Sequence[dict[str, object]]) -> str:
    """Return how often each repeated part of the data was read, the most often read first; "" if none was."""
    read: dict[str, list[float]] = {}
    for parts in epochs:
        for part, value in parts.items():
            if (times := number(value)) is not None:
                read.setdefault(part, []).append(times)
    often = sorted((part for part in read if max(read[part]) > MAX_EPOCHS), key=lambda part: -max(read[part]))
    return _some([f"{part} {span((round(min(read[part])), round(max(read[part]))))}" for part in often])


def _quoted(arms: Iterable[Arm]) -> str:
    return _some([f"\u201c{arm.label}\u201d" for arm in arms], MAX_NAMES)


def _some(names: Sequence[str], most: int = MAX_PARTS) -> str:
    """Return "a, b and c", or "a, b and 3 more"; "" without names."""
    shown = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return listed(shown) if shown else ""
