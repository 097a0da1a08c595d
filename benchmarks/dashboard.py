"""Start-up time of the dashboard with many runs, screenshots of its pages, and a contact sheet of pictures.

    python -m benchmarks.dashboard                              create a directory of 1,000 runs and time it
    python -m benchmarks.dashboard --screenshots DIR            every page in four forms, of a synthetic directory
    python -m benchmarks.dashboard --screenshots DIR --of work  the same, of a directory of studies and runs
    python -m benchmarks.dashboard --sheet FILE DIR...          all pictures NAME-FORM-SCHEME.png of folders on one

The forms are desktop-light, desktop-dark, phone-light and phone-dark. It needs playwright, and chromium on the PATH.
Times include the browser's share.
"""

import argparse
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import Browser, Page, sync_playwright

from deskside.dashboard.page import FIRST_PAGE, PAGES
from tests.dashboard import made_up
from tests.dashboard.browsing import DRAWN

SIZES = {"desktop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
FORMS = tuple(itertools.product(SIZES, ("light", "dark")))
PICTURE_NAME = re.compile(r"(.+)-(desktop|phone)-(light|dark)\.png")
PALETTE_COLORS = 256  # text and plots stay sharp, and the file is a third of the size
SHEET_HEIGHT, SHEET_GAP, SHEET_LABEL = 300, 16, 20  # in pixels: of a picture, between pictures, and of a name
RUN_TO_OPEN = "runs/run-0007"


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
    page.wait_for_selector('[data-testid="stMain"] :is(h1, h2)', timeout=60_000)
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=60_000)
    page.wait_for_function(DRAWN, timeout=60_000)


def timed(runs: int) -> dict[str, float]:
    """Return the seconds until pages are drawn for a directory of this many runs: the first page, then others.

    The browser is already open when the command starts, as it usually is for a user.
    """
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        root = Path(folder)
        for number in range(runs):
            made_up.run(root / f"runs/run-{number:04d}", seed=number % 3 + 1)
        pages = (
            ("first page", "", ".runs tbody tr"),
            ("second page", "", ".runs tbody tr"),
            ("page of a run", f"run?run={RUN_TO_OPEN}", ".js-plotly-plot .scatterlayer path"),
        )
        command = time.perf_counter()
        times: dict[str, float] = {}
        with made_up.running(root / "runs/live"), serving(root) as address:
            times["server answers"] = time.perf_counter() - command
            for label, path, drawn in pages:
                page = browser.new_page(viewport=SIZES["desktop"])  # type: ignore[arg-type]
                begun = time.perf_counter()
                page.goto(f"{address}/{path}")
                page.wait_for_selector(drawn)
                settle(page)
                times[label] = time.perf_counter() - begun
                times.setdefault("from the command to the first page", time.perf_counter() - command)
                page.close()
            times["a metric that is written is seen"] = seen_after(browser, address, root / "runs/live")
        return times


def seen_after(browser: Browser, address: str, run: Path) -> float:
    """Return the seconds from writing a step to a run's metrics until the open page of the run shows it."""
    page = browser.new_page(viewport=SIZES["desktop"])  # type: ignore[arg-type]
    page.goto(f"{address}/run?run=runs/{run.name}")
    page.get_by_text("step 40 of 200").wait_for(timeout=60_000)
    settle(page)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(made_up.row(41)) + "\n")
    begun = time.perf_counter()
    page.get_by_text("step 41 of 200").wait_for()
    page.close()
    return time.perf_counter() - begun


def screenshots(folder: Path, of: Path | None) -> None:
    """Take a screenshot of every page in every form. Without `of`, they show a synthetic directory."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        root = of
        if root is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "work"
            made_up.study(root / "studies/made")
            for number in range(3):
                made_up.run(root / f"runs/run-{number}", seed=number + 1)
            stack.enter_context(made_up.running(root / "runs/live"))
        address, browser = stack.enter_context(serving(root)), stack.enter_context(browsing())
        for spec, (form, scheme) in itertools.product(PAGES, FORMS):
            url = f"{address}/{'' if spec is FIRST_PAGE else spec.name}"
            picture(browser, url, form, scheme, folder / f"dashboard-{spec.name}-{form}-{scheme}.png")


def picture(browser: Browser, address: str, form: str, scheme: str, path: Path) -> None:
    """Take a screenshot of one page in a reduced palette."""
    page = browser.new_page(viewport=SIZES[form], color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(address)
    settle(page)
    page.wait_for_timeout(1500)  # charts are drawn after the page reports that it is done
    page.screenshot(path=str(path))
    page.close()
    Image.open(path).convert("RGB").quantize(PALETTE_COLORS).save(path, optimize=True)


def contact_sheet(path: Path, folders: Sequence[Path]) -> None:
    """Write one image of all pictures NAME-FORM-SCHEME.png in the folders: a row per name, a column per form."""
    found: dict[str, dict[tuple[str, str], Path]] = {}
    for file in sorted(file for folder in folders for file in folder.glob("*.png")):
        if match := PICTURE_NAME.fullmatch(file.name):
            found.setdefault(match[1], {})[match[2], match[3]] = file
    if not found:
        raise SystemExit(
            "no picture named NAME-FORM-SCHEME.png, such as runs-phone-dark.png, in these folders"
        )
    widths = [round(SHEET_HEIGHT * SIZES[form]["width"] / SIZES[form]["height"]) for form, _ in FORMS]
    row_height = SHEET_HEIGHT + SHEET_LABEL + SHEET_GAP
    sheet = Image.new(
        "RGB", (sum(widths) + SHEET_GAP * (len(FORMS) + 1), row_height * len(found) + SHEET_GAP), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for row, (name, pictures) in enumerate(found.items()):
        left, top = SHEET_GAP, SHEET_GAP + row * row_height
        draw.text((left, top), name, fill="black")
        for form, width in zip(FORMS, widths, strict=True):
            if form in pictures:
                with Image.open(pictures[form]) as image:
                    shown = image.convert("RGB")  # a picture of a whole page is cut to one screen
                    shown = shown.crop(
                        (0, 0, shown.width, min(shown.height, round(shown.width * SHEET_HEIGHT / width)))
                    )
                    sheet.paste(
                        shown.resize((width, round(shown.height * width / shown.width))),
                        (left, top + SHEET_LABEL),
                    )
            left += width + SHEET_GAP
    sheet.quantize(PALETTE_COLORS).save(path, optimize=True)


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
    parser.add_argument(
        "--sheet", type=Path, metavar="FILE", help="write a contact sheet of the folders instead"
    )
    parser.add_argument(
        "folders", type=Path, nargs="*", metavar="DIR", help="folders of pictures for --sheet"
    )
    options = parser.parse_args()
    if options.sheet is not None:
        contact_sheet(options.sheet, options.folders)
    elif options.screenshots is not None:
        screenshots(options.screenshots, options.of)
    else:
        times = timed(options.runs)
        seconds = {label: round(value, 2) for label, value in times.items()}
        print(json.dumps({"runs": options.runs, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
