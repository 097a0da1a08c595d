"""Write report.md, report.html and plots/*.png into the directory of a run or a study."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from deskside.report import run_figures, run_report
from deskside.report.document import ReportDocument, render_html, render_markdown
from deskside.run.record import read_run
from deskside.study import results as studies
from deskside.study.liveness import mark_interrupted
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_atomically


def is_study(folder: Path) -> bool:
    """Return whether a directory is a study's and not a run's."""
    return any((folder / name).is_file() for name in ("results.json", "study.json"))


def write_report(folder: Path) -> Path:
    """Write the report of a run or a study and return the path of report.html.

    Raises UsageError if `folder` is neither, RunError if the report cannot be written.
    """
    return (write_study(folder) if is_study(folder) else write_run(folder))[0]


def write_run(folder: Path) -> tuple[Path, list[str]]:
    """Write the report of a run; return the path of report.html and sentences about missing files."""
    record = read_run(folder)
    with _one_line_errors(folder):
        images, absent = run_figures.draw(record, folder / "plots")
        page = _write(run_report.compose(record, images, absent), folder)
    return page, record.problems


def write_study(folder: Path, claims: str | None = None, also: Sequence[Path] = ()) -> tuple[Path, list[str]]:
    """Write the report of a study; return the path of report.html and sentences about missing plots.

    `claims` is a file for the claims as Markdown, judged by this study and those in `also`.
    """
    from deskside.report import study_figures, study_report  # a run's report does not need them
    from deskside.report.study_claims import claims_markdown, with_others
    from deskside.study.results_io import JSON, PARQUET, write_parquet

    results = studies.read(folder)
    if claims and not results.claims:
        raise UsageError(f"--claims: {folder} speaks to no claim; run `deskside study claims`")
    table = folder / PARQUET
    if not table.is_file() or table.stat().st_mtime < (folder / JSON).stat().st_mtime:
        write_parquet(results, table)
    results = mark_interrupted(results, folder)  # after the table, which holds what was written
    with _one_line_errors(folder):
        images, absent = study_figures.draw(results, folder / "plots")
        page = _write(study_report.compose(results, folder, images, absent), folder)
    if claims:
        others = [mark_interrupted(studies.read(other), other) for other in also]
        with _one_line_errors(Path(claims)):
            write_atomically(Path(claims), claims_markdown(with_others(results, others)))
    return page, [sentence for sentences in absent.values() for sentence in sentences]


def _write(document: ReportDocument, folder: Path) -> Path:
    page = folder / "report.html"
    write_atomically(page.with_suffix(".md"), render_markdown(document, folder))
    write_atomically(page, render_html(document))
    return page


@contextlib.contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a RunError of one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{error.filename or path}: the report cannot be written: {reason}") from None
