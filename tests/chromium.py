"""A headless Chromium for all browser tests and scripts, and how long they wait for what a page does."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Longer than any busy machine has needed. How fast a page is belongs in benchmarks/dashboard.py.
WAIT_MILLISECONDS = 60_000


@contextmanager
def launched_chromium() -> Iterator["Browser"]:
    """Run a headless Chromium. Without one or without playwright, the test is skipped."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the PATH")
    sync_api.expect.set_options(timeout=WAIT_MILLISECONDS)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()
