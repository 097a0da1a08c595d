"""Notes on empty pages and on directories that cannot be read.

The first page needs no more than these, so nothing here imports pandas or matplotlib, which takes a second.
"""

import streamlit as st

from deskside.dashboard import file_cache
from deskside.dashboard.sidebar import Context

COMMANDS = """deskside go --preset demo --hours 0.05     # three minutes on a CPU, from bundled text
deskside study matrix16-quick              # sixteen arms: GQA and FP4 at four sizes, on a CPU
deskside search demo --hours 0.1           # better settings, on a CPU
deskside train 124m --data.path DIR --hours 2   # one run"""


def empty_state(context: Context) -> None:
    """Draw a note that explains why a page is empty: the filters hide all arms, or there is nothing to show yet."""
    if context.selection is not None:
        st.info("The filters in the sidebar hide all arms. Clear one of them.")
        return
    st.info(f"Nothing to show below `{context.root}` yet. Each of these commands creates a study or a run:")
    st.code(COMMANDS, language=None, wrap_lines=True)
    st.caption("This page finds new runs while they train. For another directory: deskside dashboard DIR")


def problem_rows(context: Context) -> list[dict[str, str]]:
    """Return a table row for every directory that could not be read completely, except for runs of studies."""
    rows = [(str(path), reason) for path, reason in context.scan.problems]
    for path in context.scan.studies:
        study = file_cache.study(path)
        if study is not None and study.problem:
            rows.append((str(path), study.problem))
    for path in context.scan.searches:
        if problem := file_cache.search(path).problem:
            rows.append((str(path), problem))
    for run in context.scan.standalone_runs:
        if reasons := file_cache.brief(run.path).problems:
            rows.append((str(run.path), "; ".join(reasons)))
    return [{"directory": path.removeprefix(f"{context.root}/"), "why": reason} for path, reason in rows]
