"""The dashboard as a person meets it: the real command, a real headless Chromium. One of each for all."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from deskside.dashboard import tables
from deskside.dashboard.page import TABS
from deskside.study import results as study_results
from tests.dashboard import made_up

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
FIRST_WORDS = {
    "Overview": "What each technique does",
    "Memory": "Peak memory",
    "Performance": "Speed and quality",
    "Efficiency": "Trade-offs",
    "Results": "Arms as CSV",
    "Insights": "What the data says",
    "Live": "1 run training now",
    "Planner": "Command",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("work")
    made_up.study(folder / "studies/made")
    made_up.two_groups(folder / "studies/two")
    made_up.broken(folder)
    with made_up.running(folder / "runs/now"):
        yield folder


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    """Where `deskside dashboard` says that it is."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "deskside", "dashboard", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield found.group()
        server.terminate()
        said = server.communicate(timeout=30)[0]
    assert "Traceback" not in said, said


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator["Browser"]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield launched
        launched.close()


def opened(browser: "Browser", address: str, tab: str, size: dict[str, int] = DESKTOP) -> "Page":
    """A tab by its address, drawn; no exception and no failed script on it."""
    page = browser.new_page(viewport=size, accept_downloads=True)
    page.wrong = []  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.wrong.append(str(error)))  # type: ignore[attr-defined]
    for attempt in range(40):  # the server listens a moment after it has said where
        try:
            page.goto(f"{address}/?tab={tab}")
            break
        except sync_api.Error:
            if attempt == 39:
                raise
            page.wait_for_timeout(250)
    page.get_by_text(FIRST_WORDS[tab]).first.wait_for(timeout=60_000)
    settled(page)
    return page


def settled(page: "Page") -> None:
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=60_000)
    page.wait_for_function("!document.querySelector('[data-testid=stSkeleton]')", timeout=60_000)
    assert page.locator('[data-testid="stException"]').count() == 0
    assert page.wrong == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("tab", TABS)
def test_every_tab_is_drawn_and_fits_a_phone(browser: "Browser", address: str, tab: str) -> None:
    page = opened(browser, address, tab)
    selected = page.get_by_role("tab", selected=True)
    assert selected.inner_text() == tab
    charts = page.locator('[data-testid="stPlotlyChart"]')
    page.wait_for_function(
        "[...document.querySelectorAll('[data-testid=stPlotlyChart]')].every(e => e.querySelector('.main-svg'))"
    )
    assert charts.count() >= {"Results": 0, "Insights": 0, "Efficiency": 2, "Overview": 4}.get(tab, 2)
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(400)
    settled(page)
    wide = page.evaluate(
        "[document.scrollingElement, document.querySelector('[data-testid=stMain]')]"
        ".map(e => e.scrollWidth - e.clientWidth)"
    )
    assert max(wide) <= 0, f"{tab} scrolls sideways by {wide} pixels"
    page.close()


def test_the_experts_of_a_run(browser: "Browser", address: str) -> None:
    """In a study's place the runs outside of studies: one with experts, of which the page shows three charts."""
    page = opened(browser, address, "Performance")
    page.get_by_role("combobox", name="study").click()
    page.get_by_role("option", name="runs outside of studies").click()
    page.get_by_text("Load of each expert at step 40").wait_for()
    settled(page)
    assert page.locator(".heatmaplayer").count() > 0
    page.close()
    page = opened(browser, address, "Live")
    page.get_by_text("Load of each expert at step 40").wait_for()
    assert page.locator(".heatmaplayer").count() > 0
    page.close()


def test_a_click_opens_a_tab_and_a_filter_narrows_it(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "Overview")
    page.get_by_role("tab", name="Results").click()
    page.get_by_text("Arms as CSV").wait_for()
    page.get_by_text("8 of 8 arms shown").wait_for()
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


def test_one_group_of_several_is_drawn_under_its_own_labels(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "Efficiency")
    assert page.get_by_role("combobox", name="group, one of").count() == 0  # the other study has one group
    page.get_by_role("combobox", name="study").click()
    page.get_by_role("option", name="studies/two").click()
    page.get_by_role("combobox", name="group, one of 2").wait_for()
    page.get_by_text("16 of 16 arms shown, in 2 groups").wait_for()
    settled(page)
    assert page.locator("li", has_text="GQA off, FP4 off").count() >= 2
    lines = "\n".join(page.locator("p").all_inner_texts()).splitlines()
    assert sum(re.match(r"\d+\. ", line) is not None for line in lines) == 8  # the bubbles, of one group only
    page.get_by_role("combobox", name="group, one of 2").click()
    page.get_by_role("option", name="A second").click()
    page.get_by_text("10 steps per trial").wait_for()
    page.get_by_role("tab", name="Memory").click()
    page.get_by_text("Peak memory").first.wait_for()
    settled(page)
    assert page.get_by_text("10 steps per trial").count() == 1  # the choice is that of the study
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .ytick').length > 0")
    ticks = page.locator('[data-testid="stPlotlyChart"]').first.locator(".ytick").all_text_contents()
    assert len(ticks) == 8 and len(set(ticks)) == 8 and not any("second-" in tick for tick in ticks)
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(400)
    picker = page.get_by_role("combobox", name="group, one of 2")
    assert picker.is_visible()  # without opening the sidebar
    page.get_by_role("tab", name="Insights").click()
    page.get_by_role("heading", name="A second").wait_for()
    settled(page)
    page.close()


def test_the_exported_trials_are_those_of_results_json(browser: "Browser", address: str, root: Path) -> None:
    page = opened(browser, address, "Results")
    with page.expect_download() as download:
        page.get_by_role("button", name="Trials as CSV").click()
    assert download.value.suggested_filename == "made-trials.csv"
    found = pd.read_csv(download.value.path(), keep_default_na=False, na_values=[""]).set_index(
        ["arm", "seed"]
    )
    whole = study_results.read(root / "studies/made")
    assert len(found) == sum(len(arm.trials) for arm in whole.arms)
    for arm in whole.arms:
        for trial in arm.trials:
            row = found.loc[(arm.id, trial.seed)]
            assert row["status"] == trial.status
            for key, value in trial.metrics.items():
                assert row[key] == pytest.approx(value, rel=1e-12)
    assert list(found.columns) == [c for c in tables.trials(whole).columns if c not in ("arm", "seed")]
    page.close()


def test_a_running_run_is_drawn_anew_by_itself(browser: "Browser", address: str, root: Path) -> None:
    page = opened(browser, address, "Live")
    page.get_by_text("step 40 of 200; 80.0 s left").wait_for()
    with (root / "runs/now/metrics.jsonl").open("a") as file:
        file.write(json.dumps(made_up.row(41)) + "\n")
    page.get_by_text("step 41 of 200; 79.5 s left").wait_for(timeout=30_000)
    assert page.wrong == []  # type: ignore[attr-defined]
    page.close()


def test_a_chart_is_saved_as_png(browser: "Browser", address: str) -> None:
    page = opened(browser, address, "Memory")
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
    page.goto(f"{address}/?tab=Overview")
    page.get_by_text(FIRST_WORDS["Overview"]).wait_for()
    page.wait_for_timeout(500)
    outside = [
        url for url in asked if not url.startswith((address, address.replace("http", "ws"), "data:", "blob:"))
    ]
    assert outside == []
    assert page.get_by_text("Deploy", exact=True).count() == 0
    context.close()


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
    with urllib.request.urlopen(f"{address}/_stcore/health", timeout=5) as answer:
        assert answer.status == 200
