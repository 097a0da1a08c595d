"""`deskside report RUN`: writes report.md, report.html and plots/*.png into the run directory."""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from deskside.config.commandline import parse
from deskside.errors import RunError
from deskside.report import html, markdown
from deskside.report.content import compose
from deskside.report.document import Document
from deskside.report.figures import draw
from deskside.report.rundir import RunRecord, read_run


@dataclass
class ReportOptions:
    """Write the report of a run: report.md, report.html (one file) and plots/*.png.

    Example: deskside report runs/demo
    """

    run: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN", help="directory of the run, such as runs/demo"),
    ]
    json: bool = False
    """print the paths as JSON"""


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code; raises UsageError and RunError."""
    options = parse(ReportOptions, argv, "deskside report")
    record, page = _write(Path(options.run))
    for sentence in record.missing:
        print(sentence, file=sys.stderr)
    if options.json:
        plots = sorted(str(path) for path in (record.path / "plots").glob("*.png"))
        paths = {"report": str(page), "markdown": str(page.with_suffix(".md")), "plots": plots}
        print(json.dumps({**paths, "missing": record.missing}))
    else:
        print(page)
    return 0


def write_report(run_dir: Path) -> Path:
    """Write the report of a run and return the path of report.html.

    Raises UsageError when `run_dir` is no run directory, RunError when it cannot be written.
    """
    return _write(run_dir)[1]


def _write(run_dir: Path) -> tuple[RunRecord, Path]:
    record = read_run(run_dir)
    page = run_dir / "report.html"
    try:
        figures, absent = draw(record, run_dir / "plots")
        document: Document = compose(record, figures, absent)
        _replace(run_dir / "report.md", markdown.render(document, run_dir))
        _replace(page, html.render(document))
    except OSError as error:
        where = error.filename or run_dir
        raise RunError(f"{where}: the report cannot be written: {error.strerror or error}") from None
    return record, page


def _replace(path: Path, content: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(content, "utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
