"""Write report.md, report.html and plots/*.svg into the directory of a run, a study or a search.

For a study, it also brings results.parquet up to date, and writes the claims file if asked.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from deskside.report import run_experts, run_figures, run_languages, run_report
from deskside.report.document import Image, ReportDocument, render_html, render_markdown
from deskside.run.record import read_run
from deskside.study import results as studies
from deskside.study.liveness import mark_interrupted
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_atomically


def is_study(folder: Path) -> bool:
    """Return True if a directory holds a study."""
    return any((folder / name).is_file() for name in (studies.PLAN, studies.RESULTS))


def is_search(folder: Path) -> bool:
    """Return True if a directory holds a search."""
    return (folder / "search.json").is_file()


def write_report(folder: Path) -> Path:
    """Write the report of a run, a study or a search, and return the path of report.html.

    Raises UsageError if `folder` holds none of them, RunError if the report cannot be written.
    """
    if is_search(folder):
        return write_search(folder)
    return (write_study(folder) if is_study(folder) else write_run(folder))[0]


def write_run(folder: Path) -> tuple[Path, list[str]]:
    """Write the report of a run. Return the path of report.html and a sentence for each missing or damaged file."""
    record = read_run(folder)
    with _oserror_as_run_error(folder):
        images, missing = run_figures.draw(record, folder / "plots")
        of_languages = run_languages.draw(record, folder / "plots")
        of_experts = run_experts.draw(record, folder / "plots")
        _remove_other_plots(folder / "plots", [*images, *of_languages, *of_experts])
        languages, experts = (
            run_languages.blocks(record, of_languages),
            run_experts.blocks(record, of_experts),
        )
        html_path = _write_pages(run_report.compose(record, images, missing, languages, experts), folder)
    return html_path, record.problems


def write_study(folder: Path, claims: str | None = None, also: Sequence[Path] = ()) -> tuple[Path, list[str]]:
    """Write the report of a study. Return the path of report.html and a sentence for each missing plot.

    claims: path of a Markdown file to write, with the verdict on each claim by the results of this study and of `also`.
    """
    # Not needed for the report of a run.
    from deskside.report import study_figures, study_languages, study_report
    from deskside.report.study_claims import claims_markdown, judge_with_others
    from deskside.study.execute.results_io import PARQUET, write_parquet
    from deskside.study.narrative.cautions import cautions
    from deskside.study.stats.languages import read_records

    results = studies.read(folder)
    if claims and not results.claims:
        raise UsageError(f"--claims: the study in {folder} tests no claim; run `deskside study claims`")
    table = folder / PARQUET
    if not table.is_file() or table.stat().st_mtime < (folder / studies.RESULTS).stat().st_mtime:
        write_parquet(results, table)
    results = mark_interrupted(results, folder)  # not before: results.parquet has the statuses as stored
    with _oserror_as_run_error(folder):
        overview, groups = study_figures.draw(results, folder / "plots")
        records = read_records(results, folder)
        languages = study_languages.blocks(results, records, folder / "plots")
        figures = [overview, *groups.values()]
        images = [image for one in figures for image in one.images]
        images += [block for block in languages if isinstance(block, Image)]
        _remove_other_plots(folder / "plots", images)
        html_path = _write_pages(
            study_report.compose(results, folder, overview, groups, languages, cautions(results, records)),
            folder,
        )
    if claims:
        others = [mark_interrupted(studies.read(other), other) for other in also]
        with _oserror_as_run_error(Path(claims)):
            write_atomically(Path(claims), claims_markdown(judge_with_others(results, others)))
    return html_path, [sentence for one in figures for sentence in one.missing]


def write_search(folder: Path) -> Path:
    """Write the report of a search and return the path of report.html."""
    from deskside.report import search_report
    from deskside.study.search.outcome import read_outcome

    outcome = read_outcome(folder)
    with _oserror_as_run_error(folder):
        best, by_setting = search_report.draw(outcome, folder / "plots")
        _remove_other_plots(folder / "plots", [*best, *by_setting])
        return _write_pages(search_report.compose(outcome, folder, best, by_setting), folder)


def _remove_other_plots(folder: Path, images: Sequence[Image]) -> None:
    """Delete the plots of earlier reports: versions before 0.2 wrote PNG files."""
    for path in folder.glob("*.*"):
        if path.suffix in (".png", ".svg") and path not in {image.path for image in images}:
            path.unlink()


def _write_pages(document: ReportDocument, folder: Path) -> Path:
    html_path = folder / "report.html"
    write_atomically(html_path.with_suffix(".md"), render_markdown(document, folder))
    write_atomically(html_path, render_html(document))
    return html_path


@contextlib.contextmanager
def _oserror_as_run_error(path: Path) -> Iterator[None]:
    """Turn an OSError into a RunError with a one-line message."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{error.filename or path}: the report cannot be written: {reason}") from None
