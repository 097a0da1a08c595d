"""The verdicts of a study as colored chips: what is shown to be better, and every arm against its baseline."""

from collections.abc import Sequence

from deskside.report.document import Chip, Table
from deskside.report.study_text import NOT_ENOUGH, by_baseline, estimate_text, reason_missing, short_labels
from deskside.run.record import number
from deskside.study.metrics import PRIMARY, SPEED, metric_named
from deskside.study.results import NO_DIFFERENCE, TOO_FEW, Arm, Comparison, Group, Results
from deskside.utils.format import percent, percent_digits, percent_range

NOT_SHOWN = "not shown"


def is_better(comparison: Comparison) -> bool | None:
    """Return whether an arm is shown to be better (True) or worse (False) than its baseline; None if neither is."""
    if comparison.verdict in (NO_DIFFERENCE, TOO_FEW) or not number(comparison.relative):
        return None
    return (comparison.relative > 0) == (metric_named(comparison.metric).better == "higher")


def best_shown(arms: Sequence[Arm], key: str) -> tuple[Arm, Comparison] | None:
    """Return the arm that is shown to improve a metric most against its baseline, or None if none is."""
    better = [(arm, c) for arm in arms if (c := arm.comparison(key)) is not None and is_better(c)]
    return max(better, key=lambda item: abs(item[1].relative), default=None)


def best_sentence(results: Results) -> str:
    """Return the largest shown improvement of all groups in each primary metric; "" if nothing was compared."""
    if not any(arm.comparison(key) for arm in results.arms for key in PRIMARY):
        return ""
    parts = []
    for key in PRIMARY:
        if (found := best_shown(results.arms, key)) is not None:
            arm, comparison = found
            emulated = ", emulated" if arm.emulated and key == SPEED else ""
            parts.append(f"{metric_named(key).label} {_signed(comparison.relative)} ({arm.label}{emulated})")
    if not parts:
        return "No arm is shown to be better than its baseline."
    return f"Largest improvements shown against a baseline: {'; '.join(parts)}."


def best_table(results: Results) -> Table:
    """Return a table of the arms shown to be best against their baseline: a row per group, a column per metric."""
    head = ("group", *(f"best {metric_named(key).label}" for key in PRIMARY))
    rows: list[tuple[str | Chip, ...]] = [
        (group.heading, *(_best_chip(results, group, key) for key in PRIMARY)) for group in results.groups
    ]
    return Table(head, rows, stacked=True)


def _best_chip(results: Results, group: Group, key: str) -> Chip:
    arms = results.arms_in(group)
    compared = [c for arm in arms if (c := arm.comparison(key)) is not None]
    found = best_shown(arms, key)
    if found is None:
        if not compared:
            return Chip("nothing compared", "open")
        return Chip(TOO_FEW if all(c.verdict == TOO_FEW for c in compared) else NOT_SHOWN, "open")
    arm, comparison = found
    names = short_labels(results, arms)
    emulated = ", emulated" if arm.emulated and key == SPEED else ""
    # With several baselines, the short label of an arm does not say which one it is compared with.
    label = arm.label if len(by_baseline(arms)) > 1 else names[arm.id]
    return Chip(_change(comparison), "better", f"{label}{emulated} {_interval(comparison)}".strip())


def arms_table(results: Results, arms: Sequence[Arm]) -> Table:
    """Return a table of arms against their baselines, with the values of each baseline above its arms."""
    names, groups = short_labels(results, arms), {group.name: group.heading for group in results.groups}
    rows: list[tuple[str | Chip, ...]] = []
    subheads = []
    for baseline_id, members in by_baseline(arms):
        baseline = results.arm(baseline_id)
        if baseline is not None:
            group = f"{groups.get(baseline.group, baseline.group)}: " if len(results.groups) > 1 else ""
            subheads.append(len(rows))
            rows.append((f"{group}{baseline.label}", *(_value(baseline, key) for key in PRIMARY)))
        rows += [
            (names[arm.id], *(comparison_chip(arm, key) for key in PRIMARY))
            for arm in members
            if arm.id != baseline_id
        ]
    head = ("arm, below its baseline", *(metric_named(key).label for key in PRIMARY))
    return Table(head, rows, subheads=subheads, stacked=True)


def comparison_chip(arm: Arm, key: str) -> Chip:
    """Return the verdict on an arm against its baseline in one metric, with the interval of the difference."""
    comparison = arm.comparison(key)
    if comparison is None or number(comparison.relative) is None:
        return Chip(reason_missing(arm) if arm.estimate(key) is None else "cannot be compared", "open")
    emulated = ", emulated" if arm.emulated and key == SPEED else ""
    detail = f"{_interval(comparison)}{emulated}"
    better = is_better(comparison)
    if better is not None:
        return Chip(_change(comparison), "better" if better else "worse", detail)
    if comparison.verdict == TOO_FEW:
        return Chip(TOO_FEW, "open", _signed(comparison.relative) + emulated)
    return Chip("the same" if comparison.relative == 0 else NOT_SHOWN, "open", detail)


def _value(arm: Arm, key: str) -> str:
    estimate = arm.estimate(key)
    if estimate is None:
        return reason_missing(arm)
    metric = metric_named(key)
    return f"{estimate_text(metric, estimate, with_interval=False)} {metric.unit}"


def _change(comparison: Comparison) -> str:
    """Return `+9.2 %, better`: the sign is that of the metric, so the word says whether that is good."""
    return f"{_signed(comparison.relative)}, {'better' if is_better(comparison) else 'worse'}"


def _signed(relative: float) -> str:
    return percent(relative, percent_digits(relative), signed=True)


def _interval(comparison: Comparison) -> str:
    low, high = number(comparison.relative_low), number(comparison.relative_high)
    if comparison.verdict == "exact":
        return "(exactly)"
    if low is None or high is None:
        return ""
    interval = percent_range(low, high, min(percent_digits(low, high), 2), signed=True)
    text = f"({interval})".replace(" ", "\u00a0")  # it stays on one line
    excludes_zero = low > 0 or high < 0
    return f"{text} {NOT_ENOUGH}" if comparison.verdict == NO_DIFFERENCE and excludes_zero else text
