"""`deskside report RUN|STUDY`: writes report.md, report.html and plots/*.png into the directory of a run or a study."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from deskside.config.commandline import parse
from deskside.errors import RunError, UsageError
from deskside.report import html, markdown
from deskside.report.content import compose
from deskside.report.document import Document
from deskside.report.figures import draw
from deskside.report.rundir import read_run
from deskside.study import results as studies
from deskside.study.life import as_it_is


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
    page, missing = _write_study(folder, options.claims, also) if is_study(folder) else _write_run(folder)
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


def is_study(folder: Path) -> bool:
    """Whether a directory is that of a study and not of a run."""
    return any((folder / name).is_file() for name in ("results.json", "study.json"))


def write_report(folder: Path) -> Path:
    """Write the report of a run or a study and return the path of report.html.

    Raises UsageError when `folder` is neither, RunError when it cannot be written.
    """
    return (_write_study(folder) if is_study(folder) else _write_run(folder))[0]


def _write_run(folder: Path) -> tuple[Path, list[str]]:
    record = read_run(folder)
    with _told(folder):
        figures, absent = draw(record, folder / "plots")
        page = _write(compose(record, figures, absent), folder)
    return page, record.missing


def _write_study(
    folder: Path, claims: str | None = None, also: Sequence[Path] = ()
) -> tuple[Path, list[str]]:
    from deskside.report import study, study_figures  # a run's report needs none of it
    from deskside.report.study_claims import claims_markdown, with_others
    from deskside.study.outcome import JSON, PARQUET, write_parquet

    results = studies.read(folder)
    if claims and not results.claims:
        raise UsageError(f"--claims: {folder} speaks to no claim; run `deskside study claims`")
    table = folder / PARQUET
    if not table.is_file() or table.stat().st_mtime < (folder / JSON).stat().st_mtime:
        write_parquet(results, table)
    results = as_it_is(results, folder)  # the table holds what was written
    with _told(folder):
        figures, absent = study_figures.draw(results, folder / "plots")
        page = _write(study.compose(results, folder, figures, absent), folder)
    if claims:
        others = [as_it_is(studies.read(other), other) for other in also]
        with _told(Path(claims)):
            _replace(Path(claims), claims_markdown(with_others(results, others)))
    return page, [sentence for sentences in absent.values() for sentence in sentences]


def _write(document: Document, folder: Path) -> Path:
    page = folder / "report.html"
    _replace(page.with_suffix(".md"), markdown.render(document, folder))
    _replace(page, html.render(document))
    return page


@contextlib.contextmanager
def _told(where: Path) -> Iterator[None]:
    """Raises RunError in one line when something cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{error.filename or where}: the report cannot be written: {error.strerror or error}"
        ) from None


def _replace(path: Path, content: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(content, "utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
