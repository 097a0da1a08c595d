"""Efficiency: what speed costs in memory and quality, and the arms that nothing beats."""

import streamlit as st

from deskside.dashboard import charts
from deskside.dashboard.cached import Context
from deskside.dashboard.common import chart, heading, seeds_told, usable
from deskside.report import study_words as words

AXES = {
    "memory and speed": ("peak_memory_gib", "tokens_per_second"),
    "speed and quality": ("tokens_per_second", "val_bpb"),
    "memory and quality": ("peak_memory_gib", "val_bpb"),
    "energy and quality": ("joules_per_token", "val_bpb"),
}


def show(context: Context) -> None:
    """The tab."""
    selection = usable(context)
    if selection is None:
        return
    heading(selection)
    results = selection.results
    st.header("Trade-offs")
    choice = st.radio(
        "axes", list(AXES), horizontal=True, key="efficiency-axes", label_visibility="collapsed"
    )
    across, up = AXES[choice]
    figure = charts.bubble(results, across, up)
    if figure is None:
        missing = [words.metric(key).label for key in (across, up) if not words.measured(results.arms, key)]
        st.info(f"{' and '.join(missing) or choice}: {words.NOT_MEASURED} for these arms.")
    else:
        chart(figure, choice.replace(" ", "-"), f"{choice} of {len(results.arms)} arms")
        st.caption(
            f"{seeds_told(selection, up)} The area of a mark is the number of parameters; a thick rim says that no "
            f"other arm of its group beats the arm in everything."
        )
    for front in results.fronts:
        title = next((words.group_title(g) for g in results.groups if g.name == front.group), front.group)
        axes = ", ".join(words.metric(key).label for key in front.metrics)
        names = [arm.label for arm in results.arms if arm.id in front.arms]
        unclear = [arm.label for arm in results.arms if arm.id in front.unclear]
        st.subheader(f"Not beaten in {axes}: {title}")
        st.markdown("\n".join(f"- {name}" for name in names) or "none of the arms shown")
        if unclear:
            st.caption(f"May belong to them, the intervals do not say: {'; '.join(unclear)}.")
    figure = charts.bars(results, "joules_per_token")
    if figure is not None:
        st.header("Energy")
        chart(figure, "energy", "energy per token of each arm")
        st.caption(seeds_told(selection, "joules_per_token"))
