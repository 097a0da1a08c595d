"""The dashboard as a user sees it: the real command and a real headless Chromium, one of each for all tests."""

import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from deskside.dashboard import tables
from deskside.dashboard.page import PAGES
from deskside.dashboard.server import BASE_SCRIPT
from deskside.study import results as study_results
from tests.dashboard.browsing import DESKTOP, PHONE, fits, opened, serious_faults, settled

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


# Tests that open the other pages by their addresses check those.
CHECKED_AFTER_A_CLICK = ("runs", "report", "metrics", "trade_offs", "tables", "learning")


@pytest.mark.full
@pytest.mark.parametrize("name", [spec.name for spec in PAGES])
def test_every_page_is_drawn_for_everyone_and_fits_a_phone(
    browser: "Browser", address: str, name: str
) -> None:
    page = opened(browser, address, name)
    title = next(spec.title for spec in PAGES if spec.name == name)
    assert page.title() == f"{title} · deskside"
    assert serious_faults(page) == []
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(400)
    settled(page)
    assert fits(page), f"{name} scrolls sideways"
    page.close()


def test_every_page_opens_by_a_click(browser: "Browser", address: str) -> None:
    page = opened(browser, address, PAGES[-1].name)
    for spec in PAGES:
        page.locator('[data-testid="stSidebarNav"]').get_by_role("link", name=spec.title, exact=True).click()
        page.wait_for_function("title => document.title === title", arg=f"{spec.title} · deskside")
        settled(page)  # nothing on the console, and every request succeeded
        if spec.name in CHECKED_AFTER_A_CLICK:
            assert serious_faults(page) == [], spec.name
    page.close()


def check_exported_trials(page: "Page", whole: study_results.Results) -> None:
    """Check that the trials exported as CSV are those of results.json, with all digits."""
    with page.expect_download() as download:
        page.get_by_role("button", name="Trials as CSV").click()
    assert download.value.suggested_filename == "made-trials.csv"
    found = pd.read_csv(download.value.path(), keep_default_na=False, na_values=[""]).set_index(
        ["arm", "seed"]
    )
    assert len(found) == sum(len(arm.trials) for arm in whole.arms)
    for arm in whole.arms:
        for trial in arm.trials:
            row = found.loc[(arm.id, trial.seed)]
            assert row["status"] == trial.status
            for key, value in trial.metrics.items():
                assert row[key] == pytest.approx(value, rel=1e-12)
    assert list(found.columns) == [c for c in tables.trials(whole).columns if c not in ("arm", "seed")]


def test_a_click_opens_a_page_and_a_filter_narrows_it(
    browser: "Browser", address: str, served_root: Path
) -> None:
    page = opened(browser, address, "summary")
    page.get_by_role("link", name="Tables").click()
    page.get_by_text("Arms as CSV").wait_for()
    page.get_by_text("8 of 8 arms shown").wait_for()
    check_exported_trials(page, study_results.read(served_root / "studies/made"))
    page.get_by_role("combobox", name="size").click()
    page.get_by_role("option", name="small").click()
    page.get_by_text("4 of 8 arms shown").first.wait_for()
    page.mouse.click(900, 20)  # closes the list, which hides the page from a screen reader while it is open
    settled(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Arms as CSV").click()
    frame = pd.read_csv(download.value.path())
    assert len(frame) == 4 and set(frame["factor_size"]) == {"small"}
    page.close()


@pytest.mark.full
def test_one_group_of_several_is_drawn_under_its_own_labels(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "trade_offs")
    assert page.get_by_role("combobox", name="group, one of").count() == 0  # the other study has one group
    page.get_by_role("combobox", name="study").click()
    page.get_by_role("option", name="studies/two").click()
    page.get_by_role("combobox", name="group, one of 2").wait_for()
    page.get_by_text("16 of 16 arms shown, in 2 groups").wait_for()
    settled(page)
    labels = page.locator(".annotation-text:visible").all_text_contents()
    assert labels and len(labels) == len(set(labels)) <= 8  # only one group's
    page.get_by_role("combobox", name="group, one of 2").click()
    page.get_by_role("option", name="A second").click()
    page.get_by_text("10 steps per trial").wait_for()
    page.get_by_role("link", name="Metrics").click()
    page.get_by_text("Against the baseline").first.wait_for()
    settled(page)
    assert page.get_by_text("10 steps per trial").count() == 1  # the selection belongs to the study
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .ytick').length > 0")
    ticks = page.locator('[data-testid="stPlotlyChart"]').first.locator(".ytick").all_text_contents()
    assert len(ticks) == 8 and len(set(ticks)) == 8 and not any("second-" in tick for tick in ticks)
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(400)
    picker = page.get_by_role("combobox", name="group, one of 2")
    assert picker.is_visible()  # without opening the sidebar
    page.close()


@pytest.mark.full
def test_a_chart_is_saved_as_png(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "metrics")
    chart = page.locator('[data-testid="stPlotlyChart"]').first
    chart.hover()
    with page.expect_download() as download:
        chart.locator('.modebar-btn[data-title*="PNG" i], .modebar-btn[data-title*="image" i]').first.click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
    page.close()


def test_nothing_leaves_this_machine_and_nothing_can_be_deployed(browser: "Browser", address: str) -> None:
    context = browser.new_context(viewport=DESKTOP)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.goto(address)
    page.get_by_text("Rows as CSV").wait_for()
    page.goto(f"{address}/summary")
    page.get_by_text("Measured; means with their intervals").first.wait_for()
    page.wait_for_timeout(500)
    outside = [
        url for url in asked if not url.startswith((address, address.replace("http", "ws"), "data:", "blob:"))
    ]
    assert outside == []
    assert page.get_by_text("Deploy", exact=True).count() == 0
    context.close()


def test_the_index_of_every_page_knows_the_address_of_the_server(address: str) -> None:
    for path in ("", *(spec.name for spec in PAGES)):
        with urllib.request.urlopen(f"{address}/{path}", timeout=60) as answer:
            text = answer.read().decode()
        assert text.index(BASE_SCRIPT) < text.index('type="module"'), path


def test_it_answers_on_this_machine_only(address: str) -> None:
    port = int(address.rsplit(":", 1)[1])
    listening = [
        line.split()[1].split(":")[0]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].split(":")[1], 16) == port
    ]
    local = {"0100007F", "00000000000000000000000001000000"}
    assert listening and set(listening) <= local
    with urllib.request.urlopen(f"{address}/_stcore/health", timeout=60) as answer:
        assert answer.status == 200
