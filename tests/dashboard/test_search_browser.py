"""The page of a search in a real browser."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest

from deskside.dashboard.file_cache import SCAN_SECONDS
from deskside.study.search.outcome import read_outcome, write_outcome
from tests.dashboard import made_up
from tests.dashboard.browsing import PHONE, fits, opened, serious_faults, settled

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.mark.full
def test_a_search_is_opened_from_the_table_and_shows_every_trial(
    browser: "Browser", address: str, served_root: Path
) -> None:
    page = opened(browser, address, "runs", "?show=searches")
    assert page.locator(".runs td.bpb").all_inner_texts() == ["1.4500"]
    page.get_by_role("link", name="searches/made").click()
    page.get_by_text("Trials as CSV").wait_for()
    settled(page)
    assert "/search" in page.url and serious_faults(page) == []
    assert page.locator('[data-testid="stPlotlyChart"]').count() == 5
    assert page.get_by_text(f"deskside train {served_root / 'searches/made/winner.toml'}").count() == 1
    assert page.locator('[data-testid="stMetricValue"]').all_inner_texts()[2:] == [
        "-0.0500",
        "-0.0800 to -0.0200",
    ]
    page.get_by_role("button", name="refused by the planner (1)").or_(
        page.get_by_role("checkbox", name="refused by the planner (1)")
    ).first.click()
    page.locator('[role="grid"][aria-rowcount="2"]').wait_for(state="attached")  # the heading and one trial
    with page.expect_download() as download:
        page.get_by_role("button", name="Trials as CSV").click()
    (row,) = pd.read_csv(download.value.path()).to_dict("records")
    assert (row["trial"], row["status"]) == (4, "refused by the planner") and row["why"].startswith(
        "needs up to"
    )
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(400)
    assert fits(page)
    page.close()


@pytest.mark.full
def test_a_trial_that_ends_and_a_step_are_seen_while_the_search_runs(
    browser: "Browser", address: str, served_root: Path
) -> None:
    folder, run = served_root / "searches/live", "trials/runs/trial-0008-s1"
    made_up.search(folder, complete=False, running=run)
    time.sleep(SCAN_SECONDS)  # the server may look for new searches only this often
    with made_up.running(folder / run):
        page = opened(browser, address, "search", "?search=searches/live")
        page.get_by_text("trial 8: step 40 of 200").wait_for()
        with (folder / run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(made_up.row(41)) + "\n")
        page.get_by_text("trial 8: step 41 of 200").wait_for()
        outcome = read_outcome(folder)
        ended = replace(outcome.trials[-1], status="finished", loss=1.2345, elapsed=600.0)
        write_outcome(
            replace(outcome, trials=[*outcome.trials[:-1], ended], answer="so far, trial 8 is the best"),
            folder,
        )
        page.get_by_text("so far, trial 8 is the best").wait_for()
        page.get_by_text("6 finished").wait_for()
    for path in folder.glob("*.json"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    page.get_by_text(f"deskside search {folder} --resume").wait_for()
    settled(page)
    page.close()
