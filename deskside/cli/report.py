"""`deskside report RUN|STUDY`: write the report of a run or a study."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from deskside.cli.parser import parse
from deskside.report.write import is_study, write_run, write_study
from deskside.utils.errors import UsageError


@dataclass
class ReportOptions:
    """Write the report of a run or a study: report.md, report.html (one file) and plots/*.png.

    Example: deskside report runs/demo
    """

    run: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN|STUDY", help="its directory, such as runs/demo or studies/matrix16"),
    ]
    claims: Annotated[
        str | None,
        tyro.conf.arg(metavar="FILE", help="also write what a study says of published claims, as Markdown"),
    ] = None
    also: Annotated[
        str | None,
        tyro.conf.arg(metavar="DIR,...", help="with --claims: more studies whose trials count as well"),
    ] = None
    json: bool = False
    """print the paths as JSON"""


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code; raises UsageError and RunError."""
    options = parse(ReportOptions, argv, "deskside report")
    folder = Path(options.run)
    if options.claims and not is_study(folder):
        raise UsageError(f"--claims: {folder} is no study; give the directory of one that tests claims")
    if options.also and not options.claims:
        raise UsageError("--also: counts for --claims alone; give --claims FILE, or leave it out")
    also = [Path(name) for name in (options.also or "").split(",") if name]
    page, missing = write_study(folder, options.claims, also) if is_study(folder) else write_run(folder)
    for sentence in missing:
        print(sentence, file=sys.stderr)
    if options.json:
        plots = sorted(str(path) for path in (folder / "plots").glob("*.png"))
        paths = {"report": str(page), "markdown": str(page.with_suffix(".md")), "plots": plots}
        data = (
            {path.suffix[1:]: str(path) for path in sorted(folder.glob("results.*"))}
            if is_study(folder)
            else {}
        )
        print(json.dumps({**paths, **({"results": data} if data else {}), "missing": missing}))
    else:
        print(page)
    return 0
