"""`deskside facts list`, `add` and `schema`: measurements that owners of cards shared, which the planner reads."""

from __future__ import annotations

import datetime
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deskside.budget.shape import num_params
from deskside.cli.answer import print_answer
from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption
from deskside.cli.subcommands import run_subcommand
from deskside.utils.format import count, plural
from deskside.utils.printer import Printer

if TYPE_CHECKING:
    from deskside.measurements.reported import Reported


@dataclass(kw_only=True)
class FactsListOptions(JsonOption):
    """List the cards that have reports, or the reports of one card.

    Example: deskside facts list --gpu rtx4090
    """

    gpu: str | None = option("a GPU such as rtx4090; default: all", None, metavar="NAME")


@dataclass(kw_only=True)
class FactsAddOptions(JsonOption):
    """Check a report that deskside probe --share wrote, and let deskside plan use it for cards of its kind.

    In a checkout, the report goes to deskside/facts/reported.jsonl, to be committed. Otherwise it goes
    to reported.jsonl in $DESKSIDE_DATA, or in ~/.local/share/deskside.

    Example: deskside facts add my-card.json
    """

    file: str = option("file written by deskside probe --share", metavar="FILE", positional=True)


@dataclass(kw_only=True)
class SchemaOptions:
    """Print the JSON Schema of a report.

    Example: deskside facts schema > docs/card-report.schema.json
    """


COMMANDS: dict[str, Command[Any]] = {
    "list": Command("facts list", FactsListOptions),
    "add": Command("facts add", FactsAddOptions),
    "schema": Command("facts schema", SchemaOptions),
}


def run(argv: Sequence[str]) -> int:
    """Run `deskside facts` and return the exit code. Raises UsageError and RunError."""
    functions: dict[str, Callable[[Any], int]] = {"list": _list, "add": _add, "schema": _schema}
    about = "Measurements that owners of other cards shared."
    return run_subcommand(COMMANDS, functions, argv, "deskside facts", about)


def _list(options: FactsListOptions) -> int:
    from deskside.facts.gpus import find
    from deskside.measurements.reported import reported_cards, reported_for

    cards = reported_cards() if options.gpu is None else (find(options.gpu).name,)
    reports = {card: reported_for(card) for card in cards}
    if options.json:
        print_json(
            {card: [_as_json(entry) for entry in entries] for card, entries in reports.items()}, indent=1
        )
        return 0
    printer = Printer()
    if not any(reports.values()):
        about = "any card" if options.gpu is None else cards[0]
        printer.text(f"no reports of {about} yet; share yours with: deskside probe --share my-card.json")
        return 0
    if options.gpu is None:
        rows = [[card, str(len(found)), max(e.report.date for e in found)] for card, found in reports.items()]
        printer.table(["card", "reports", "newest"], rows, "lrl")
    else:
        _show_reports(printer, cards[0], reports[cards[0]])
    return 0


def _show_reports(printer: Printer, card: str, entries: Sequence[Reported]) -> None:
    """Print each report of a card, the speeds of all of them together, and the checks that did not work."""
    from deskside.measurements.reported import reported_speeds

    printer.text(f"{card}: {plural(len(entries), 'report')}", "strong")
    rows = []
    for entry in entries:
        report, bench = entry.report, entry.report.benchmark
        rates = ("", "") if bench is None else (
            f"{bench.matmul_flops / 1e12:.0f}", f"{bench.copy_bytes_per_second / 1e9:,.0f}"
        )  # fmt: skip
        limit = "" if report.power_limit_watts is None else f"{report.power_limit_watts:.0f}"
        rows.append([report.date, entry.digest[:8], *rates, limit, report.driver, report.torch])
    printer.table(
        ["date", "report", "BF16 TFLOP/s", "copy GB/s", "limit W", "driver", "torch"], rows, "llrrrll"
    )
    printer.text()
    rows = []
    for speed in reported_speeds(entries):
        point, (low, median, high) = speed.point, speed.tokens_per_second
        again = "" if point.activation_checkpointing == "none" else f", {point.activation_checkpointing}"
        rows.append(
            [
                count(num_params(point.config)),
                f"{point.sequence_length:,}",
                f"{point.micro_tokens:,}",
                f"{point.precision}, {point.optimizer}{again}",
                f"{median:,.0f}",
                f"{100 * (low / median - 1):+.0f} to {100 * (high / median - 1):+.0f} %"
                if low < high
                else "",
                str(speed.reports),
            ]
        )
    names = ["params", "row", "micro-batch", "options", "tokens/s", "range", "reports"]
    printer.table(names, rows, "rrrlrlr")
    failed = Counter(
        (name, verdict)
        for entry in entries
        for name, verdict in entry.report.doctor.items()
        if verdict != "works"
    )
    printer.text()
    for (name, verdict), number in failed.items():
        printer.text(f"doctor: {name}: {verdict} in {number} of {plural(len(entries), 'report')}")
    if not failed:
        printer.text("doctor: every check works in every report")


def _add(options: FactsAddOptions) -> int:
    from deskside.measurements.reported import add_report, reported_for

    entry, path = add_report(Path(options.file), datetime.datetime.now(datetime.UTC).date())
    if options.json:
        print_json({**_as_json(entry), "gpu": entry.gpu, "table": str(path)})
        return 0
    reports = plural(len(reported_for(entry.gpu)), "report")
    added = f"added {plural(len(entry.report.points), 'point')} of {entry.gpu} ({entry.digest})"
    print_answer(
        Printer(),
        f"{added}; it has {reports} now, which plans use where this card was not probed.",
        {"table": path},
        f"plan --gpu {shlex.quote(entry.gpu)} --hours 24",
    )
    return 0


def _schema(options: SchemaOptions) -> int:
    from deskside.measurements.card_report import json_schema

    print_json(json_schema(), indent=1)
    return 0


def _as_json(entry: Reported) -> dict[str, Any]:
    return {
        "digest": entry.digest,
        "added": entry.added,
        "part": entry.part,
        "report": entry.report.to_json(),
    }
