"""The pages on cards, and the answers in the README, are what the planner says today."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.card_pages import CARDS, FOLDER, card_page, index_page, pages
from deskside.plan.headline import headline
from deskside.plan.planner import make_plan
from deskside.plan.request import PlanQuestion, make_request
from tests.sources import ROOT

REMEDY = "python -m benchmarks.card_pages writes the pages again"


@pytest.fixture(autouse=True)
def no_reports_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DESKSIDE_DATA", str(tmp_path))


def test_every_card_has_a_page() -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == {"index.md", *(f"{slug}.md" for slug in CARDS)}


def test_the_page_of_one_card_is_the_planners() -> None:
    assert (FOLDER / "rtx4090.md").read_text("utf-8") == card_page("rtx4090"), REMEDY


@pytest.mark.parametrize("question", [{"hours": 24.0}, {"params": "1.5B"}])
def test_the_readme_quotes_the_planner(question: dict[str, Any], tmp_path: Path) -> None:
    plan = make_plan(make_request(PlanQuestion(gpu="rtx4090", probes=tmp_path, **question)))
    sentence = headline(plan).removeprefix("Yes, if changed as below: on an RTX 4090, ")
    assert f'"{sentence}."' in " ".join((ROOT / "README.md").read_text("utf-8").split())


@pytest.mark.full
def test_all_pages_are_the_planners() -> None:
    assert {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.md")} == pages(), REMEDY
    assert index_page() == pages()["index.md"]
