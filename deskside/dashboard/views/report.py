"""Page of the report of a run, a study or a search, as `deskside report` wrote it. A new report replaces the old."""

import shlex
from pathlib import Path

import streamlit as st

from deskside.dashboard import file_cache
from deskside.dashboard.live import rerun_when_changed
from deskside.dashboard.notes import empty_state
from deskside.dashboard.scan import name_below, stamp
from deskside.dashboard.sidebar import Context, literal

REPORT = "report.html"
HEIGHT = 760  # pixels, so that the frame scrolls on a screen of 900
# A report may come from another person. With this policy, its frame runs no script and loads nothing.
POLICY = (
    '<!doctype html><meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "style-src 'unsafe-inline'; img-src data:; font-src data:; base-uri 'none'; form-action 'none'\">"
)


def show(context: Context) -> None:
    """Draw the page. Its name is in the address."""
    scan = context.scan
    rerun_when_changed(lambda: file_cache.scan_result(str(context.root)))
    st.title("Report")
    found = {name_below(run.path, context.root): run.path for run in scan.runs}
    others = (*scan.studies, *scan.searches)
    found |= {name_below(path, context.root): path for path in others}
    if not found:
        empty_state(context)
        return
    name = st.selectbox("report of", sorted(found), key="of", bind="query-params")
    path = found[name] / REPORT
    rerun_when_changed(lambda: stamp(found[name], REPORT))
    page = _read(path)
    if page is None:
        st.info(f"{literal(name)} has no report yet. This command writes it:")
        st.code(f"deskside report {shlex.quote(str(found[name]))}", language=None, wrap_lines=True)
        return
    st.download_button(
        "Download report.html", page, f"{found[name].name}.html", "text/html", on_click="ignore"
    )
    st.iframe(POLICY + page, height=HEIGHT, alt=f"report of {name}")


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return None
