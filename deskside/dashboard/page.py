"""The page of `deskside dashboard`. Streamlit runs this file again after every click. Its only argument is DIR."""

import sys
from importlib import import_module
from pathlib import Path

import streamlit as st

from deskside.dashboard import file_cache, sidebar
from deskside.dashboard.sidebar import Context

# Each tab is tabs/tab_<name>.py, imported when it is first opened: pandas, plotly and the planner take seconds.
TABS = ("Overview", "Memory", "Performance", "Efficiency", "Results", "Insights", "Live", "Planner")
STYLE = """<style>
[data-testid="stMainBlockContainer"] {padding: 2.5rem 1.5rem 3rem 1.5rem}
@media (max-width: 640px) {[data-testid="stMainBlockContainer"] {padding: 3rem 0.75rem 2rem 0.75rem}}
</style>"""


def main(root: Path) -> None:
    """Draw the page. Only the open tab is computed; its name is in the query string of the address."""
    # Sets no page icon: the browser would fetch Streamlit's icons from the network.
    st.set_page_config(page_title="deskside", layout="wide")
    st.html(STYLE)
    scan = file_cache.scan_result(str(root))
    context = Context(root, scan, sidebar.show(root, scan))
    for name, tab in zip(TABS, st.tabs(TABS, key="tab", on_change="rerun", bind="query-params"), strict=True):
        if tab.open:
            with tab:
                import_module(f"deskside.dashboard.tabs.tab_{name.lower()}").show(context)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
