"""First page: the table of runs, studies and searches, with filters. It is drawn again every few seconds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import streamlit as st

from deskside.dashboard import file_cache, run_table, theme
from deskside.dashboard.live import rerun_when_changed
from deskside.dashboard.notes import empty_state, problem_rows
from deskside.dashboard.run_details import cost_text
from deskside.dashboard.run_table import RUN, SEARCH, STUDY, TRIAL, RowFilter, TableRow
from deskside.dashboard.sidebar import Context
from deskside.utils.format import elapsed, percent, plural

KINDS = {
    "runs, studies, searches": {RUN, STUDY, SEARCH},
    "runs": {RUN},
    "studies": {STUDY},
    "searches": {SEARCH},
    "trials": {TRIAL},
}
PAGES = {STUDY: "study", SEARCH: "search"}
SORTED_NUMBERS = ("bpb", "tokens_per_second", "mfu", "seconds", "dollars")


def show(context: Context) -> None:
    """Draw the page."""
    rows, problems = _rows(context.root), problem_rows(context)
    st.title("Runs and studies")
    if not rows and not problems:
        rerun_when_changed(lambda: file_cache.scan_result(str(context.root)))
        empty_state(context)
        return
    row_filter = _draw_filters(rows)
    options = _options(rows, problems)

    @st.fragment(run_every=file_cache.REFRESH_SECONDS)
    def refresh() -> None:
        rows = _rows(context.root)
        scan = file_cache.scan_result(str(context.root))
        if _options(rows, problem_rows(replace(context, scan=scan))) != options:
            st.rerun()
        _draw_table(context, rows, row_filter)

    table = st.container()
    first, second = st.columns((1, 3), vertical_alignment="center")
    # Not in the fragment: its file would be replaced between a click and the browser's request for it. And drawn before
    # the table: whoever sees the rows of a new filter and clicks must not ask for the file of the old one, which is
    # gone once the page is drawn.
    first.download_button(
        "Rows as CSV",
        lambda: run_table.to_csv([row for row in _rows(context.root) if row_filter.passes(row)]),
        "runs.csv",
        "text/csv",
        on_click="ignore",
    )
    second.caption(f"Measured. Cost: {run_table.cost_note()}.")
    with table:
        refresh()
    if problems:
        with st.expander(f"{plural(len(problems), 'directory')} could not be read completely"):
            st.dataframe(problems, hide_index=True, width="stretch")


def _rows(root: Path) -> list[TableRow]:
    return file_cache.rows(file_cache.scan_result(str(root)), root)


def _options(rows: list[TableRow], problems: list[dict[str, str]]) -> object:
    """Return what the rest of the page depends on: the values of the filters, and the directories with problems."""
    return {row.kind for row in rows}, run_table.statuses(rows), problems


def _draw_table(context: Context, rows: list[TableRow], row_filter: RowFilter) -> None:
    shown = [row for row in rows if row_filter.passes(row)]
    if not shown:
        st.info("No row passes the filters. Clear one of them.")
        return
    counts = [f"{len(shown):,} of {plural(len(rows), 'row')}"]
    if running := sum(row.status == "running" and row.kind in (RUN, TRIAL) for row in rows):
        counts.append(f"{plural(running, 'run')} training now")
    table_data = {
        "counts": " · ".join(counts),
        "columns": run_table.columns(),
        "rows": [_row_data(row) for row in shown],
        "paths": {name: context.pages[name].url_path for name in ("run", "study", "search")},
    }
    _table()(key="run-table", data=table_data)


def _draw_filters(rows: list[TableRow]) -> RowFilter:
    """Draw the filters, which are also in the page's address."""
    kinds_here = {row.kind for row in rows}
    first, second, third = st.columns((2, 2, 2))
    search = first.text_input(
        "name or details contain", key="contains", bind="query-params", placeholder="for example: bf16"
    )
    kind = second.selectbox(
        "show", [name for name, kinds in KINDS.items() if kinds & kinds_here], key="show", bind="query-params"
    )
    chosen = third.multiselect(
        "status", run_table.statuses(rows), key="status", placeholder="all", bind="query-params"
    )
    return RowFilter(frozenset(KINDS[kind]), frozenset(chosen), search)


def _row_data(row: TableRow) -> dict[str, Any]:
    """Return a row for the table: values to sort by and texts to show, by column."""
    share = f" {percent(row.progress, 0)}" if row.progress is not None else ""
    return {
        "name": row.name,
        "title": row.title,
        "details": row.details,
        "page": PAGES.get(row.kind, "run"),
        "status": row.status,
        # All digits would make the page twice as large.
        "losses": [float(f"{loss:.4g}") for loss in row.losses],
        "values": {
            **{
                key: getattr(row, key)
                for key in ("name", "status", "bpb", "tokens_per_second", "mfu", "seconds", "dollars")
            },
            "created": row.created or None,
        },
        "texts": {
            "status": f"{row.status}{share}",
            "bpb": "" if row.bpb is None else f"{row.bpb:.4f}",
            "tokens_per_second": "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            "mfu": "" if row.mfu is None else percent(row.mfu, 1),
            "seconds": "" if row.seconds is None else elapsed(row.seconds),
            "dollars": "" if row.dollars is None else cost_text(row.dollars),
            "created": row.created[:16].replace("T", " "),
        },
    }


@st.cache_resource(show_spinner=False)
def _table() -> Any:
    """Return the component that draws the table.

    It is our own because `st.dataframe` draws on a canvas: its cells cannot be links, and a phone shows two columns.
    """
    return st.components.v2.component(
        "deskside_runs",
        html='<div class="runs"></div>',
        css=theme.read_asset("run_table.css"),
        js=theme.read_asset("run_table.js"),
    )
