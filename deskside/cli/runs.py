"""`deskside runs`: list runs, studies and searches, or compare runs, in the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption, check_directory
from deskside.dashboard import file_cache
from deskside.dashboard.run_details import SCORED, key_numbers, newest_values, option_rows
from deskside.dashboard.run_table import RUN, SEARCH, STUDY, TRIAL, TableRow
from deskside.dashboard.scan import scan
from deskside.run.record import RunRecord
from deskside.utils.errors import UsageError
from deskside.utils.format import count, duration
from deskside.utils.printer import Printer

DEFAULT_LIMIT = 20
RESULTS = ("bits/byte", "tokens/s", "MFU", "time")


@dataclass(kw_only=True)
class RunsOptions(JsonOption):
    """List the runs, studies and searches below a directory, newest first; or compare runs.

    A comparison has a column for each run: its results, then the options in which the runs differ.

    Examples:
      deskside runs
      deskside runs studies/matrix16 --trials --limit 50
      deskside runs runs/small runs/large
    """

    paths: tuple[str, ...] = option(
        "a directory to search, or the runs to compare; default: here",
        (),
        metavar="DIR|RUN...",
        positional=True,
    )
    trials: bool = option("also list the runs of studies and searches", False)
    limit: int = option("list at most this many; 0: all", DEFAULT_LIMIT, metavar="N")


COMMAND = Command("runs", RunsOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside runs` and return the exit code. Raises UsageError."""
    options = COMMAND.parse(argv)
    paths = [Path(path) for path in options.paths] or [Path()]
    if options.limit < 0:
        raise UsageError(f"--limit: {options.limit} is no number of rows; give 0 for all")
    for path in paths:
        check_directory(path, "give a directory that holds runs, or directories of runs")
    if len(paths) > 1 or scan(paths[0], 0).runs:
        return _compare(paths, options.json)
    return _list(paths[0], options)


def _list(root: Path, options: RunsOptions) -> int:
    """List what is below a directory."""
    kinds = {RUN, STUDY, SEARCH, *([TRIAL] if options.trials else [])}
    result = scan(root)
    rows = [row for row in file_cache.rows(result, root) if row.kind in kinds]
    shown = rows[: options.limit or None]
    if options.json:
        print_json([asdict(row) for row in shown], indent=1)
        return 0
    printer = Printer()
    for path, problem in result.problems:
        printer.text(f"{path}: {problem}", "attention")
    if not rows:
        where = "in this folder" if root == Path() else f"below {root}"
        printer.text(f"There are no runs {where}. The first one: deskside go --preset demo --hours 0.05")
        return 0
    cells = []
    for row in shown:
        progress = "" if row.progress is None else f" {row.progress:.0%}"
        cells.append([row.title, f"{row.status}{progress}", *_results(row), row.created[:10]])
    printer.table(["name", "status", *RESULTS, "started"], cells, "ll" + "r" * len(RESULTS) + "l")
    if any(_partial(row) for row in shown):
        printer.text("\n* of a part of the validation text: compare such runs to see how much", "quiet")
    if len(shown) < len(rows):
        printer.text(f"\n{len(rows) - len(shown)} older ones: --limit 0 lists all.", "quiet")
    return 0


def _compare(paths: Sequence[Path], as_json: bool) -> int:
    """Show the results of runs side by side, and the options in which they differ. Raises UsageError."""
    records: dict[str, RunRecord] = {}
    rows: dict[str, TableRow] = {}
    numbers: dict[str, dict[str, str | None]] = {}
    found = {run.path.resolve(): run for path in paths for run in scan(path, 0).runs}
    live = file_cache.live_runs(tuple(found.values()))
    for path in paths:
        run = found.get(path.resolve())
        if run is None:
            raise UsageError(f"{path}: is not the directory of a run; compare runs, or list one directory")
        name = str(path)  # as it was given, because runs of two directories can have the same name
        records[name] = file_cache.brief(run.path)
        row = rows[name] = replace(file_cache.row(run.path, run.path in live, Path(), RUN), name=name)
        logged = file_cache.newest_metrics(run.path).rows
        numbers[name] = key_numbers(row, newest_values([*logged, records[name].summary]))
    shares = {name: row.val_share for name, row in rows.items() if row.val_share is not None}
    if min(shares.values(), default=1.0) < 1:
        numbers = {
            name: {SCORED: "all" if name in shares else None, **of_run} for name, of_run in numbers.items()
        }
    differences = option_rows(records, only_different=len(records) > 1)
    if as_json:
        print_json({"runs": [asdict(row) for row in rows.values()], "options": differences}, indent=1)
        return 0
    printer = Printer()
    _columns(printer, {name: {"status": row.status, **numbers[name]} for name, row in rows.items()})
    if len({f"{share:.2f}" for share in shares.values()}) > 1:
        printer.text("\nTheir results are not of the same part of the validation text.", "attention")
    if problems := [f"{name}: {problem}" for name, record in records.items() for problem in record.problems]:
        printer.text("\n".join(["", *problems]), "attention")
    if len(records) == 1:
        printer.text("\nIts report: deskside report " + next(iter(records)))
    elif len(known := [name for name, record in records.items() if record.config]) < 2:
        printer.text("\nTheir configurations cannot be compared.")
    elif not differences:
        printer.text("\nTheir configurations are equal.")
    else:
        printer.heading("Options in which they differ")
        _columns(printer, {name: {row["option"]: row[name] for row in differences} for name in known})
    return 0


def _partial(row: TableRow) -> bool:
    return row.val_share is not None and row.val_share < 1


def _results(row: TableRow) -> list[str]:
    """Return the cells of `RESULTS`, empty where nothing was measured."""
    return [
        "" if row.bpb is None else f"{row.bpb:.4f}{'*' if _partial(row) else ''}",
        "" if row.tokens_per_second is None else count(row.tokens_per_second),
        "" if row.mfu is None else f"{row.mfu:.0%}",
        "" if row.seconds is None else duration(row.seconds),
    ]


def _columns(printer: Printer, values: Mapping[str, Mapping[str, str | None]]) -> None:
    """Print a table with a column for each run. values: run -> label -> value."""
    labels = list(dict.fromkeys(label for of_run in values.values() for label in of_run))
    cells = [[label, *(of_run.get(label) or "" for of_run in values.values())] for label in labels]
    printer.table(["", *values], cells, "l" + "r" * len(values))
