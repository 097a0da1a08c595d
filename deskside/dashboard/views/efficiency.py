"""Trade-offs page: speed against memory and quality, and the Pareto fronts."""

import streamlit as st

from deskside.dashboard import plotly_charts
from deskside.dashboard.components import chart, pick_group, seeds_note
from deskside.dashboard.sidebar import Context, literal
from deskside.report import study_text
from deskside.study.results import Results
from deskside.study.stats.metrics import metric_named

AXIS_KEYS = {
    "memory and speed": ("peak_memory_gib", "tokens_per_second"),
    "speed and quality": ("tokens_per_second", "val_bpb"),
    "memory and quality": ("peak_memory_gib", "val_bpb"),
    "energy and quality": ("joules_per_token", "val_bpb"),
}


def show(context: Context) -> None:
    """Draw the page."""
    selection = pick_group(context)
    if selection is None:
        return
    results = selection.results
    st.header("Trade-offs")
    choice = st.radio(
        "axes", list(AXIS_KEYS), horizontal=True, key="efficiency-axes", label_visibility="collapsed"
    )
    x_key, y_key = AXIS_KEYS[choice]
    figure = plotly_charts.bubbles(results, x_key, y_key)
    if figure is None:
        missing = [
            metric_named(key).label
            for key in (x_key, y_key)
            if not study_text.measured_arms(results.arms, key)
        ]
        st.info(f"{' and '.join(missing) or choice}: {study_text.NOT_MEASURED} for these arms.")
    else:
        chart(figure, choice.replace(" ", "-"), f"{choice} of {len(results.arms)} arms")
        sizes = {
            estimate.mean for arm in results.arms if (estimate := arm.estimate("parameters")) is not None
        }
        size_note = "Larger marks have more parameters." if len(sizes) > 1 else ""
        fronts = plotly_charts.fronts_in(results, x_key, y_key)
        rim_note = (
            f"A thick rim: no other arm of its group beats it in {_metric_names(fronts[0].metrics)}."
            if fronts
            else ""
        )
        st.caption(f"{seeds_note(selection, y_key)} {size_note} {rim_note}")
        names = [
            f"{position}\\. {literal(arm.label)}"  # as a Markdown list, it would be renumbered without gaps
            for position, arm in enumerate(results.arms, 1)
            if arm.estimate(x_key) and arm.estimate(y_key)
        ]
        half = (len(names) + 1) // 2
        for column, part in zip(st.columns(2), (names[:half], names[half:]), strict=True):
            column.markdown("  \n".join(part))
    _draw_fronts(results)
    figure = plotly_charts.bars(results.arms, "joules_per_token")
    if figure is not None:
        st.header("Energy")
        chart(figure, "energy", "energy per token of each arm")
        st.caption(seeds_note(selection, "joules_per_token"))


def _draw_fronts(results: Results) -> None:
    if not results.fronts:
        return
    st.header("Best trade-offs (Pareto fronts)")
    lines = []
    for front in results.fronts:
        heading = next((g.heading for g in results.groups if g.name == front.group), front.group)
        names = [literal(arm.label) for arm in results.arms if arm.id in front.arms]
        unclear = [literal(arm.label) for arm in results.arms if arm.id in front.unclear]
        prefix = f"{literal(heading)}: " if len(results.groups) > 1 else ""
        line = f"- {prefix}**in {_metric_names(front.metrics)}**: {'; '.join(names) or 'none of the arms shown'}."
        if unclear:
            line += f" Undecided by the intervals: {'; '.join(unclear)}."
        lines.append(line)
    st.markdown("\n".join(lines))


def _metric_names(keys: list[str]) -> str:
    names = [metric_named(key).label for key in keys]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
