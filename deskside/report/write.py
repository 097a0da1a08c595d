"""Write report.md, report.html and plots/*.png into the directory of a run or a study."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from deskside.report import html, markdown
from deskside.report.content import compose
from deskside.report.document import Document
from deskside.report.figures import draw
from deskside.run.record import read_run
from deskside.study import results as studies
from deskside.study.liveness import as_it_is
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_atomically


def is_study(folder: Path) -> bool:
    """Whether a directory is that of a study and not of a run."""
    return any((folder / name).is_file() for name in ("results.json", "study.json"))


def write_report(folder: Path) -> Path:
    """Write the report of a run or a study and return the path of report.html.

    Raises UsageError when `folder` is neither, RunError when it cannot be written.
    """
    return (write_study(folder) if is_study(folder) else write_run(folder))[0]


def write_run(folder: Path) -> tuple[Path, list[str]]:
    record = read_run(folder)
    with _told(folder):
        figures, absent = draw(record, folder / "plots")
        page = _write(compose(record, figures, absent), folder)
    return page, record.missing


def write_study(folder: Path, claims: str | None = None, also: Sequence[Path] = ()) -> tuple[Path, list[str]]:
    from deskside.report import study, study_figures  # a run's report needs none of it
    from deskside.report.study_claims import claims_markdown, with_others
    from deskside.study.results_io import JSON, PARQUET, write_parquet

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
            write_atomically(Path(claims), claims_markdown(with_others(results, others)))
    return page, [sentence for sentences in absent.values() for sentence in sentences]


def _write(document: Document, folder: Path) -> Path:
    page = folder / "report.html"
    write_atomically(page.with_suffix(".md"), markdown.render(document, folder))
    write_atomically(page, html.render(document))
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
