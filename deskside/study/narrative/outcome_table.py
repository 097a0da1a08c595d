"""Terminal output at the end of a study: each arm's loss, its difference from the baseline, and the verdict."""

from rich.text import Text

from deskside.study.metrics import BY_KEY
from deskside.study.narrative.findings import GOALS, baseline_name, findings_by_group, unfinished
from deskside.study.results import EXACT, NO_DIFFERENCE, TOO_FEW, Arm, Comparison, Results, best_first
from deskside.utils.format import percent, percent_digits, percent_range
from deskside.utils.printer import Cell, Printer

# How a verdict that begins so is shown.
STYLES = {"shown: better": "good", "shown: worse": "bad", "no": "attention"}
METRIC = BY_KEY[GOALS["quality"]]


def print_outcome(results: Results, printer: Printer) -> None:
    """Print the best arm of every group and a table of its arms, best first, if a trial has finished."""
    findings = findings_by_group(results, "quality")
    for group, sentences in findings:
        if len(results.groups) > 1:
            printer.heading(group.title or group.name)
        arms = [arm for arm in results.arms_in(group) if METRIC.key in arm.estimates]
        if arms:
            _show_table(printer, results, arms)
        printer.text(sentences[0], "strong")  # the best arm, or why nothing was measured
    if findings:
        for line in unfinished(results):
            printer.text(line)


def verdict_text(comparison: Comparison) -> str:
    """Return "shown: better", "shown: worse", "no difference shown", "equal", or "not shown (1 seed)"."""
    if comparison.verdict == TOO_FEW:
        return "not shown (1 seed)"
    if comparison.verdict == EXACT and comparison.relative == 0:
        return "equal"
    if comparison.verdict == NO_DIFFERENCE:
        return comparison.verdict
    better = (comparison.relative > 0) == (METRIC.better == "higher")
    return "shown: better" if better else "shown: worse"


def _show_table(printer: Printer, results: Results, arms: list[Arm]) -> None:
    baselines = {arm.baseline for arm in arms}
    rows: list[list[Cell]] = []
    for arm in best_first(arms, METRIC):
        comparison = next((c for c in arm.comparisons if c.metric == METRIC.key), None)
        is_baseline = arm.id == arm.baseline
        if is_baseline:
            verdict = "baseline"
        elif comparison is None:
            verdict = "not compared"
        else:
            verdict = verdict_text(comparison)
        style = next((style for start, style in STYLES.items() if verdict.startswith(start)), "")
        if comparison is not None and len(baselines) > 1:
            verdict += f" (vs. {baseline_name(arm, results.arm(comparison.baseline), comparison.baseline)})"
        mean = METRIC.text(arm.estimates[METRIC.key].mean)
        rows.append([arm.label, mean, _difference_text(comparison), Text(verdict, style)])
    printer.table(["arm", METRIC.unit, "difference (95 %)", "verdict"], rows, "lrrl")


def _difference_text(comparison: Comparison | None) -> str:
    """Return the relative difference with its interval, such as "+1.20 % (+0.40 to +2.00 %)", or ""."""
    if comparison is None:
        return ""
    relative, low, high = comparison.relative, comparison.relative_low, comparison.relative_high
    if low is None or high is None or low == high:
        return percent(relative, percent_digits(relative), signed=True)
    digits = percent_digits(low, high)
    return f"{percent(relative, digits, signed=True)} ({percent_range(low, high, digits, signed=True)})"
