"""Pictures of everything that people look at, on a desktop and a phone, light and dark.

    python -m benchmarks.pictures --prepare WORK       measured runs and studies of docs/data; go and search on the CPU
    python -m benchmarks.pictures WORK OUT             pages of WORK's dashboard and reports, the chat page, the site
    python -m benchmarks.pictures WORK OUT --only run  those with "run" in the name
    python -m benchmarks.pictures WORK OUT --docs      the same, and those of the README and the guides to docs/images
    python -m benchmarks.contact_sheet SHEET OUT       all of them on one image

--prepare takes ten minutes on two cores. A run and a search are started for the pictures of running ones, and removed.
The site is that of `make docs`. Every page is also checked: the command ends with 1 and a list if one has an error on
the browser's console, a request without a good answer, a serious fault by axe-core, or scrolls sideways. It needs
playwright, axe and chromium.
"""

import argparse
import gzip
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page

from benchmarks.contact_sheet import FORMS, SIZES
from benchmarks.dashboard import browsing
from deskside.dashboard.page import FIRST_PAGE, PAGES
from deskside.study.search.outcome import read_outcome
from deskside.study.search.search_folder import RESULT
from tests.dashboard.browsing import drawn, fits, serious_faults, serving, watched
from tests.serve import chat_pictures

DOCS = Path(__file__).parents[1] / "docs"
SITE = DOCS.parent / "build" / "site"
RUNS = "2026-11-24-recipe/runs.tar.xz"  # NAME.run.json, NAME.metrics.jsonl and NAME.summary.json
ALIGNED_RUNS = "2026-11-22-release/align"
STUDIES = "2026-11-23-claims/studies.tar.zst"
COMPARED = ("runs/base-1", "runs/multi-1", "runs/tied-1")
STUDY = "studies/sixteen"
PIPELINE, SEARCH = "runs/demo", "searches/demo"  # made by --prepare
MADE = {
    PIPELINE: ["go", "--preset", "demo", "--hours", "0.05", "--yes", "--runs", "runs"],
    SEARCH: ["search", "demo", "--hours", "0.1", "--minutes-per-trial", "0.2", "--out", SEARCH, "--over",
             "optim.lr,batch.tokens,model.depth"],
}  # fmt: skip
REPORTS = (COMPARED[0], PIPELINE, "runs/chat-dpo", STUDY, "studies/layout", SEARCH)
RUNNING, SEARCHING = "runs/running", "searches/running"  # while pictures are taken
LIVE = (
    (RUNNING, ["train", "demo", "--hours", "0.2", "--runs", "runs", "--name", "running"]),
    (SEARCHING, ["search", "demo", "--hours", "0.3", "--minutes-per-trial", "0.1", "--pruner", "none",
                 "--out", SEARCHING, "--over", "optim.lr,batch.tokens"]),
)  # fmt: skip
READY_SECONDS = 300.0  # until the live run was evaluated and trials of the live search have finished
READY_TRIALS = 3
# Pictures of the documentation: file in docs/images, picture.
IN_DOCS = {
    "dashboard-light": "dashboard-run-compared-desktop-light",
    "dashboard-dark": "dashboard-run-compared-desktop-dark",
    "dashboard-planner": "dashboard-planner-desktop-light",
    "dashboard-summary": "dashboard-summary-desktop-light",
    "dashboard-trade_offs": "dashboard-trade_offs-desktop-light",
    "serve": "chat-rich-desktop-light",
}
DESKSIDE = (sys.executable, "-m", "deskside")
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


def prepare(work: Path) -> None:
    """Write the runs and studies that docs/data holds, make a pipeline and a search here, and write all reports."""
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
    for name, arguments in MADE.items():
        if not (work / name).exists():
            subprocess.run([*DESKSIDE, *arguments], cwd=work, check=True)
    for name in REPORTS:
        subprocess.run([*DESKSIDE, "report", work / name], check=True)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def dashboard_shots() -> Iterator[Shot]:
    """Yield every page of the dashboard except for the first one, and the other contents of a run's page."""
    run = urlencode({"run": COMPARED[0]})
    queries = {"run": run, "search": urlencode({"search": SEARCH}), "report": urlencode({"of": STUDY})}
    for spec in PAGES:
        if spec is not FIRST_PAGE:
            query = urlencode({"study": STUDY}) if spec.of_study else queries.get(spec.name, "")
            yield Shot(f"dashboard-{spec.name}", f"{spec.name}?{query}")
    yield Shot("dashboard-run-compared", f"run?{urlencode([('run', name) for name in COMPARED])}")
    pipeline = urlencode({"run": PIPELINE})  # the archive of the others has no events
    for part, query in (("Samples", run), ("Configuration", run), ("Events", pipeline)):
        yield Shot(f"dashboard-run-{part.lower()}", f"run?{query}&part={part}")


def live_shots() -> Iterator[Shot]:
    """Yield the pages of what is running, which is listed on the first page."""
    yield Shot(f"dashboard-{FIRST_PAGE.name}", "")
    yield Shot("dashboard-run-running", f"run?{urlencode({'run': RUNNING})}")
    yield Shot("dashboard-search-running", f"search?{urlencode({'search': SEARCHING})}")


@contextmanager
def serving_live(work: Path) -> Iterator[str]:
    """Run the dashboard beside a run and a search that are running, and yield its address."""
    with ExitStack() as stack:
        for name, arguments in LIVE:
            stack.enter_context(running(work, name, arguments))
        wait_until_ready(work)
        yield stack.enter_context(serving(work))


@contextmanager
def running(work: Path, name: str, arguments: list[str]) -> Iterator[None]:
    """Run a command which makes a directory, and remove it afterwards."""
    shutil.rmtree(work / name, ignore_errors=True)
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([*DESKSIDE, *arguments], cwd=work, stdout=said, stderr=said)
        try:
            yield
            if process.poll() is not None:
                said.seek(0)
                raise SystemExit(
                    f"{' '.join(arguments)} ended before its pictures were taken:\n{said.read()}"
                )
        finally:
            process.terminate()
            process.wait(timeout=120)
            shutil.rmtree(work / name, ignore_errors=True)


def wait_until_ready(work: Path) -> None:
    """Wait until the live run was evaluated and trials of the live search have finished."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        metrics = work / RUNNING / "metrics.jsonl"
        evaluated = metrics.exists() and "val_bpb" in metrics.read_text("utf-8")
        searched = (work / SEARCHING / RESULT).exists()
        if (
            evaluated
            and searched
            and read_outcome(work / SEARCHING).counts().get("finished", 0) >= READY_TRIALS
        ):
            return
        time.sleep(1)
    raise SystemExit(f"{RUNNING} and {SEARCHING} had nothing to show within {READY_SECONDS:.0f} s")


def report_shots(work: Path) -> Iterator[Shot]:
    """Yield the reports."""
    for name in REPORTS:
        shown = "search" if name == SEARCH else Path(name).name
        yield Shot(f"report-{shown}", (work / name / "report.html").resolve().as_uri())


def site_shots() -> Iterator[Shot]:
    """Yield every page of the documentation."""
    for path in sorted(SITE.rglob("*.html")):
        name = path.relative_to(SITE).as_posix()
        if name != "404.html":
            yield Shot(f"site-{name.removesuffix('.html').replace('/', '-')}", name)


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
            page.goto(url)
            wait(page)
            if self._whole:
                height = min(MAX_HEIGHT, max(SIZES[form]["height"], page.evaluate(CONTENT_HEIGHT)))
                page.set_viewport_size({"width": SIZES[form]["width"], "height": height})
                wait(page)
            path = self._folder / f"{name}-{form}-{scheme}.png"
            page.screenshot(path=path)
            in_palette(path).save(path, optimize=True)
            faults = [*page.wrong, *serious_faults(page)]  # type: ignore[attr-defined]
            faults += [] if fits(page) else ["it scrolls sideways"]
            self.faults += [f"{path.stem}: {fault}" for fault in faults]
            page.close()


def in_palette(path: Path) -> Image.Image:
    """Return a picture with few colors. Small marks may lose theirs: orange becomes brown. Backgrounds keep theirs."""
    with Image.open(path) as image:
        return image.convert("RGB").quantize(PALETTE_COLORS)


def settle_file(page: Page) -> None:
    """Wait until a page of a file is drawn."""
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(SETTLE_MS // 2)


def settle_dashboard(page: Page) -> None:
    """Wait until a page of the dashboard is drawn."""
    drawn(page)
    page.wait_for_timeout(SETTLE_MS)
    # A page that is live is drawn again and again.
    page.wait_for_function("!document.querySelector('[data-stale=true]')")


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
            (live_shots(), serving_live(work), settle_dashboard),
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
    parser.add_argument("--prepare", action="store_true", help="fill WORK instead")
    parser.add_argument("--only", default="", metavar="PART", help="take those with this in their names")
    parser.add_argument("--whole", action="store_true", help="show whole pages, not only the first screen")
    parser.add_argument("--docs", action="store_true", help="copy those of the documentation to docs/images")
    options = parser.parse_args()
    if options.prepare:
        prepare(options.work)
        return
    if options.out is None:
        parser.error("OUT is missing")
    faults = take_all(options.work, options.out, options.only, options.whole)
    for name, picture in IN_DOCS.items() if options.docs else ():
        in_palette(options.out / f"{picture}.png").save(DOCS / "images" / f"{name}.png", optimize=True)
    print(
        "\n".join(faults)
        or "no error on a console, no failed request, no serious fault, nothing scrolls sideways"
    )
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
