"""`deskside records`: the lowest bits per byte within a time limit on one card; repeat one, or add one."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deskside.cli.answer import print_answer
from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption
from deskside.cli.subcommands import run_subcommand
from deskside.facts.records import FILE, LossRecord, corpora, find_record, records
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.format import plural
from deskside.utils.printer import Printer, Row

if TYPE_CHECKING:
    from deskside.records.score import ScoredRun
    from deskside.records.verdict import ReplayVerdict

DATA_HELP = "prepared data of the record's corpus"


@dataclass(kw_only=True)
class RecordsListOptions(JsonOption):
    """List the lowest bits per byte that were measured on one card, by corpus and time limit.

    Examples:
      deskside records
      deskside records list --json
    """


@dataclass(kw_only=True)
class ReplayOptions(JsonOption):
    """Train a record's command again with its seeds, score the models with transformers, and compare.

    Started again after an interruption, it continues where it was. The exit code is 1 if the result is worse
    than the interval of the record.

    Examples:
      deskside records replay h200-english-5min-fp8-stages --data data/english
      deskside records replay h200-english-5min-default --data data/english --seed 1,2
    """

    name: str = option("name of a record", metavar="NAME", positional=True)
    data: str = option(DATA_HELP, metavar="DIR")
    seed: str | None = option("seeds to train; default: the record's", None, metavar="N,...")
    out: str | None = option("folder of the runs; default: records/NAME", None, metavar="DIR")


@dataclass(kw_only=True)
class RecordsAddOptions(JsonOption):
    """Score finished runs of one command, and add them to the records of a checkout.

    The runs may differ only in their seed. They were started by deskside train with --schedule.clock training and
    a length of 5m or 60m, on the data of one corpus.

    Example:
      deskside records add runs/a runs/b runs/c --name h200-english-5min --corpus english --data data/english
      --commit 1a2b3c4d --raw docs/data/2026-11-24-records
    """

    runs: tuple[str, ...] = option("finished runs", metavar="RUN", positional=True)
    name: str = option("name of the record", metavar="NAME")
    corpus: str = option("a corpus of the file of records", metavar="NAME")
    data: str = option(DATA_HELP, metavar="DIR")
    commit: str = option("commit of deskside that trained the runs", metavar="HASH")
    raw: str = option("folder in the repository with the raw data", metavar="DIR")
    note: str = option("what a reader must know in addition", "", metavar="TEXT", may_be_empty=True)
    file: str | None = option(f"default: {FILE} of this checkout", None, metavar="FILE")


COMMANDS: dict[str, Command[Any]] = {
    "list": Command("records list", RecordsListOptions),
    "replay": Command("records replay", ReplayOptions),
    "add": Command("records add", RecordsAddOptions),
}


def run(argv: Sequence[str]) -> int:
    """Run `deskside records` and return the exit code. Raises UsageError and RunError."""
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["list", *argv]
    functions: dict[str, Callable[[Any], int]] = {"list": _list, "replay": _replay, "add": _add}
    about = "The lowest bits per byte within a time limit on one card."
    return run_subcommand(COMMANDS, functions, argv, "deskside records", about)


def train_command(record: LossRecord) -> str:
    """Return the command of a record's first seed, to be shown and pasted."""
    return shlex.join(["train", *record.arguments(f"data/{record.corpus}", record.seeds[0])])


def _list(options: RecordsListOptions) -> int:
    if options.json:
        print_json([_as_json(record) for record in records()], indent=1)
        return 0
    from deskside.records.verdict import spread

    printer, rows, title = Printer(), list[Row](), ""
    for record in sorted(records(), key=lambda r: (r.corpus, r.minutes, r.card, r.mean)):
        heading = f"{corpora()[record.corpus].title}, {record.minutes:g} minutes, {record.card}"
        if heading != title:
            rows.append(heading)
            title = heading
        mean = spread(record)
        interval = "-" if mean.low is None else f"{mean.low:.4f} to {mean.high:.4f}"
        rows.append([f"  {record.name}", f"{mean.mean:.4f}", interval, str(mean.n), record.date])
    printer.table(["", "bits per byte", "95 % interval", "seeds", "date"], rows, "lrlrl")
    printer.text(
        "\nTraining time, without compilation; scored by transformers on the exported model.", "quiet"
    )
    printer.text("To repeat one:")
    printer.command(f"deskside records replay {records()[0].name} --data data/{records()[0].corpus}")
    return 0


def _as_json(record: LossRecord) -> dict[str, Any]:
    from deskside.records.verdict import spread

    mean = spread(record)
    return {
        **asdict(record),
        "mean": mean.mean,
        "low": mean.low,
        "high": mean.high,
        "command": f"deskside {train_command(record)}",
        "corpus": asdict(corpora()[record.corpus]),
    }


def _replay(options: ReplayOptions) -> int:
    from deskside.facts.gpus import find_device
    from deskside.records.replay import replay
    from deskside.records.verdict import judge
    from deskside.utils.machine import this_machine

    record = find_record(options.name)
    seeds = record.seeds if options.seed is None else _seeds(options.seed)
    machine = this_machine()
    known = find_device(machine.card, machine.memory_bytes)
    card = known.name if known else machine.card
    if card != record.card:
        say(f"this machine has {card}, the record {record.card}: the result will not be comparable with it")
    folder = Path(options.out or Path("records") / record.name)
    found = replay(record, corpora()[record.corpus], options.data, folder, seeds, say)
    cards = {run.card for run in found}
    verdict = judge(
        record, [run.bits_per_byte for run in found], cards.pop() if len(cards) == 1 else "several cards"
    )
    if options.json:
        print_json(
            {
                "record": _as_json(record),
                "out": str(folder),
                "runs": [asdict(run) for run in found],
                "verdict": asdict(verdict),
            },
            indent=1,
        )
    else:
        _show_replay(record, found, verdict, folder)
    return int(verdict.kind == "worse")


def _seeds(given: str) -> tuple[int, ...]:
    """Return the seeds in --seed. Raises UsageError."""
    words = given.split(",")
    if not all(word.strip().isdecimal() for word in words) or len(set(map(int, words))) < len(words):
        raise UsageError(f"--seed {given}: give different numbers separated by commas, such as 1,2,3")
    return tuple(map(int, words))


def _show_replay(
    record: LossRecord, found: Sequence[ScoredRun], verdict: ReplayVerdict, folder: Path
) -> None:
    printer = Printer()
    recorded = dict(zip(record.seeds, record.bits_per_byte, strict=True))
    rows: list[Row] = [
        [
            str(run.seed),
            f"{run.bits_per_byte:.4f}",
            f"{recorded[run.seed]:.4f}" if run.seed in recorded else "-",
            f"{run.seconds:.0f}",
            f"{run.tokens / 1e6:,.1f}M",
        ]
        for run in found
    ]
    rows.append(["mean", f"{verdict.mean:.4f}", f"{record.mean:.4f}", "", ""])
    printer.table(["seed", "bits per byte", "record", "seconds", "tokens"], rows, "lrrrr")
    interval = f"{verdict.low:.4f} to {verdict.high:.4f}" if verdict.low is not None else ""
    answers = {
        "within": f"Repeated: the mean lies within {interval}, where 95 % of such means lie.",
        "better": f"Better than the record: the mean lies below {interval}, where 95 % of such means lie.",
        "worse": f"Not repeated: the mean lies above {interval}, where 95 % of such means lie.",
        "no interval": f"The record has one seed and so no interval; the mean differs from it by "
        f"{verdict.mean - record.mean:+.4f}.",
        "not comparable": f"Not comparable: the record is of {record.card}, these runs of {found[0].card}.",
    }
    print_answer(printer, answers[verdict.kind], {"runs": folder})


def _add(options: RecordsAddOptions) -> int:
    from deskside.measurements.reported import PACKAGE, is_checkout
    from deskside.records.entry import append_record, check_addable, record_of_runs
    from deskside.run.record import read_run

    if options.file is None and not is_checkout(PACKAGE.parent):
        raise UsageError(f"--file is missing: this deskside is not a checkout; give the {FILE} of one")
    file = Path(options.file) if options.file is not None else PACKAGE / "facts" / FILE
    check_addable(options.name, file)
    record, _ = record_of_runs(
        [read_run(Path(path)) for path in options.runs],
        options.corpus,
        options.data,
        name=options.name,
        commit=options.commit,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        raw=options.raw,
        note=options.note,
    )
    append_record(record, file)
    if options.json:
        print_json({"file": str(file), "record": asdict(record)}, indent=1)
        return 0
    text = f"added {record.name}: {record.mean:.4f} bits per byte over {plural(len(record.seeds), 'seed')}."
    print_answer(Printer(), text, {"file": file}, "records")
    return 0
