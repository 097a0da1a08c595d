"""The report of a search: the answer, the best so far by time, every trial, and how it was searched."""

import re
import shlex
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, StrMethodFormatter

from deskside.report.canvas import new_figure
from deskside.report.chart_data import log_ticks
from deskside.report.colors import BLUE, GREY, ORANGE
from deskside.report.document import (
    Block,
    CodeBlock,
    Details,
    Image,
    KeyNumber,
    KeyNumbers,
    ReportDocument,
    Section,
    Table,
)
from deskside.report.search_chart_data import (
    ABOUT_IMPORTANCE,
    LOSS_TITLE,
    SettingSlice,
    best_so_far,
    finished,
    importances,
    slices,
)
from deskside.report.svg import save
from deskside.study.results import PLAN
from deskside.study.search.outcome import Outcome, SearchTrial, settings_text, trial_status_text
from deskside.study.search.search_folder import WINNER
from deskside.study.search.suggestions import FILE, METHODS, REDUCTION_FACTOR, RUNGS
from deskside.utils.format import elapsed, percent, plural, tick_text

HEIGHT = 2.9  # inches
MAX_SHOWN = 15  # trials; all of them are folded


def draw(outcome: Outcome, folder: Path) -> tuple[list[Image], list[Image]]:
    """Draw the best so far, and the losses by each setting, as SVG files in `folder`; none if no trial finished.

    Raises OSError.
    """
    data = best_so_far(outcome, "time")
    if not data.points:
        return [], []
    figure, axes = new_figure("Best so far", HEIGHT)
    times, losses = zip(*data.points, strict=True)
    axes.plot(times, losses, "o", color=GREY, label="trial")
    axes.step(times, [best for _, best in data.best], where="post", color=BLUE, label="best so far")
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=10.5)
    about = "Trials that finished, at the time when they ended. All values are measured."
    axes.set_xlim(left=0)
    best = _saved(figure, axes, data.x_title, folder / "best_so_far.svg", "Best so far", about)
    return [best], [_draw_slice(one, outcome, folder) for one in slices(outcome)]


def _draw_slice(data: SettingSlice, outcome: Outcome, folder: Path) -> Image:
    figure, axes = new_figure(data.key, HEIGHT)
    axes.plot(data.x, data.losses, "o", color=GREY, label="trial")
    for number, color, marker, label in ((0, BLUE, "s", "default"), (outcome.winner, ORANGE, "D", "best")):
        if number in data.numbers:
            at = data.numbers.index(number)
            axes.plot(data.x[at], data.losses[at], marker, color=color, label=label, markersize=8)
    if data.choices:
        axes.set_xticks(range(len(data.choices)), data.choices)
        axes.set_xlim(-0.5, len(data.choices) - 0.5)
    elif data.ticks:
        axes.set_xticks(data.ticks, [tick_text(tick) for tick in data.ticks])
    elif data.log:
        axes.set_xscale("log")
        axes.set_xticks(log_ticks((min(data.x), max(data.x))))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=10.5)
    path = folder / f"slice_{re.sub(r'[^a-z0-9]+', '_', data.key.lower())}.svg"
    about = "Trials that finished; their other settings differ too."
    return _saved(figure, axes, data.key, path, f"Loss by {data.key}", about)


def _saved(figure: Figure, axes: Axes, x_title: str, path: Path, title: str, caption: str) -> Image:
    axes.set_xlabel(x_title, fontsize=10.5)
    axes.set_ylabel(LOSS_TITLE, fontsize=10.5)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.3f}"))
    save(figure, path)
    return Image(path, title, caption)


def compose(outcome: Outcome, folder: Path, best: list[Image], by_setting: list[Image]) -> ReportDocument:
    """Return the report of the search in `folder`. best, by_setting: what `draw` returned."""
    edge: list[Block] = [outcome.edge_text] if outcome.edge_text else []
    sections = [Section("What the trials found", [*edge, *best, *by_setting, *_trial_blocks(outcome)])]
    if shares := importances(outcome):
        rows = [[key, percent(share, 0)] for key, share in shares]
        sections.append(Section("What mattered", [ABOUT_IMPORTANCE, Table(["setting", "share"], rows)]))
    sections.append(Section("How it was searched", _method_blocks(outcome)))
    sections.append(Section("Next commands", [CodeBlock("\n".join(_commands(outcome, folder)))]))
    return ReportDocument(f"Search {outcome.name}", outcome.answer, sections, _opening(outcome))


def _opening(outcome: Outcome) -> list[Block]:
    if outcome.default_mean is None or outcome.winner_mean is None:
        return []
    numbers = [
        KeyNumber(
            "default", f"{outcome.default_mean:.4f}", f"bits per byte on {outcome.confirmed_on}, fresh seeds"
        ),
        KeyNumber("winner", f"{outcome.winner_mean:.4f}", settings_text(outcome.settings)),
    ]
    if (
        outcome.confirmed is not None
        and outcome.confirmed.low is not None
        and outcome.confirmed.high is not None
    ):
        interval = f"95 %: {outcome.confirmed.low:+.4f} to {outcome.confirmed.high:+.4f}"
        numbers.append(KeyNumber("difference", f"{outcome.confirmed.difference:+.4f}", interval))
    return [KeyNumbers(numbers)]


def _trial_blocks(outcome: Outcome) -> list[Block]:
    best = sorted(finished(outcome), key=lambda one: (one.loss or 0.0, one.number))[:MAX_SHOWN]
    blocks: list[Block] = [_table(best)] if best else ["No trial finished."]
    return [*blocks, Details(f"Every trial ({len(outcome.trials)})", [_table(outcome.trials)], printed=True)]


def _table(trials: list[SearchTrial]) -> Table:
    rows = [
        [
            str(one.number),
            "" if one.loss is None else f"{one.loss:.4f}",
            trial_status_text(one.status),
            settings_text(one.settings) + (" (default)" if one.number == 0 else ""),
            "" if one.elapsed is None else elapsed(one.elapsed),
            one.reason,
        ]
        for one in trials
    ]
    return Table(
        ["trial", "bits per byte", "status", "settings", "ended after", "reason"], rows, stacked=True
    )


def _method_blocks(outcome: Outcome) -> list[Block]:
    counts = ", ".join(f"{number} {trial_status_text(status)}" for status, number in outcome.counts().items())
    how = (
        "at random"
        if outcome.sampler == "random"
        else f"by {METHODS.get(outcome.sampler, outcome.sampler)} (Optuna)"
    )
    lines: list[Block] = [
        f"Trials were chosen {how}; {outcome.proxy}. {plural(len(outcome.trials), 'suggestion')}: {counts}. The "
        f"search used {elapsed(outcome.spent_seconds)} of {elapsed(3600 * outcome.hours)}; "
        f"{outcome.devices} ran at once.",
        "The planner checked every trial before it started. One that might not fit was not run.",
    ]
    if outcome.prune:
        lines.append(
            f"Successive halving: at 1/{RUNGS} and 1/2 of its training time, a trial went on only if its loss was in "
            f"the better 1/{REDUCTION_FACTOR} of those that had reached the same time (arXiv 1810.05934)."
        )
    lines.append(
        "The loss of the best trial is the lowest of many noisy ones, so it flatters the winner. The difference above "
        "is from fresh seeds, pair by pair, with Student's interval."
    )
    return lines


def _commands(outcome: Outcome, folder: Path) -> list[str]:
    """Return the commands that a reader may need next."""
    path = shlex.quote(str(folder))
    winner = [f"deskside train {path}/{WINNER}"] if (folder / WINNER).exists() else []
    confirm = [f"deskside report {path}/confirm"] if (folder / "confirm" / PLAN).exists() else []
    further = [f"deskside {outcome.further_command}"] if outcome.further_command else []
    return [*winner, *further, *confirm, f"optuna-dashboard sqlite:///{path}/{FILE}"]
