"""Terminal output at the end of a study: each arm's loss, its difference from the baseline, and the verdict."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deskside.study.narrative.findings import GOALS, baseline_name, findings_by_group, unfinished
from deskside.study.results import EXACT, NO_DIFFERENCE, TOO_FEW, Arm, Comparison, Results
from deskside.study.stats.metrics import BY_KEY
from deskside.utils.format import percent, percent_digits, percent_range

MAX_WIDTH = 100
METRIC = BY_KEY[GOALS["quality"]]


def print_outcome(results: Results, console: Console | None = None) -> None:
    """Print the best arm of every group and a table of its arms, best first, if a trial has finished."""
    console = console or Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    findings = findings_by_group(results, "quality")
    for group, sentences in findings:
        if len(results.groups) > 1:
            console.print(Text(f"\n{group.title or group.name}", style="bold"))
        console.print(Text(sentences[0]))  # the best arm, or why nothing was measured
        arms = [arm for arm in results.arms_in(group) if METRIC.key in arm.estimates]
        if arms:
            console.print(_table(results, arms))
    if findings:
        for line in unfinished(results):
            console.print(Text(line))


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


def _table(results: Results, arms: list[Arm]) -> Table:
    sign = 1 if METRIC.better == "higher" else -1
    baselines = {arm.baseline for arm in arms}
    table = Table(box=None, pad_edge=False)
    table.add_column("arm" if len(baselines) > 1 else "arm (* baseline)", ratio=5)
    table.add_column(METRIC.unit, justify="right", no_wrap=True)
    table.add_column("difference (95 %)", justify="right", ratio=4)
    table.add_column("verdict", ratio=4)
    for arm in sorted(arms, key=lambda arm: -sign * arm.estimates[METRIC.key].mean):
        comparison = next((c for c in arm.comparisons if c.metric == METRIC.key), None)
        is_baseline = arm.id == arm.baseline
        if is_baseline:
            verdict = "baseline"
        elif comparison is None:
            verdict = "not compared"
        else:
            verdict = verdict_text(comparison)
        if comparison is not None and len(baselines) > 1:
            verdict += f" (vs. {baseline_name(arm, results.arm(comparison.baseline), comparison.baseline)})"
        mean = METRIC.text(arm.estimates[METRIC.key].mean)
        cells = [f"{arm.label}{' *' if is_baseline else ''}", mean, _difference_text(comparison), verdict]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _difference_text(comparison: Comparison | None) -> str:
    """Return the relative difference with its interval, such as "+1.20 % (+0.40 to +2.00 %)", or ""."""
    if comparison is None:
        return ""
    relative, low, high = comparison.relative, comparison.relative_low, comparison.relative_high
    if low is None or high is None or low == high:
        return percent(relative, percent_digits(relative), signed=True)
    digits = percent_digits(low, high)
    return f"{percent(relative, digits, signed=True)} ({percent_range(low, high, digits, signed=True)})"
