"""`deskside report`: write the report of a run, a study or a search."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption
from deskside.run.expert_load import newest_load
from deskside.run.record import read_metrics
from deskside.utils.console import say
from deskside.utils.errors import UsageError


@dataclass(kw_only=True)
class ReportOptions(JsonOption):
    """Write the report of a run, a study or a search: report.md, report.html (one file) and plots/*.svg.

    Examples:
      deskside report runs/demo
      deskside report studies/matrix16 --claims claims.md
    """

    run: str = option(
        "directory of the run, study or search, such as runs/demo or studies/matrix16",
        metavar="RUN|STUDY|SEARCH",
        positional=True,
    )
    claims: str | None = option(
        "also write the study's verdicts on published claims to this Markdown file", None, metavar="FILE"
    )
    also: str | None = option("with --claims: further studies whose trials are used", None, metavar="DIR,...")


COMMAND = Command("report", ReportOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside report` and return the exit code. Raises UsageError and RunError."""
    options = COMMAND.parse(argv)
    from deskside.report.write import is_search, is_study, write_run, write_search, write_study

    folder = Path(options.run)
    if options.claims and not is_study(folder):
        raise UsageError(
            f"--claims: {folder} is not a study; give the directory of a study that tests claims"
        )
    if options.claims and (
        Path(options.claims).is_dir() or not Path(options.claims).absolute().parent.is_dir()
    ):
        raise UsageError(f"--claims {options.claims}: cannot be a file; give one in a folder that exists")
    if options.also and not options.claims:
        raise UsageError("--also: has no effect without --claims FILE; add it, or leave --also out")
    also = [Path(name) for name in (options.also or "").split(",") if name]
    missing: list[str] = []
    if is_search(folder):
        page = write_search(folder)
    elif is_study(folder):
        page, missing = write_study(folder, options.claims, also)
    else:
        page, missing = write_run(folder)
    for sentence in missing:  # about parts of the report that are missing
        say(sentence)
    load = None if is_study(folder) or is_search(folder) else newest_load(read_metrics(folder).rows)
    if options.json:
        plots = sorted(str(path) for path in (folder / "plots").glob("*.svg"))
        output: dict[str, Any] = {
            "report": str(page),
            "markdown": str(page.with_suffix(".md")),
            "plots": plots,
        }
        results = sorted(folder.glob("results.*")) if is_study(folder) else []
        if results:
            output["results"] = {path.suffix[1:]: str(path) for path in results}
        if load is not None:
            output["experts"] = {"step": load.step, "load_imbalance": load.imbalance}
        print_json({**output, "missing": missing})
    else:
        print(page)  # alone on standard output, for $(deskside report RUN)
        if load is not None:
            say(
                f"experts: the largest load is {load.imbalance:.2f} times the even share, mean of {len(load.load_LE)} "
                f"layers at step {load.step:,} (measured); {load.dropped_text}"
            )
    return 0
