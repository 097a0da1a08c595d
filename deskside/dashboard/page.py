"""The pages of `deskside dashboard`. Streamlit runs this file again after every click. Its only argument is DIR."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import streamlit as st

from deskside.dashboard import file_cache, sidebar, theme
from deskside.dashboard.live import rerun_when_changed
from deskside.dashboard.runs import progress
from deskside.dashboard.scan import stamp
from deskside.dashboard.sidebar import Context, StudySelection, literal
from deskside.utils.format import plural


@dataclass(frozen=True)
class PageSpec:
    """A page of the dashboard.

    Attributes:
        name: Its module in views/, which is imported when the page is first opened (pandas, plotly and the planner take
            seconds). It is also the path of the page's address, except for the first page, whose path is empty. The
            folder is not called pages/, because Streamlit would make a page of each file in it.
        section: Heading above the page in the navigation.
        of_study: True if the page shows the study that is selected in the sidebar.
        filters_arms: False for a page of a study that shows no arms, so that the filters of arms would do nothing.
    """

    name: str
    title: str
    section: str = ""
    of_study: bool = False
    filters_arms: bool = True


PAGES = (
    PageSpec("runs", "Runs and studies"),
    PageSpec("run", "Run"),
    PageSpec("search", "Search"),
    PageSpec("report", "Report"),
    PageSpec("summary", "Summary", "Study", of_study=True),
    PageSpec("metrics", "Metrics", "Study", of_study=True),
    PageSpec("trade_offs", "Trade-offs", "Study", of_study=True),
    PageSpec("tables", "Tables", "Study", of_study=True),
    PageSpec("claims", "Claims", "Study", of_study=True, filters_arms=False),
    PageSpec("planner", "Planner", "Tools"),
    PageSpec("learning", "Techniques", "Tools"),
)
FIRST_PAGE = PAGES[0]


def main(root: Path) -> None:
    """Draw the page of the browser's address."""
    scan = file_cache.scan_result(str(root))
    pages: dict[str, st.Page] = {}
    for spec in PAGES:
        pages[spec.name] = st.Page(
            _drawing(spec, root, pages),
            title=spec.title,
            url_path="" if spec is FIRST_PAGE else spec.name,
            default=spec is FIRST_PAGE,
        )
    # The pages have no icons: the browser would fetch that of its tab from the network. They are in one list, because
    # Streamlit puts the headings of several between the list and its items, where a screen reader expects no other.
    page = st.navigation(list(pages.values()), expanded=True)
    pages["study"] = pages[next(spec.name for spec in PAGES if spec.of_study)]
    st.set_page_config(page_title=f"{page.title} · deskside", layout="wide")
    theme.apply([spec.name for spec in PAGES if spec is not FIRST_PAGE], _headings())
    with st.sidebar:
        name = root.name or str(root)
        counts = f"{plural(len(scan.runs), 'run')}, {plural(len(scan.standalone_studies), 'study')}"
        counts += f", {plural(len(scan.searches), 'search')}" if scan.searches else ""
        st.caption(f"`{name}`: {counts}", help=str(root))
    page.run()


def _headings() -> dict[str, str]:
    """Return the heading of each section by the name of its first page."""
    first: dict[str, str] = {}
    for spec in PAGES:
        first.setdefault(spec.section, spec.name)
    return {name: section for section, name in first.items() if section}


def _drawing(spec: PageSpec, root: Path, pages: Mapping[str, st.Page]) -> Callable[[], None]:
    """Return the function that draws a page."""

    def draw() -> None:
        scan = file_cache.scan_result(str(root))
        selection = None
        if spec.of_study:
            rerun_when_changed(lambda: file_cache.scan_result(str(root)).studies)
            selection = sidebar.show(root, scan, spec.filters_arms)
        if selection is not None:
            folder = selection.folder
            rerun_when_changed(lambda: _study_state(folder))
            if not selection.unfiltered.complete:
                st.fragment(run_every=file_cache.REFRESH_SECONDS)(_draw_running)(selection)
        import_module(f"deskside.dashboard.views.{spec.name}").show(Context(root, scan, selection, pages))

    return draw


def _draw_running(selection: StudySelection) -> None:
    """Draw how far the running trials of a study are."""
    for arm in selection.unfiltered.arms:
        for trial in arm.trials:
            if trial.status == "running" and trial.run:
                run = selection.folder / trial.run
                state = progress(file_cache.brief(run), file_cache.newest_metrics(run))
                bpb = state.values.get("val_bpb")
                quality = "" if bpb is None else f"; {bpb:.4f} bits per byte"
                said = f"{arm.label}, seed {trial.seed}: {state.text}{quality}"
                st.progress(state.share or 0.0, text=literal(said))


def _study_state(folder: Path) -> object:
    """Return what changes when a trial begins or ends, or a report is written."""
    read = file_cache.study(folder)
    results = read.results if read is not None else None
    if results is None:
        return None
    statuses = [[trial.status for trial in arm.trials] for arm in results.arms]
    return results.updated, results.complete, statuses, stamp(folder, "report.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
