"""Start-up time of the dashboard with many runs. Times include the browser's share.

    python -m benchmarks.dashboard              create a directory of 1,000 runs and time it

It needs playwright and chromium. Pictures of the pages are taken by benchmarks/pictures.py.
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser

from benchmarks.contact_sheet import SIZES
from tests.chromium import CHROMIUM, launched_chromium
from tests.dashboard import made_up
from tests.dashboard.browsing import drawn, serving

RUN_TO_OPEN = "runs/run-0007"


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """Run a headless chromium."""
    if CHROMIUM is None:
        raise SystemExit("chromium is not on the PATH; on Debian: apt-get install chromium")
    with launched_chromium() as browser:
        yield browser


def timed(runs: int, steps: int) -> dict[str, float]:
    """Return the seconds until pages are drawn for a directory of runs of so many steps: the first page, then others.

    The browser is already open when the command starts, as it usually is for a user.
    """
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        root = Path(folder)
        for number in range(runs):
            made_up.run(root / f"runs/run-{number:04d}", steps, steps, seed=number % 3 + 1)
        pages = (
            ("first page", "", ".runs tbody tr"),
            ("second page", "", ".runs tbody tr"),
            ("page of a run", f"run?run={RUN_TO_OPEN}", ".js-plotly-plot .scatterlayer path"),
        )
        command = time.perf_counter()
        times: dict[str, float] = {}
        with made_up.running(root / "runs/live"), serving(root) as address:
            times["server answers"] = time.perf_counter() - command
            for label, path, selector in pages:
                page = browser.new_page(viewport=SIZES["desktop"])  # type: ignore[arg-type]
                begun = time.perf_counter()
                page.goto(f"{address}/{path}")
                page.wait_for_selector(selector)
                drawn(page)
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
    drawn(page)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(made_up.row(41)) + "\n")
    begun = time.perf_counter()
    page.get_by_text("step 41 of 200").wait_for()
    page.close()
    return time.perf_counter() - begun


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000, help="number of runs in the timed directory")
    parser.add_argument("--steps", type=int, default=60, help="logged steps of each of them")
    options = parser.parse_args()
    times = timed(options.runs, options.steps)
    seconds = {label: round(value, 2) for label, value in times.items()}
    print(json.dumps({"runs": options.runs, "steps": options.steps, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
