"""Loss parity of precision recipes: the same run with several recipes, and the gap of each to BF16.

    python -m benchmarks.parity run --data DIR --out OUT [--arms bf16,fp8-delayed,...] [--tokens 105M] [--preset 124m]
        [--gpus all|0,1|cpu] [--seeds 1,2] [--limit-seconds 560] [--runs DIR] [--batch.tokens 131072 ...]
    python -m benchmarks.parity report FOLDER [FOLDER...] [--reference bf16] [--plots DIR] [--document FILE.md]

`run` starts an ordinary `deskside train` per arm and seed, one per GPU at a time, with the same data in the same order.
An arm is the name of a recipe, followed by options of `precision` separated by colons
(`fp8-delayed:head=fp8:keep_last=0`). `bf16@2` runs that arm only with seed 2. All other configuration keys apply to all
arms. Every evaluation uses the whole validation split, with the weights in BF16. OUT receives parity.jsonl, with one
line per finished arm and its curve, and metrics.zip, with the metrics.jsonl and the log of every arm. --limit-seconds
is a hard limit: runs that are still active are stopped and recorded as stopped.

`report` merges folders, prints the table and draws the curves. With --document it writes both between the lines
`<!-- parity:begin -->` and `<!-- parity:end -->` of that file.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import parity_jobs, parity_plots, parity_results, parity_run
from deskside.utils.errors import UsageError

ARMS = "bf16,fp8-delayed,fp8-delayed:head=fp8,nvfp4,nvfp4-4o6,nvfp4-unbiased,nvfp4-eden,fp8-nvfp4"
BEGIN, END = "<!-- parity:begin -->", "<!-- parity:end -->"


def parser() -> argparse.ArgumentParser:
    """Return the parser of both commands."""
    main_parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = main_parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train the arms", allow_abbrev=False)
    run.add_argument("--data", type=Path, required=True, help="a prepared dataset")
    run.add_argument("--out", type=Path, required=True, help="folder for parity.jsonl and metrics.zip")
    run.add_argument("--arms", default=ARMS, help="separated by commas")
    run.add_argument("--tokens", default="105M", help="training tokens per arm")
    run.add_argument("--preset", default="124m")
    run.add_argument(
        "--gpus", default="all", help="all, cpu, or numbers of visible GPUs, separated by commas"
    )
    run.add_argument("--seeds", default="1", help="separated by commas")
    run.add_argument("--limit-seconds", type=float, help="stop all runs after this many seconds")
    run.add_argument(
        "--runs", type=Path, help="keep the run directories in this folder; default: delete them"
    )
    report = commands.add_parser("report", help="table and curves", allow_abbrev=False)
    report.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folders with a parity.jsonl")
    report.add_argument("--reference", default="bf16", help="the arm that gaps are relative to")
    report.add_argument("--plots", type=Path, help="folder of the PNG files; default: the first FOLDER")
    report.add_argument("--document", type=Path, help="Markdown file with the two marker lines")
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every arm finished, 1 if one did not, 2 for wrong usage."""
    began = time.monotonic()
    options, rest = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        if options.command == "report":
            if rest:
                raise UsageError(f"unexpected argument {rest[0]}")
            return report(options)
        return run(options, rest, began)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace, rest: Sequence[str], began: float) -> int:
    """Train all arms. Print a line for each one that ends, then the table. Raises UsageError."""
    keys = parity_jobs.parse_keys(rest)
    seeds = [parity_jobs.parse_integer(seed, "--seeds") for seed in options.seeds.split(",")]
    jobs = parity_jobs.jobs(options.preset, options.arms, seeds, options.tokens, options.data, keys)
    slots = parity_jobs.slots(options.gpus)
    deadline = None if options.limit_seconds is None else began + options.limit_seconds
    rows = parity_run.run_jobs(jobs, slots, options.out, options.runs, deadline)
    reference = "bf16" if any(row["arm"] == "bf16" for row in rows) else jobs[0].arm
    arms = parity_results.averages(rows, reference)
    print("\n" + parity_results.table(arms) + "\n\n" + parity_results.notes(rows, arms, reference))
    missing = len(jobs) - len(rows)
    if missing:
        print(f"{missing} of {len(jobs)} arms were not started within the limit")
    return int(missing > 0 or any(row["status"] != "finished" for row in rows))


def report(options: argparse.Namespace) -> int:
    """Print and draw the results in the folders. Raises UsageError."""
    rows = parity_results.read(options.folders)
    arms = parity_results.averages(rows, options.reference)
    text = parity_results.table(arms) + "\n\n" + parity_results.notes(rows, arms, options.reference)
    folder = options.plots or options.folders[0]
    images = parity_plots.draw(arms, options.reference, folder)
    print(text + "\n\n" + "\n".join(str(path) for path, _ in images))
    if options.document:
        base = options.document.resolve().parent
        links = [f"![{title}]({os.path.relpath(path.resolve(), base)})" for path, title in images]
        insert(options.document, "\n\n".join([text, *links]))
    return int(any(row["status"] != "finished" for row in rows))


def insert(document: Path, text: str) -> None:
    """Put `text` between the marker lines of the document. Raises UsageError if they are missing."""
    if not document.is_file():
        raise UsageError(f"{document}: there is no such file")
    old = document.read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(END) < old.index(BEGIN):
        raise UsageError(f"{document}: needs one line {BEGIN} and, below it, one line {END}")
    head, _, tail = old.partition(BEGIN)
    tail = tail.partition(END)[2]
    document.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
