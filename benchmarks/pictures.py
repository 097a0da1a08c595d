"""Pictures of everything that people look at, on a desktop and a phone, light and dark.

    python -m benchmarks.pictures --unpack WORK        measured runs and studies of docs/data, with their reports
    python -m benchmarks.pictures WORK OUT             pages of WORK's dashboard and reports, the chat page, the site
    python -m benchmarks.pictures WORK OUT --only run  those with "run" in the name
    python -m benchmarks.pictures WORK OUT --docs      the same, and those of the README and the guides to docs/images
    python -m benchmarks.contact_sheet SHEET OUT       all of them on one image

For pictures of a pipeline and of a run that goes on, start `deskside go --preset demo --hours 0.05 --runs WORK/runs`
before. The site is that of `make docs`. Every page is also checked: the command ends with 1 and a list if one has a
message in the browser's console, a serious fault by axe-core, or scrolls sideways. It needs playwright, axe and
chromium.
"""

import argparse
import gzip
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page

from benchmarks.contact_sheet import FORMS, SIZES
from benchmarks.dashboard import browsing
from deskside.dashboard.page import FIRST_PAGE, PAGES
from tests.dashboard.browsing import arrive, drawn, fits, serious_faults, serving, watched
from tests.serve import chat_pictures

DOCS = Path(__file__).parents[1] / "docs"
SITE = DOCS.parent / "build" / "site"
SITE_PAGES = (
    "index", "tutorial", "features", "guides/own-text", "guides/results", "cards/index", "cards/rtx4090",
    "architecture", "performance", "records", "reference/commands", "reference/configuration",
)  # fmt: skip
RUNS = "2026-11-24-recipe/runs.tar.xz"  # NAME.run.json, NAME.metrics.jsonl and NAME.summary.json
ALIGNED_RUNS = "2026-11-22-release/align"
STUDIES = "2026-11-23-claims/studies.tar.zst"
COMPARED = ("runs/base-1", "runs/multi-1", "runs/tied-1")
STUDY = "studies/sixteen"
REPORTS = (COMPARED[0], "runs/demo", "runs/chat-dpo", STUDY, "studies/layout")
# Pictures of the documentation: file in docs/images, picture.
IN_DOCS = {
    "dashboard-light": "dashboard-run-compared-desktop-light",
    "dashboard-dark": "dashboard-run-compared-desktop-dark",
    "dashboard-planner": "dashboard-planner-desktop-light",
    "dashboard-summary": "dashboard-summary-desktop-light",
    "dashboard-trade_offs": "dashboard-trade_offs-desktop-light",
    "serve": "chat-rich-desktop-light",
}
PALETTE_COLORS = 256  # text and plots stay sharp, and the file is a third of the size
MAX_HEIGHT = 12_000  # pixels, of a whole page
SETTLE_MS = 1000  # charts are drawn after a page says that it is done
CONTENT_HEIGHT = """Math.max(document.documentElement.scrollHeight,
  document.querySelector('[data-testid=stMain]')?.scrollHeight ?? 0)"""


@dataclass(frozen=True)
class Shot:
    """A picture to take. address: a URL, or that of a page of the dashboard without the server's."""

    name: str
    address: str


def unpack(work: Path) -> None:
    """Write the runs and studies that docs/data holds, with their reports."""
    with tarfile.open(DOCS / "data" / RUNS) as archive:
        for member in archive.getmembers():
            name, _, file = member.name.partition(".")
            content = archive.extractfile(member)
            if content is not None:
                _write(work / "runs" / name / file, content.read())
    for path in (DOCS / "data" / ALIGNED_RUNS).glob("chat*/*.json*"):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        _write(work / "runs" / path.parent.name / path.name.removesuffix(".gz"), content)
    subprocess.run(["tar", "--zstd", "-xf", DOCS / "data" / STUDIES, "-C", work], check=True)
    for name in REPORTS:
        if (work / name).exists():
            subprocess.run([sys.executable, "-m", "deskside", "report", work / name], check=True)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def dashboard_shots() -> Iterator[Shot]:
    """Yield every page of the dashboard, and the other contents of a run's page."""
    run = urlencode({"run": COMPARED[0]})
    queries = {"run": run, "report": urlencode({"of": STUDY})}
    for spec in PAGES:
        query = urlencode({"study": STUDY}) if spec.of_study else queries.get(spec.name, "")
        path = "" if spec is FIRST_PAGE else spec.name
        yield Shot(f"dashboard-{spec.name}", f"{path}?{query}")
    yield Shot("dashboard-run-compared", f"run?{urlencode([('run', name) for name in COMPARED])}")
    for part in ("Samples", "Configuration", "Events"):
        yield Shot(f"dashboard-run-{part.lower()}", f"run?{run}&part={part}")


def report_shots(work: Path) -> Iterator[Shot]:
    """Yield the reports."""
    for name in REPORTS:
        yield Shot(f"report-{Path(name).name}", (work / name / "report.html").resolve().as_uri())


def site_shots() -> Iterator[Shot]:
    """Yield a page of each kind of the documentation."""
    for name in SITE_PAGES:
        yield Shot(f"site-{name.replace('/', '-')}", f"{name}.html")


@contextmanager
def serving_site() -> Iterator[str]:
    """Serve the documentation, whose search needs a server, and yield the address."""
    command = [
        sys.executable,
        "-u",
        "-m",
        "http.server",
        "0",
        "--bind",
        "127.0.0.1",
        "--directory",
        str(SITE),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://[^/]+", server.stdout.readline())
        assert found, "http.server did not start"
        yield found.group()
        server.terminate()


class Camera:
    """Takes pictures of pages in every form, and collects what is wrong with the pages.

    whole: show whole pages and not only the first screen. faults: a line for each fault.
    """

    def __init__(self, browser: Browser, folder: Path, whole: bool):
        self.faults: list[str] = []
        self._browser, self._folder, self._whole = browser, folder, whole

    def take(self, name: str, url: str, wait: Callable[[Page], None]) -> None:
        """Take the pictures of one page. wait: returns when an open page is drawn."""
        for form, scheme in FORMS:
            page = watched(self._browser, SIZES[form], scheme)
            arrive(page, url)
            wait(page)
            if self._whole:
                height = min(MAX_HEIGHT, max(SIZES[form]["height"], page.evaluate(CONTENT_HEIGHT)))
                page.set_viewport_size({"width": SIZES[form]["width"], "height": height})
                wait(page)
            path = self._folder / f"{name}-{form}-{scheme}.png"
            page.screenshot(path=path)
            Image.open(path).convert("RGB").quantize(PALETTE_COLORS).save(path, optimize=True)
            faults = [*page.wrong, *serious_faults(page)]  # type: ignore[attr-defined]
            faults += [] if fits(page) else ["it scrolls sideways"]
            self.faults += [f"{path.stem}: {fault}" for fault in faults]
            page.close()


def settle_file(page: Page) -> None:
    """Wait until a page of a file is drawn."""
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(SETTLE_MS // 2)


def settle_dashboard(page: Page) -> None:
    """Wait until a page of the dashboard is drawn."""
    drawn(page)
    page.wait_for_timeout(SETTLE_MS)


def take_all(work: Path, folder: Path, only: str, whole: bool) -> list[str]:
    """Take all pictures with `only` in their names, and return the faults of the pages."""
    folder.mkdir(parents=True, exist_ok=True)
    with browsing() as browser:
        camera = Camera(browser, folder, whole)
        for shot in report_shots(work):
            if only in shot.name:
                camera.take(shot.name, shot.address, settle_file)
        for shots, server, settle in (
            (site_shots(), serving_site(), settle_file),
            (dashboard_shots(), serving(work), settle_dashboard),
        ):
            if wanted := [shot for shot in shots if only in shot.name]:
                with server as address:
                    for shot in wanted:
                        camera.take(shot.name, f"{address}/{shot.address}", settle)
        if only in "chat-":
            camera.faults += chat_pictures.take_all(browser, folder)
        return camera.faults


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, metavar="WORK", help="directory of runs/ and studies/")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="folder of the pictures")
    parser.add_argument("--unpack", action="store_true", help="fill WORK instead")
    parser.add_argument("--only", default="", metavar="PART", help="take those with this in their names")
    parser.add_argument("--whole", action="store_true", help="show whole pages, not only the first screen")
    parser.add_argument("--docs", action="store_true", help="copy those of the documentation to docs/images")
    options = parser.parse_args()
    if options.unpack:
        unpack(options.work)
        return
    if options.out is None:
        parser.error("OUT is missing")
    faults = take_all(options.work, options.out, options.only, options.whole)
    for name, picture in IN_DOCS.items() if options.docs else ():
        image = Image.open(options.out / f"{picture}.png").convert("RGB").quantize(PALETTE_COLORS)
        image.save(DOCS / "images" / f"{name}.png", optimize=True)
    print("\n".join(faults) or "no message in a console, no serious fault, nothing scrolls sideways")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
