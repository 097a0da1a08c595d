"""The languages in the report of a made-up run."""

import json
from pathlib import Path

import pytest

from deskside.report.write import write_report
from deskside.run.record import read_run
from tests.report.test_run_report import make_run, metric


def add_languages(folder: Path, languages: list[str]) -> None:
    """Give the run's evaluations at steps 100 and 200, and its summary, a value for each language."""
    rows = [metric(step) for step in range(1, 201)]
    for row in rows:
        if row["step"] % 100 == 0:
            row |= {f"val_bpb/{name}": n + 100 / row["step"] for n, name in enumerate(languages)}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = json.loads((folder / "summary.json").read_text())
    summary["val_languages"] = {
        name: {"bpb": n + 0.25, "loss": 1.0, "tokens": 7, "bytes": 1234} for n, name in enumerate(languages)
    }
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.usefixtures("no_figures")
def test_table_and_plot(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    languages = ["bn", "gu", "hi", "kn", "|x", "<b>", "$a$"]
    add_languages(folder, languages)
    page = write_report(folder).read_text("utf-8")
    markdown = (folder / "report.md").read_text("utf-8")
    assert "| gu | 2.000 | 1.250 | 1,234 |" in markdown
    assert "mean is 3.250" in " ".join(markdown.split())  # of 0.25, 1.25, ..., 6.25
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert (folder / "plots" / "val_languages.svg").stat().st_size > 5000
    x, y = read_run(folder).language_series()["hi"]
    assert (x, y) == ([100 * 16384, 200 * 16384, 6553600], [3.0, 2.5, 2.25])


@pytest.mark.usefixtures("no_figures")
def test_more_languages_than_panels(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    add_languages(folder, [f"l{n:02}" for n in range(30)])
    write_report(folder)
    markdown = " ".join((folder / "report.md").read_text("utf-8").split())
    assert "6 more languages" in markdown and "| l29 |" in markdown


@pytest.mark.usefixtures("no_figures")
def test_a_run_without_languages_has_no_section(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    add_languages(folder, ["bn", "gu"])
    write_report(folder)
    make_run(folder)
    write_report(folder)
    assert "## Languages" not in (folder / "report.md").read_text("utf-8")
    assert not (folder / "plots" / "val_languages.svg").exists()


@pytest.mark.usefixtures("no_figures")
def test_epochs_of_a_mixture(tmp_path: Path) -> None:
    """They are the summary's, which counts what was used; before the end, they are the planned ones."""
    folder = make_run(tmp_path / "demo")
    add_languages(folder, ["bn", "gu"])
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "mixture_epochs": {"bn": 1.5, "gu": 3.0}}))
    write_report(folder)
    assert "| bn | 1.000 | 0.250 | 1,234 | 1.50 |" in (folder / "report.md").read_text("utf-8")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "mixture_epochs": {"bn": 1.25}}))
    write_report(folder)
    markdown = (folder / "report.md").read_text("utf-8")
    assert "| bn | 1.000 | 0.250 | 1,234 | 1.25 |" in markdown and "1.250 | 1,234 | not known |" in markdown
