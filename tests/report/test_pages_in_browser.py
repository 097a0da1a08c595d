"""Report pages in a headless Chromium: length, first screen, dark mode, phone, print, keyboard and accessibility."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deskside.report import study_figures, study_report
from deskside.report.canvas import Plot
from deskside.report.colors import DARK_FIGURE_COLORS, INK, PAGE_COLORS
from deskside.report.document import Image, render_html
from deskside.report.svg import save
from deskside.report.write import write_report
from deskside.study.results import ClaimResult, Results
from deskside.study.stats.compare import compare
from tests.chromium import launched_chromium
from tests.report.test_run_report import make_run
from tests.study import made

pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
from axe_playwright_python.sync_playwright import Axe

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
VERDICTS = (
    "contradicted",
    "holds",
    "holds in direction",
    "not shown",
    "needs other hardware",
    "not measured",
)


def study(num_groups: int, num_claims: int) -> Results:
    """Return a study with 8 arms in each group. With 5 groups and 168 claims, it
    has the size of the study `claims`.
    """
    one = made.results()
    groups = [
        replace(one.groups[0], name=f"g{n}", title=f"One change at a time, number {n}")
        for n in range(num_groups)
    ]
    arms = [
        replace(arm, id=f"{group.name}-{arm.id}", group=group.name, baseline=f"{group.name}-{arm.baseline}")
        for group in groups
        for arm in one.arms
    ]
    claims = [
        ClaimResult(f"c{n}", f"QK-norm makes perplexity {n}x better", "A guide, Executive Summary", f"{n} times", 1.05,
                    0.995, 1.1, "times", 3, "124m (135M parameters), 10M tokens", VERDICTS[n % len(VERDICTS)],
                    "The interval holds no change at all, and not the claimed one.")
        for n in range(num_claims)
    ]  # fmt: skip
    return replace(compare(replace(one, groups=groups, arms=arms)), claims=claims)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return reports of a large and a small study, both without the folded figures of their groups, and of a run."""
    folder = tmp_path_factory.mktemp("reports")
    paths = {"run": write_report(make_run(folder / "run"))}
    for name, results in (("study", study(5, 168)), ("small", study(1, 6))):
        images = [
            Image(folder / f"{name}-{plot.name}.svg", plot.title, plot.caption)
            for plot in study_figures.draw_overview(results)
            if isinstance(plot, Plot) and save(plot.figure, folder / f"{name}-{plot.name}.svg") is None
        ]
        paths[name] = folder / f"{name}.html"
        document = study_report.compose(results, folder, study_figures.Figures(images), {})
        paths[name].write_text(render_html(document), "utf-8")
    return paths


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with launched_chromium() as launched:
        yield launched


def opened(browser: "Browser", path: Path, size: dict[str, int] = DESKTOP, scheme: Any = "light") -> "Page":
    """Open a report, and check that it loads without console messages and requests nothing but itself."""
    page = browser.new_page(viewport=size, color_scheme=scheme)
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    assert messages == [] and requests == [path.as_uri()]
    return page


def unfold(page: "Page") -> None:
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true })")


def color(page: "Page", selector: str, name: str) -> str:
    """Return a computed color as #rrggbb."""
    value = page.locator(selector).first.evaluate("(element, name) => getComputedStyle(element)[name]", name)
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", value)[:3])


def bottom(page: "Page", selector: str) -> float:
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    return box["y"] + box["height"]


def test_a_study_fits_few_screens_and_answers_on_the_first(
    browser: "Browser", pages: dict[str, Path]
) -> None:
    page = opened(browser, pages["study"])
    assert page.evaluate("document.documentElement.scrollHeight") <= 6000
    assert bottom(page, ".verdict") < bottom(page, ".chips") < bottom(page, "nav") < 450
    # the arms that are shown to be better, group by group
    assert bottom(page, "main table") < DESKTOP["height"]
    links = page.locator("nav a").all()
    assert [link.inner_text() for link in links] == page.locator("h2").all_inner_texts()
    links[-1].click()
    assert page.evaluate("window.scrollY") > 0
    page.locator("summary", has_text="contradicted").focus()
    page.keyboard.press("Enter")
    assert page.locator("details[open] tbody tr").count() == 168 / len(VERDICTS)
    page.close()


def test_a_run_answers_on_the_first_screen(browser: "Browser", pages: dict[str, Path]) -> None:
    page = opened(browser, pages["run"])
    assert bottom(page, ".numbers") < 450 and bottom(page, "figure") < DESKTOP["height"]
    assert page.evaluate("document.documentElement.scrollHeight") <= 6000
    page.close()


@pytest.mark.parametrize("name", [pytest.param("small", marks=pytest.mark.full), "run"])
def test_axe_finds_no_serious_fault(browser: "Browser", pages: dict[str, Path], name: str) -> None:
    page = opened(browser, pages[name])
    unfold(page)
    for scheme, options in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        faults = Axe().run(page, options=options).response["violations"]
        serious = [fault for fault in faults if fault["impact"] in ("serious", "critical")]
        assert serious == [], [(fault["id"], fault["nodes"][0]["html"]) for fault in serious]
    page.close()


@pytest.mark.parametrize("name", ["study", pytest.param("run", marks=pytest.mark.full)])
def test_nothing_scrolls_sideways_on_a_phone(browser: "Browser", pages: dict[str, Path], name: str) -> None:
    page = opened(browser, pages[name], PHONE)
    for _ in range(2):
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        unfold(page)
    page.close()


@pytest.mark.parametrize("name", ["study", pytest.param("run", marks=pytest.mark.full)])
def test_dark_pages_have_dark_figures_and_paper_is_light(
    browser: "Browser", pages: dict[str, Path], name: str
) -> None:
    page = opened(browser, pages[name], scheme="dark")
    assert color(page, "body", "backgroundColor") == PAGE_COLORS["page"][1]
    assert color(page, "figure svg text", "fill") == DARK_FIGURE_COLORS[INK]
    page.emulate_media(media="print")
    assert color(page, "body", "color") == PAGE_COLORS["text"][0]
    assert color(page, "figure svg text", "fill") == INK
    printed = page.locator("details.printed tbody tr").first
    assert not printed.evaluate("row => row.closest('details').open") and printed.is_visible()
    closed = page.locator("details:not(.printed) table").first
    assert not closed.is_visible()
    num_pages = len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4")))
    assert num_pages <= {"study": 20, "run": 6}[name]
    page.close()
