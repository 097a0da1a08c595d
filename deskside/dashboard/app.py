"""The page that `deskside dashboard` serves: streamlit runs this file anew at every click. DIR is its only argument."""

import sys
from pathlib import Path

import streamlit as st

from deskside.dashboard import (
    cached,
    sidebar,
    tab_efficiency,
    tab_insights,
    tab_live,
    tab_memory,
    tab_overview,
    tab_performance,
    tab_planner,
    tab_results,
)
from deskside.dashboard.cached import Context

TABS = {
    "Overview": tab_overview.show,
    "Memory": tab_memory.show,
    "Performance": tab_performance.show,
    "Efficiency": tab_efficiency.show,
    "Results": tab_results.show,
    "Insights": tab_insights.show,
    "Live": tab_live.show,
    "Planner": tab_planner.show,
}
STYLE = """<style>
[data-testid="stMainBlockContainer"] {padding: 2.5rem 1.5rem 3rem 1.5rem}
@media (max-width: 640px) {[data-testid="stMainBlockContainer"] {padding: 3rem 0.75rem 2rem 0.75rem}}
</style>"""


def main(root: Path) -> None:
    """Draw the page. Only the open tab is computed; which one that is stands in the address."""
    st.set_page_config(page_title="deskside", page_icon=":material/monitoring:", layout="wide")
    st.html(STYLE)
    found = cached.found(str(root))
    context = Context(root, found, sidebar.show(root, found))
    for name, tab in zip(
        TABS, st.tabs(list(TABS), key="tab", on_change="rerun", bind="query-params"), strict=True
    ):
        if tab.open:
            with tab:
                TABS[name](context)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
