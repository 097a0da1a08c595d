"""A real headless Chromium with the real `deskside dashboard`, for the browser tests."""

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deskside.dashboard.page import FIRST_PAGE
from tests.train.tiny_run import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
DRAWN = (
    "!document.querySelector('[data-testid=stSkeleton]') && "
    "[...document.querySelectorAll('[data-testid=stPlotlyChart]')].every(e => e.querySelector('.main-svg'))"
)


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """Run `deskside dashboard` for a directory and yield its address once it answers. It must print no traceback."""
    port = str(free_port())  # not the default, which other test processes may take at the same time
    command = [sys.executable, "-m", "deskside", "dashboard", str(root), "--port", port]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        _wait(found.group())
        yield found.group()
        server.terminate()
        said = server.communicate(timeout=30)[0]
    assert "Traceback" not in said, said


def _wait(address: str) -> None:
    """Wait until the server answers, at most a minute. It listens a moment after it has said where."""
    for _ in range(1200):
        with suppress(OSError), urllib.request.urlopen(f"{address}/_stcore/health", timeout=5):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{address} does not answer")


def opened(
    browser: "Browser",
    address: str,
    name: str,
    query: str = "",
    size: dict[str, int] = DESKTOP,
    scheme: str = "light",
) -> "Page":
    """Open a page of the dashboard by its name and wait until it is drawn.
    Console messages are collected as in `watched`.
    """
    page = watched(browser, size, scheme)
    url = f"{address}/{'' if name == FIRST_PAGE.name else name}{query}"
    page.goto(url)
    settled(page)
    return page


def watched(browser: "Browser", size: dict[str, int] = DESKTOP, scheme: str = "light") -> "Page":
    """Return a new page. `page.wrong` collects failed scripts, console errors and
    requests without a successful answer, except those that ended because the page was left.
    """
    page = browser.new_page(viewport=size, color_scheme=scheme, accept_downloads=True)  # type: ignore[arg-type]
    wrong: list[str] = []
    page.wrong = wrong  # type: ignore[attr-defined]

    def failed(request: "Request") -> None:
        if request.failure != "net::ERR_ABORTED":
            wrong.append(f"{request.failure} {request.url}")

    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console", lambda said: wrong.append(f"{said.text} {said.location}") if said.type == "error" else None
    )
    page.on("requestfailed", failed)
    page.on("response", lambda got: wrong.append(f"{got.status} {got.url}") if got.status >= 400 else None)
    return page


def settled(page: "Page") -> None:
    """Wait until everything is drawn. Assert that the page has no exception and no error."""
    drawn(page)
    assert page.locator('[data-testid="stException"]').count() == 0
    assert not page.wrong, page.wrong  # type: ignore[attr-defined]


def drawn(page: "Page") -> None:
    """Wait until Streamlit has drawn everything: no script is running, and every chart has an image.

    Raises AssertionError with what the page shows if that takes longer than a minute.
    """
    from playwright.sync_api import TimeoutError as PageTimeout

    try:
        page.locator('[data-testid="stMain"] :is(h1, h2)').first.wait_for(timeout=60_000)
        page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=60_000)
        page.wait_for_function(DRAWN, timeout=60_000)
    except PageTimeout as error:
        raise AssertionError(f"{error}\nthe page shows: {page.locator('body').inner_text()}") from error


def fits(page: "Page") -> bool:
    """Return True if the page does not scroll sideways."""
    wide = page.evaluate(
        "[document.scrollingElement, document.querySelector('[data-testid=stMain]')]"
        ".map(e => e ? e.scrollWidth - e.clientWidth : 0)"
    )
    return max(wide) <= 0


def serious_faults(page: "Page") -> list[str]:
    """Return the violations that axe-core rates serious or critical, except `FAULTS_OF_STREAMLIT`."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    # Preloading requests the style sheets again, which pages opened as files refuse with a console error. It serves
    # only an unimportant rule about locked orientation.
    options = {"resultTypes": ["violations"], "preload": False}
    return [
        f"{rule['id']}: {node['html']}"
        for rule in axe.run(page, options=options).response["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
