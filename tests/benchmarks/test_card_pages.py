"""The GPU pages and the answers in the README equal what the planner says today."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.card_pages import CARDS, FOLDER, card_page, index_page, pages, plans_of
from deskside.measurements.reported import add_report, reported_for
from deskside.plan.headline import headline
from deskside.plan.planner import make_plan
from deskside.plan.question import PlanQuestion
from deskside.plan.request import make_request
from tests.measurements.made_report import made
from tests.sources import ROOT

REMEDY = "python -m benchmarks.card_pages writes the pages again"


@pytest.fixture(autouse=True)
def no_reports_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DESKSIDE_DATA", str(tmp_path))


def test_every_card_has_a_page() -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == {"index.md", *(f"{slug}.md" for slug in CARDS)}


def test_the_page_of_one_card_is_the_planners() -> None:
    assert (FOLDER / "rtx4090.md").read_text("utf-8") == card_page("rtx4090"), REMEDY


def rows_of_reports(page: str) -> list[list[str]]:
    """Return the cells of a page's table of reports."""
    table = page.partition("| parameters | row |")[2].splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in table[: table.index("")]] if table else []


@pytest.mark.full
def test_the_page_of_a_card_with_reports_has_their_speeds(tmp_path: Path) -> None:
    plans_of.cache_clear()  # plans depend on the reports
    page = card_page("h200")
    assert (FOLDER / "h200.md").read_text("utf-8") == page, REMEDY
    (ours,) = reported_for("H200 SXM")
    before = rows_of_reports(page)
    assert [row[4] for row in before] == [f"{point.tokens_per_second:,.0f}" for point in ours.report.points]
    assert {row[5] for row in before} == {"1"}
    assert rows_of_reports(card_page("rtx4090")) == []

    again = ours.report.to_json()
    again["date"] = "2026-11-24"
    for point in again["points"]:
        point["step_seconds"] = {name: 1.25 * value for name, value in point["step_seconds"].items()}
    for number, report in enumerate((made(), again)):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(report))
        add_report(path, datetime.date(2026, 11, 24))
    after = rows_of_reports(card_page("h200"))
    assert len(after) == len(before) + len(made()["points"])
    assert [row[5] for row in after[: len(before)]] == ["2"] * len(before)
    plans_of.cache_clear()


@pytest.mark.parametrize("question", [{"hours": 24.0}, {"params": "1.5B"}])
def test_the_readme_quotes_the_planner(question: dict[str, Any], tmp_path: Path) -> None:
    plan = make_plan(make_request(PlanQuestion(gpu="rtx4090", probes=tmp_path, **question)))
    sentence = headline(plan).removeprefix("Yes, if changed as below: on an RTX 4090, ")
    assert f'"{sentence}."' in " ".join((ROOT / "README.md").read_text("utf-8").split())


@pytest.mark.full
def test_all_pages_are_the_planners() -> None:
    assert {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.md")} == pages(), REMEDY
    assert index_page() == pages()["index.md"]
