"""The table of runs and the pages of runs in a real browser."""

import fcntl
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from tests.dashboard import made_up
from tests.dashboard.browsing import PHONE, fits, opened, serious_faults, settled

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def names(page: "Page") -> list[str]:
    """Return the names in the table, from top to bottom."""
    return page.locator(".runs tbody th a").all_inner_texts()


def test_the_table_sorts_filters_and_exports(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "runs")
    page.get_by_role("link", name="now", exact=True).wait_for()
    page.get_by_role("button", name="bits per byte").click()
    heading, cells = page.locator(".runs th.bpb"), page.locator(".runs td.bpb")
    values = [float(text) for text in cells.all_inner_texts() if text]
    assert heading.get_attribute("aria-sort") == "ascending"
    assert values == sorted(values) and 2 < len(values) < len(names(page)) and cells.last.inner_text() == ""
    page.get_by_role("button", name="bits per byte").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert [float(text) for text in cells.all_inner_texts() if text] == values[::-1]
    assert cells.last.inner_text() == ""  # unknown ones are last in either order
    page.get_by_role("combobox", name="show").click()
    page.get_by_role("option", name="studies", exact=True).click()
    page.locator(".runs tbody tr").filter(has_text="studies/made").wait_for()
    page.get_by_text(re.compile(r"^3 of \d+ rows")).wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Rows as CSV").click()
    frame = pd.read_csv(download.value.path())
    assert set(frame["name"]) == {"studies/made", "studies/two", "studies/many"} and set(frame["kind"]) == {
        "study"
    }
    assert "show=studies" in page.url
    page.close()


@pytest.mark.full
def test_a_filter_that_nothing_passes_says_so(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "runs", "?contains=no+such+run")
    page.get_by_text("No row passes the filters").wait_for()
    page.get_by_role("textbox", name="name or details contain").fill("second")
    page.get_by_role("textbox", name="name or details contain").press("Enter")
    page.get_by_role("link", name="second", exact=True).wait_for()
    assert names(page) == ["second"]
    page.close()


def test_a_link_of_the_table_opens_the_page_of_a_run(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "runs")
    page.get_by_role("link", name="first", exact=True).click()
    page.locator('[data-testid="stPlotlyChart"]').nth(4).wait_for()
    settled(page)
    assert page.url.endswith("/run?run=runs%2Ffirst")
    # Reloaded by the browser, because Streamlit's own navigation collides with the table's timer and leaves a blank
    # page.
    assert page.evaluate("performance.getEntriesByType('navigation')[0].name") == page.url
    assert serious_faults(page) == []
    page.close()


def test_ticked_runs_are_compared(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "runs", "?show=runs")
    for name in ("first", "second"):
        page.get_by_role("checkbox", name=f"compare runs/{name}").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    page.get_by_role("heading", name="2 runs").wait_for()
    settled(page)
    page.wait_for_function(
        "document.querySelector('.js-plotly-plot')?.querySelectorAll('.scatterlayer .trace').length === 2"
    )
    page.get_by_role("tab", name="Configuration").click()
    page.get_by_role("switch", name="all options").wait_for()
    page.close()


def test_a_metric_that_is_written_is_seen_on_both_pages(
    browser: "Browser", address: str, served_root: Path
) -> None:
    """The value is far from all others. After how long it is seen is measured by benchmarks/dashboard.py."""
    table, run = opened(browser, address, "runs"), opened(browser, address, "run", "?run=runs/now")
    speed = run.locator('[data-testid="stMetric"]').filter(has_text="tokens/s").get_by_text("777,777")
    assert speed.count() == 0
    row = {**made_up.row(41), "tokens_per_second": 777_777.0}
    with (served_root / "runs/now/metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    for seen in (speed, run.get_by_text("step 41 of 200"), table.locator(".runs td").get_by_text("777,777")):
        seen.wait_for()
    for page in (table, run):
        settled(page)
        page.close()


@pytest.mark.full
def test_a_run_that_is_resumed_is_live_again(browser: "Browser", address: str, served_root: Path) -> None:
    page = opened(browser, address, "run", "?run=runs/half")
    page.get_by_text("The run has not finished.").wait_for()
    assert page.get_by_text("step 12 of 60").count() == 0
    path = served_root / "runs/half/.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held like by a training process
        page.get_by_text("step 12 of 60").wait_for()
        page.close()
    path.unlink()


def test_the_switch_changes_the_theme_of_every_page(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "runs")
    # this element does not exist while the page reloads
    background = (
        "(e => e && getComputedStyle(e).backgroundColor)(document.querySelector('[data-testid=stApp]'))"
    )
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    page.get_by_role("button", name="Dark theme").click()
    page.wait_for_function(f"{background} === 'rgb(13, 17, 23)'")
    page.goto(f"{address}/run?run=runs/first")  # a page with its own address
    page.wait_for_function(f"{background} === 'rgb(13, 17, 23)'")
    settled(page)
    icon = page.locator(".modebar-btn path").first.evaluate("e => getComputedStyle(e).fill")
    assert icon == "rgb(154, 164, 175)"
    page.get_by_role("button", name="Theme of the system").click()
    page.wait_for_function(f"{background} === 'rgb(255, 255, 255)'")
    page.close()


def test_a_phone_shows_rows_as_cards(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "runs", size=PHONE)
    page.get_by_role("combobox", name="sort by").select_option("bpb")
    values = [float(text) for text in page.locator(".runs td.bpb").all_inner_texts() if text]
    assert values == sorted(values)
    assert page.locator(".runs thead").is_hidden() and fits(page)
    # A value has the same position in each card, even if others are missing.
    for key in ("tokens_per_second", "mfu", "created"):
        cells = page.locator(f".runs td.{key}:not(:empty)").all()
        # With and without a tick.
        assert len({box["x"] for cell in cells if (box := cell.bounding_box())}) <= 2
    page.close()


def test_a_report_of_another_person_runs_no_script(
    browser: "Browser", address: str, served_root: Path
) -> None:
    path = served_root / "runs/first/report.html"
    page = browser.new_page()
    refused: list[tuple[str, str | None]] = []
    page.on("requestfailed", lambda request: refused.append((request.url, request.failure)))
    page.goto(f"{address}/report?of=runs/first")
    page.get_by_text("has no report yet").wait_for()
    path.write_text(
        "<h1>Of the run</h1><script>document.body.textContent = 'ran'</script><img src='http://x.invalid'>"
    )
    frame = page.frame_locator("iframe")
    frame.get_by_role("heading", name="Of the run").wait_for()
    assert frame.locator("body").inner_text().strip() == "Of the run"
    assert ("http://x.invalid/", "csp") in refused
    page.close()
    path.unlink()


@pytest.mark.full
def test_runs_events_and_samples_are_seen_without_a_click(
    browser: "Browser", address: str, served_root: Path
) -> None:
    page = opened(browser, address, "run", "?run=runs/now")
    folder = served_root / "runs/logged"
    lock = made_up.running(folder)
    events = folder / "events.log"
    events.write_text("2026-11-24 10:00:00 saved a checkpoint\n" * 100)
    page.get_by_role("combobox", name="runs").click()
    page.get_by_role("option", name="runs/logged").wait_for()  # the list is open
    page.goto(f"{address}/run?run=runs/logged&part=Events")
    log = page.locator("pre.log")
    log.focus()
    assert serious_faults(page) == []
    assert log.evaluate("e => e.scrollHeight > e.clientHeight && e === e.getRootNode().activeElement")
    log.evaluate("e => { e.scrollTop = 200 }")
    with events.open("a") as file:
        file.write("2026-11-24 10:01:00 evaluated\n")
    log.get_by_text("evaluated").wait_for()
    assert log.evaluate("e => e.scrollTop") == 200
    page.get_by_role("tab", name="Samples").click()
    page.get_by_text("There are no samples").wait_for()
    sample = {"prompt": "Once upon", "text": " a time"}
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "samples": [sample]}))
    lock.close()
    page.get_by_text("Once upon a time").wait_for()
    assert page.get_by_role("tab", name="Samples").get_attribute("aria-selected") == "true"
    settled(page)
    page.close()
