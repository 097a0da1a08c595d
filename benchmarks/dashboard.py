"""Start-up time of the dashboard with many runs, and screenshots of its tabs.

    python -m benchmarks.dashboard                            create a directory of 1,000 runs and time it
    python -m benchmarks.dashboard --screenshots docs/images  a screenshot of every tab, of a synthetic study
    python -m benchmarks.dashboard --screenshots docs/images --of studies/claims --group "Attention heads"

It needs playwright and chromium on the PATH. Times include the browser's share.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from deskside.dashboard.page import PAGES
from tests.dashboard import made_up

DESKTOP, PHONE = {"width": 1280, "height": 1000}, {"width": 390, "height": 844}
PALETTE_COLORS = 256  # text and plots stay sharp, and the file is a third of the size
MAX_BYTES = 150_000  # of a screenshot
PHONE_PAGE = "trade_offs"


@contextlib.contextmanager
def serving(root: Path) -> Iterator[str]:
    """Run `deskside dashboard` for a directory and yield its address once it answers."""
    command = [sys.executable, "-m", "deskside", "dashboard", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if "http" not in line:
                raise SystemExit(f"the dashboard did not start: {line}")
            address = next(word for word in line.split() if word.startswith("http"))
            wait(address, server)
            yield address
        finally:
            server.terminate()
            server.communicate()  # read the remaining output, otherwise the process would block on its pipe


def wait(address: str, server: "subprocess.Popen[str]") -> None:
    """Wait until the server answers. Raises SystemExit if it ends first."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/_stcore/health", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the dashboard ended before it answered")


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """Run a headless chromium."""
    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("chromium is not on the PATH; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


def settle(page: Page) -> None:
    """Wait until streamlit has drawn everything: nothing is running, and every chart has an image."""
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=60_000)
    page.wait_for_function(
        "!document.querySelector('[data-testid=stSkeleton]') && "
        "[...document.querySelectorAll('[data-testid=stPlotlyChart]')].every(e => e.querySelector('.main-svg'))",
        timeout=60_000,
    )


def timed(runs: int) -> dict[str, float]:
    """Return the seconds until pages are drawn for a directory of this many runs: the first page, then others.

    The browser is already open when the command starts, as it usually is for a user.
    """
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        root = Path(folder)
        for number in range(runs):
            made_up.run(root / f"runs/run-{number:04d}", seed=number % 3 + 1)
        command = time.perf_counter()
        times: dict[str, float] = {}
        with serving(root) as address:
            times["server answers"] = time.perf_counter() - command
            for label, path in (
                ("first page", ""),
                ("second page", ""),
                ("page of a run", "run?run=runs/run-0007"),
            ):
                page = browser.new_page(viewport=DESKTOP)
                begun = time.perf_counter()
                page.goto(f"{address}/{path}")
                page.wait_for_selector("text=loss, nats per token" if path else "text=Rows as CSV")
                settle(page)
                times[label] = time.perf_counter() - begun
                times.setdefault("from the command to the first page", time.perf_counter() - command)
                page.close()
        return times


def screenshots(folder: Path, of: Path | None, group: str | None) -> None:
    """Take a screenshot of every tab, and one at the size of a phone. Without `of`, they show a synthetic study.

    group: title of the group to show, if the study has several.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        if of is not None:
            with serving(of) as address, browsing() as browser:
                _all_tabs(browser, address, folder, group)
            return
        root = Path(place) / "work"
        made_up.study(root / "studies/made")
        for number in range(3):
            made_up.run(root / f"runs/run-{number}", seed=number + 1)
        with made_up.running(root / "runs/live"), serving(root) as address, browsing() as browser:
            _all_tabs(browser, address, folder, None)


def _all_tabs(browser: Browser, address: str, folder: Path, group: str | None) -> None:
    for spec in PAGES:
        picture(browser, f"{address}/{spec.name}", DESKTOP, folder / f"dashboard-{spec.name}.png", group)
    picture(browser, f"{address}/{PHONE_PAGE}", PHONE, folder / "dashboard-phone.png", group)


def picture(browser: Browser, address: str, size: dict[str, int], path: Path, group: str | None) -> None:
    """Take a screenshot of one page in a reduced palette, with this group selected if the page offers a choice."""
    page = browser.new_page(viewport=size)  # type: ignore[arg-type]
    page.goto(address)
    page.wait_for_selector("h2, h3")
    settle(page)
    picker = page.get_by_role("combobox", name="group, one of")
    if group is not None and picker.count():
        picker.click()
        page.get_by_role("option", name=group).click()
        page.mouse.move(0, 0)
        picker.blur()
        page.wait_for_timeout(500)
        settle(page)
    page.wait_for_timeout(1500)  # charts are drawn after the page reports that it is done
    page.screenshot(path=str(path), full_page=False)
    page.close()
    Image.open(path).convert("RGB").quantize(PALETTE_COLORS).save(path, optimize=True)
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(
            f"{path}: {path.stat().st_size:,} bytes; a screenshot may have at most {MAX_BYTES:,}"
        )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000, help="number of runs in the timed directory")
    parser.add_argument(
        "--screenshots", type=Path, metavar="DIR", help="write screenshots to this folder instead"
    )
    parser.add_argument("--of", type=Path, metavar="DIR", help="take the screenshots of this directory")
    parser.add_argument("--group", metavar="TITLE", help="group to show, if the study has several")
    options = parser.parse_args()
    if options.screenshots is not None:
        screenshots(options.screenshots, options.of, options.group)
        return
    times = timed(options.runs)
    print(json.dumps({"runs": options.runs, "seconds": {k: round(v, 2) for k, v in times.items()}}, indent=1))


if __name__ == "__main__":
    main()
