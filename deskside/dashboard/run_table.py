"""The rows of the table of runs, studies and searches, and its filters."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from deskside.budget.running_costs import Watts, wall_watts
from deskside.dashboard.searches import Search
from deskside.dashboard.word_filter import contains
from deskside.facts.power_and_prices import default_electricity_price
from deskside.run.record import (
    DAMAGED,
    MetricsLog,
    RunRecord,
    has_known_peak,
    machine_name,
    mapping,
    number,
    series,
    text,
)
from deskside.run.validation import validation_share
from deskside.study.metrics import QUALITY, SPEED, metric_named
from deskside.study.results import INTERRUPTED, Arm, Results, Trial, best_first
from deskside.utils.format import count, percent, plural, printable

RUN, TRIAL, STUDY, SEARCH = "run", "trial", "study", "search"
MFU_HELP = "model FLOPs utilization; of a study, its best arm; not of a CPU, whose peak is not known well"
SPARKLINE_POINTS = 32
SPARKLINE_SKIPPED = 0.05  # the first losses would flatten the rest of the line
# Results of objectives that have no bits per byte: (key in summary.json, how the table says it). The first counts.
OBJECTIVE_RESULTS = (
    ("val_accuracy", lambda share: f"{percent(share, 1)} of held-out pairs"),
    ("val_reward", lambda reward: f"mean reward {reward:.3f}"),
    ("val_margin", lambda margin: f"held-out margin {margin:.3f}"),  # KTO, with good and bad answers held out
    ("val_loss", lambda loss: f"held-out loss {loss:.4f}"),
)


@dataclass(frozen=True)
class TableRow:
    """A run, a trial, a study with the numbers of its best arm, or a search. Unknown numbers are None.

    Attributes:
        name: Its directory below the root of the dashboard, which identifies it.
        kind: `RUN`, `TRIAL`, `STUDY` or `SEARCH`.
        details: Size, precision and card, or what the study or search has.
        progress: Share of the steps, the trials or the hours that are over, of one that is not finished.
        bpb: The lowest validation bits per byte of a run; of a study, the lowest mean; of a search, the winner's mean
            on fresh seeds or, until then, the best trial's.
        last_bpb: Those of a run at its end or, until then, the newest.
        val_share: Share of the validation text that the final evaluation of a run read; None of one without it.
        seconds: Time of training; of a study, of all its trials; of a search, on the clock.
        dollars: Electricity at the wall by the measured power of the card (see `electricity`).
        created: ISO time of the start.
        losses: Training losses at evenly spaced steps; of a search, the lowest one after each trial.
    """

    name: str
    kind: str
    details: str
    status: str
    progress: float | None = None
    bpb: float | None = None
    last_bpb: float | None = None
    val_share: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    seconds: float | None = None
    dollars: float | None = None
    created: str = ""
    losses: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        """The name as the table shows it: of a trial without its study, which is in the details."""
        return self.name.rpartition("/")[2] if self.kind == TRIAL else self.name.removeprefix("runs/")


@dataclass(frozen=True)
class RowFilter:
    """Conditions for a row to be shown. An empty set of statuses or an empty text lets every row pass."""

    kinds: frozenset[str] = frozenset((RUN, STUDY, SEARCH))
    statuses: frozenset[str] = frozenset()
    search: str = ""

    def passes(self, row: TableRow) -> bool:
        """Return True if a row passes. The search is in the name and the details."""
        if row.kind not in self.kinds or (self.statuses and row.status not in self.statuses):
            return False
        return contains(f"{row.name} {row.details}", self.search)


def run_row(
    record: RunRecord, log: MetricsLog, lowest: float | None, live: bool, name: str, kind: str = RUN
) -> TableRow:
    """Return the row of a run. log: its newest rows, or evenly spaced ones. lowest: of all bits per byte in its log."""
    environment, summary = record.environment, record.summary

    def newest(key: str, metric: str = "") -> float | None:
        value, logged = number(summary.get(key)), series(log.rows, metric or key, "step")[1]
        return value if value is not None else logged[-1] if logged else None

    seconds, watts = newest("seconds"), series(log.rows, "watts", "step")[1]
    dollars = None
    if seconds is not None and watts:
        cards = number(mapping(environment.get("gpu")).get("count")) or 1
        dollars = electricity(sum(watts) / len(watts), seconds, int(cards))
    last_bpb = newest("val_bpb")
    step, total = newest("steps", "step"), record.total_steps
    status = "running" if live else "finished" if record.finished else INTERRUPTED
    if record.state == DAMAGED and not live:
        status = DAMAGED
    return TableRow(
        name=name,
        kind=kind,
        details=" · ".join([*([study_of(name)] if kind == TRIAL else []), *_details(record)]),
        status=status,
        progress=min(1.0, step / total)
        if status in ("running", INTERRUPTED) and step is not None and total
        else None,
        bpb=min((bpb for bpb in (lowest, last_bpb) if bpb is not None), default=None),
        last_bpb=last_bpb,
        val_share=validation_share(summary) if record.finished else None,
        tokens_per_second=newest("tokens_per_second"),
        mfu=newest("mfu") if has_known_peak(environment) else None,
        seconds=seconds,
        dollars=dollars,
        created=text(record.run.get("created")),
        losses=sparkline(series(log.rows, "loss", "step")[1]),
    )


def study_of(trial: str) -> str:
    """Return the name of the study of a trial: what its name has before "/runs/"."""
    return trial.rpartition("/runs/")[0]


def _details(record: RunRecord) -> list[str]:
    parameters = record.summary.get("parameters")
    total = number(mapping(parameters).get("total")) if isinstance(parameters, dict) else number(parameters)
    results = [
        words(value)
        for key, words in OBJECTIVE_RESULTS
        if (value := number(record.summary.get(key))) is not None
    ]
    precision = record.precision + (" emulated" if record.emulated else "")
    parts = [
        *([] if "val_bpb" in record.summary else results[:1]),
        f"{count(total)} parameters" if total else "",
        precision,
        machine_name(record.environment, ""),
    ]
    return [printable(part) for part in parts if part]


def study_row(results: Results, name: str) -> TableRow:
    """Return the row of a study."""
    trials = [trial for arm in results.arms for trial in arm.trials]
    ended = sum(trial.status not in ("pending", "running", INTERRUPTED) for trial in trials)
    best = next(iter(best_first(results.arms, metric_named(QUALITY))), None)
    running = any(trial.status == "running" for trial in trials)
    times = [time for trial in trials if (time := _trial_seconds(trial)) is not None]
    costs = [cost for trial in trials if (cost := _trial_dollars(trial)) is not None]

    def of_best(key: str) -> float | None:
        estimate = best.estimate(key) if best is not None else None
        return None if estimate is None else estimate.mean

    shown = f"best: {best.label}" if best is not None else ""
    parts = [plural(len(results.arms), "arm"), machine_name(results.machine, ""), shown]
    return TableRow(
        name=name,
        kind=STUDY,
        details=" · ".join(printable(part) for part in parts if part),
        status="finished" if results.complete else "running" if running else INTERRUPTED,
        progress=None if results.complete or not trials else ended / len(trials),
        bpb=of_best(QUALITY),
        tokens_per_second=of_best(SPEED),
        mfu=of_best("mfu") if has_known_peak(results.machine) else None,
        seconds=sum(times) if times else None,
        dollars=sum(costs) if costs else None,
        created=results.created or min((trial.started for trial in trials if trial.started), default=""),
        losses=_best_losses(best),
    )


def search_row(search: Search, name: str) -> TableRow:
    """Return the row of a search that can be read."""
    from deskside.study.search.outcome import settings_text  # not at the top: see searches.py

    outcome = search.outcome
    assert outcome is not None
    best = [loss for _, loss in outcome.best_so_far]
    bpb = outcome.winner_mean if outcome.winner_mean is not None else best[-1] if best else None
    settings = settings_text(outcome.settings)
    parts = [plural(len(outcome.trials), "trial"), f"best: {settings}" if settings else ""]
    ended = search.status == "finished"
    return TableRow(
        name=name,
        kind=SEARCH,
        details=" · ".join(printable(part) for part in parts if part),
        status=search.status,
        progress=None if ended else search.share_spent,
        bpb=bpb,
        seconds=search.spent_seconds,
        created=search.created,
        losses=tuple(best),
    )


def _best_losses(best: Arm | None) -> tuple[float, ...]:
    trials = best.finished() if best is not None else []
    return sparkline(series(trials[0].curve, "loss", "tokens")[1]) if trials else ()


def _trial_seconds(trial: Trial) -> float | None:
    return trial.metrics.get("total_seconds", trial.metrics.get("seconds"))


def _trial_dollars(trial: Trial) -> float | None:
    seconds, watts = _trial_seconds(trial), trial.metrics.get("watts")
    return None if seconds is None or watts is None else electricity(watts, seconds, 1)


def electricity(card_watts: float, seconds: float, cards: int) -> float:
    """Return the price in dollars of the electricity of a computer with `cards` cards of this measured mean power.

    The rest of the computer, the losses of its supply and the price are those of `deskside plan`.
    """
    wall = wall_watts(Watts(card_watts, card_watts, card_watts, "measured", ""), cards)
    return wall.expected / 1000 * seconds / 3600 * default_electricity_price().usd


def cost_note() -> str:
    """Return where the price behind the column of costs comes from."""
    price = default_electricity_price()
    return (
        f"electricity of the whole computer at ${price.usd:.2f} per kWh ({price.label}); the power of the card is "
        "measured, that of the rest is modelled as in deskside plan; a report counts the card alone"
    )


def sparkline(losses: Sequence[float]) -> tuple[float, ...]:
    """Return at most `SPARKLINE_POINTS` evenly spaced losses, without the steep beginning of a long curve."""
    start = int(len(losses) * SPARKLINE_SKIPPED)
    rest = losses[start:]
    if len(rest) <= SPARKLINE_POINTS:
        return tuple(rest)
    return tuple(rest[round(i * (len(rest) - 1) / (SPARKLINE_POINTS - 1))] for i in range(SPARKLINE_POINTS))


def statuses(rows: Iterable[TableRow]) -> list[str]:
    """Return every status that occurs, the one that changes first."""
    found = {row.status for row in rows}
    return sorted(found, key=lambda status: (status != "running", status))


def to_csv(rows: Sequence[TableRow]) -> str:
    """Return the rows as CSV with all digits. Unknown numbers are empty."""
    names = [field.name for field in fields(TableRow) if field.name != "losses"]
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return file.getvalue()


def columns() -> list[dict[str, str]]:
    """Return the columns of the table: key of a cell, title and explanation."""
    bpb, speed = metric_named(QUALITY), metric_named(SPEED)
    return [
        {"key": "name", "title": "name", "help": "the directory; a click opens the page"},
        {
            "key": "status",
            "title": "status",
            "help": "with the share that is done: of steps, trials or hours",
        },
        {
            "key": "bpb",
            "title": "best bits per byte",
            "help": f"the lowest {bpb.label} of a run; of a study, its best arm; of a search, the best so far",
        },
        {"key": "tokens_per_second", "title": "tokens/s", "help": f"{speed.about}; of a study, its best arm"},
        {"key": "mfu", "title": "MFU", "help": MFU_HELP},
        {
            "key": "seconds",
            "title": "time",
            "help": "of training, in a study of all trials; of a search, on the clock",
        },
        {"key": "dollars", "title": "cost", "help": cost_note()},
        {
            "key": "losses",
            "title": "loss",
            "help": "training loss without its steep beginning; of a search, best so far",
        },
        {"key": "created", "title": "started", "help": "time of the start, UTC"},
    ]
