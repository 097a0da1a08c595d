"""The page that `deskside dashboard` serves: streamlit runs this file anew at every click. DIR is its only argument."""

import sys
from importlib import import_module
from pathlib import Path

import streamlit as st

from deskside.dashboard import cache, sidebar
from deskside.dashboard.sidebar import Context

# Each is tab_<name>.py beside this file, imported when it is first opened: pandas, plotly and the planner take seconds.
TABS = ("Overview", "Memory", "Performance", "Efficiency", "Results", "Insights", "Live", "Planner")
STYLE = """<style>
[data-testid="stMainBlockContainer"] {padding: 2.5rem 1.5rem 3rem 1.5rem}
@media (max-width: 640px) {[data-testid="stMainBlockContainer"] {padding: 3rem 0.75rem 2rem 0.75rem}}
</style>"""


def main(root: Path) -> None:
    """Draw the page. Only the open tab is computed; which one that is stands in the address."""
    # No icon of streamlit's: the browser would fetch it from elsewhere.
    st.set_page_config(page_title="deskside", layout="wide")
    st.html(STYLE)
    found = cache.found(str(root))
    context = Context(root, found, sidebar.show(root, found))
    for name, tab in zip(TABS, st.tabs(TABS, key="tab", on_change="rerun", bind="query-params"), strict=True):
        if tab.open:
            with tab:
                import_module(f"deskside.dashboard.tabs.tab_{name.lower()}").show(context)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
