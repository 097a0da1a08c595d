"""Efficiency tab: speed against memory and quality, and the Pareto fronts."""

import streamlit as st

from deskside.dashboard import plotly_charts
from deskside.dashboard.components import chart, seeds_note, usable
from deskside.dashboard.sidebar import Context, literal
from deskside.report import study_text
from deskside.study.results import Results
from deskside.study.stats.metrics import metric_named

AXES = {
    "memory and speed": ("peak_memory_gib", "tokens_per_second"),
    "speed and quality": ("tokens_per_second", "val_bpb"),
    "memory and quality": ("peak_memory_gib", "val_bpb"),
    "energy and quality": ("joules_per_token", "val_bpb"),
}


def show(context: Context) -> None:
    """Draw the tab."""
    selection = usable(context)
    if selection is None:
        return
    results = selection.results
    st.header("Trade-offs")
    choice = st.radio(
        "axes", list(AXES), horizontal=True, key="efficiency-axes", label_visibility="collapsed"
    )
    across, up = AXES[choice]
    figure = plotly_charts.bubbles(results, across, up)
    if figure is None:
        missing = [
            metric_named(key).label for key in (across, up) if not study_text.measured_arms(results.arms, key)
        ]
        st.info(f"{' and '.join(missing) or choice}: {study_text.NOT_MEASURED} for these arms.")
    else:
        chart(figure, choice.replace(" ", "-"), f"{choice} of {len(results.arms)} arms")
        sizes = {found.mean for arm in results.arms if (found := arm.estimate("parameters")) is not None}
        size_note = "Larger marks have more parameters." if len(sizes) > 1 else ""
        fronts = plotly_charts.fronts_in(results, across, up)
        rim_note = (
            f"A thick rim: no other arm of its group beats it in {_listed(fronts[0].metrics)}."
            if fronts
            else ""
        )
        st.caption(f"{seeds_note(selection, up)} {size_note} {rim_note}")
        names = [
            f"{place}. {literal(arm.label)}"
            for place, arm in enumerate(results.arms, 1)
            if arm.estimate(across) and arm.estimate(up)
        ]
        half = (len(names) + 1) // 2
        for column, part in zip(st.columns(2), (names[:half], names[half:]), strict=True):
            column.markdown("\n".join(part))
    _fronts(results)
    figure = plotly_charts.bars(results.arms, "joules_per_token")
    if figure is not None:
        st.header("Energy")
        chart(figure, "energy", "energy per token of each arm")
        st.caption(seeds_note(selection, "joules_per_token"))


def _fronts(results: Results) -> None:
    if not results.fronts:
        return
    st.header("Best trade-offs (Pareto fronts)")
    lines = []
    for front in results.fronts:
        title = next((g.heading for g in results.groups if g.name == front.group), front.group)
        names = [literal(arm.label) for arm in results.arms if arm.id in front.arms]
        unclear = [literal(arm.label) for arm in results.arms if arm.id in front.unclear]
        where = f"{literal(title)}: " if len(results.groups) > 1 else ""
        line = f"- {where}**in {_listed(front.metrics)}**: {'; '.join(names) or 'none of the arms shown'}."
        if unclear:
            line += f" Undecided by the intervals: {'; '.join(unclear)}."
        lines.append(line)
    st.markdown("\n".join(lines))


def _listed(keys: list[str]) -> str:
    names = [metric_named(key).label for key in keys]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
