"""Redraws a page when its content has changed."""

from collections.abc import Callable

import streamlit as st

from deskside.dashboard.file_cache import REFRESH_SECONDS


def rerun_when_changed(state: Callable[[], object]) -> None:
    """Draw the page again once `state()` returns a different value. Call it before drawing what it depends on.

    It is for what changes rarely, such as the end of a run. What changes at every step is drawn by a fragment of its
    own, which does not redraw the rest of the page.
    """
    drawn = state()

    @st.fragment(run_every=REFRESH_SECONDS)
    def watch() -> None:
        if state() != drawn:
            st.rerun()

    watch()
