"""The pages of studies and the planner in a real browser: both themes, filters, labels, and nothing on the console."""

import json
import re
import shutil
import time
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deskside.dashboard.file_cache import SCAN_SECONDS
from deskside.dashboard.page import PAGES
from deskside.dashboard.views.trade_offs import AXIS_KEYS
from deskside.facts.power_and_prices import default_electricity_price
from tests.dashboard import made_up
from tests.dashboard.browsing import DESKTOP, PHONE, fits, opened, serious_faults, settled

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BOXES = """() => [...document.querySelectorAll('.annotation')].filter(e => e.getClientRects().length)
    .map(e => e.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])"""


DARK_PAGES = (
    "summary",
    *(pytest.param(s.name, marks=pytest.mark.full) for s in PAGES if s.name != "summary"),
)


@pytest.mark.parametrize("name", DARK_PAGES)
def test_pages_are_dark_if_the_system_is(browser: "Browser", address: str, name: str) -> None:
    page = opened(browser, address, name, size=PHONE, scheme="dark")
    background = "getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor"
    assert max(numbers(page.evaluate(background))) < 60
    texts = page.evaluate("[...document.querySelectorAll('.ytick text')].map(e => getComputedStyle(e).fill)")
    assert all(min(numbers(color)) > 120 for color in texts)
    assert serious_faults(page) == []
    page.close()


@pytest.mark.full
def test_a_step_of_a_running_trial_is_seen_on_the_page_of_its_study(
    browser: "Browser", address: str, served_root: Path
) -> None:
    folder = served_root / "studies/live"
    made_up.unfinished_study(folder, "runs/trial")
    time.sleep(SCAN_SECONDS)  # the server may look for new studies only this often
    with made_up.running(folder / "runs/trial"):
        page = opened(browser, address, "metrics", "?study=studies/live")
        page.get_by_text("step 40 of 200").wait_for()
        page.locator(".legendtext").get_by_text("seed 1, running").wait_for()
        row = {**made_up.row(41), "val_bpb": 1.2345}
        with (folder / "runs/trial/metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        page.get_by_text("step 41 of 200").wait_for()
        page.get_by_text("1.2345 bits per byte").wait_for()
        page.close()
    shutil.rmtree(folder)


def numbers(color: str) -> list[int]:
    """Return red, green and blue of `rgb(1, 2, 3)`."""
    return [int(float(part)) for part in color.split("(")[1].rstrip(")").split(",")[:3]]


@pytest.mark.full
def test_the_answer_of_a_group_unfolds_and_changes_with_the_goal(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "summary", "?study=studies/made")
    rows = page.locator(".verdicts details")
    assert rows.count() == 2  # one for each size, each with its own baseline
    assert not rows.first.locator("dl").is_visible()
    rows.first.locator("summary").click()
    assert rows.first.locator("dd").first.inner_text().startswith(("The interval", "The same"))
    page.get_by_role("radio", name="speed").or_(page.get_by_role("button", name="speed")).first.click()
    page.get_by_text("tokens/s (").first.wait_for()
    settled(page)
    assert "shown" in page.locator(".verdicts .chip").all_inner_texts()
    page.close()


@pytest.mark.full
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_the_labels_of_trade_offs_do_not_collide(
    browser: "Browser", address: str, size: dict[str, int]
) -> None:
    """Each of 24 arms has its name in the chart, or a number whose name is listed below it."""
    page = opened(browser, address, "trade_offs", "?study=studies/many", size=size)
    for axes in AXIS_KEYS:
        page.get_by_role("radio", name=axes).or_(page.get_by_role("button", name=axes)).first.click()
        page.locator(f'[data-testid="stPlotlyChart"][aria-label^="{axes}"]').or_(
            page.get_by_label(re.compile(f"^{axes} of"))
        ).first.wait_for()
        settled(page)
        boxes = page.evaluate(BOXES)
        for first, second in combinations(boxes, 2):
            apart = (
                first[2] <= second[0]
                or second[2] <= first[0]
                or first[3] <= second[1]
                or second[3] <= first[1]
            )
            assert apart, (axes, first, second)
        shown = page.locator(".annotation-text:visible").all_text_contents()
        listed = page.locator(".numbered li:visible b").all_inner_texts()
        assert {text for text in shown if text.isdigit()} <= set(listed)
        assert len(listed) + sum(not text.isdigit() for text in shown) == 24, axes
    page.close()


@pytest.mark.full
def test_a_page_of_a_study_is_drawn_again_when_a_trial_ends(
    browser: "Browser", address: str, served_root: Path
) -> None:
    path = served_root / "studies/two/results.json"
    ended = path.read_text()
    running = json.loads(ended) | {"complete": False}
    running["arms"][0]["trials"][0]["status"] = "pending"
    path.write_text(json.dumps(running))
    try:
        page = opened(browser, address, "summary", "?study=studies/two")
        unfinished = page.get_by_text(re.compile("deskside study .*two --resume"))
        assert unfinished.count() == 1
    finally:
        path.write_text(ended)
    unfinished.wait_for(state="detached")
    settled(page)
    page.close()


def test_claims_are_sorted_searched_and_unfolded(browser: "Browser", address: str, served_root: Path) -> None:
    path = served_root / "studies/made/results.json"
    whole = json.loads(path.read_text())
    first = whole["claims"][0]
    others = [
        {**first, "id": "a", "text": "FP8 is <b>faster</b>", "measured": -2.0, "verdict": "contradicted"},
        {
            **first,
            "id": "b",
            "text": "A step is slow",
            "measured": None,
            "verdict": "holds",
            "source": "a paper, page 2",
        },
    ]
    path.write_text(json.dumps({**whole, "claims": [first, *others]}))
    page = opened(browser, address, "claims", "?study=studies/made")
    table, claims = page.locator(".claims"), page.locator(".claims tbody th.claim")
    gqa, fp8, step = "GQA 4:1 trains 5 % faster", "FP8 is <b>faster</b>", "A step is slow"
    claims.nth(2).wait_for()  # all_inner_texts does not wait, and a busy machine draws the table late
    assert claims.all_inner_texts() == [fp8, step, gqa] and serious_faults(page) == []
    table.get_by_role("button", name="measured or computed").click()
    assert claims.all_inner_texts() == [fp8, gqa, step]
    table.get_by_role("button", name="measured or computed").click()
    assert claims.all_inner_texts() == [gqa, fp8, step]  # one without a value comes last in either order
    heading = table.get_by_role("columnheader", name="measured or computed")
    assert heading.get_attribute("aria-sort") == "descending"
    table.get_by_role("button", name=step).focus()
    page.keyboard.press("Enter")
    assert table.get_by_text("a paper, page 2").is_visible()
    page.get_by_label("search").fill("page 2")
    page.keyboard.press("Enter")
    page.get_by_text("1 of 3 claims").wait_for()
    settled(page)
    assert claims.all_inner_texts() == [step] and table.get_by_text("a paper, page 2").is_visible()
    page.set_viewport_size(PHONE)
    assert table.locator("thead").is_hidden() and fits(page)
    path.write_text(json.dumps(whole))
    page.close()


@pytest.mark.full
def test_the_planner_on_a_phone(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "planner", size=PHONE)
    page.get_by_text("What fits on RTX 4090").wait_for(timeout=60_000)
    settled(page)
    tops = [box_of(page, label)["y"] for label in ("card", "budget in", "budget")]
    assert tops == sorted(tops)
    page.get_by_text("model, precision, number of cards, price").click()
    price = page.get_by_role("spinbutton", name="price of electricity")
    price.wait_for()
    assert float(price.input_value()) == default_electricity_price().usd
    page.wait_for_function("document.querySelectorAll('.heatmaplayer image').length > 0")
    assert fits(page)
    assert serious_faults(page) == []
    page.close()


@pytest.mark.full
def test_a_run_that_ends_is_compared_with_its_plan_on_the_open_page(
    browser: "Browser", address: str, served_root: Path
) -> None:
    page = opened(browser, address, "planner")
    speed = page.locator("li").filter(has_text="speed, tokens/s by plan")
    (before,) = re.findall(r"median of (\d+)", speed.inner_text())
    made_up.run(served_root / "runs/predicted")
    speed.get_by_text(f"median of {int(before) + 1}").wait_for()
    settled(page)
    page.close()
    shutil.rmtree(served_root / "runs/predicted")


def box_of(page: "Page", label: str) -> Any:
    return page.get_by_text(label, exact=True).first.bounding_box()
