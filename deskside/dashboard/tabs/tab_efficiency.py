"""Efficiency: what speed costs in memory and quality, and the arms that nothing beats."""

import streamlit as st

from deskside.dashboard import bubbles, charts
from deskside.dashboard.cached import Context
from deskside.dashboard.common import chart, seeds_told, usable
from deskside.dashboard.literal import literal
from deskside.report import study_words as words
from deskside.study.results import Results

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
    results = selection.results
    st.header("Trade-offs")
    choice = st.radio(
        "axes", list(AXES), horizontal=True, key="efficiency-axes", label_visibility="collapsed"
    )
    across, up = AXES[choice]
    figure = bubbles.bubble(results, across, up)
    if figure is None:
        missing = [words.metric(key).label for key in (across, up) if not words.measured(results.arms, key)]
        st.info(f"{' and '.join(missing) or choice}: {words.NOT_MEASURED} for these arms.")
    else:
        chart(figure, choice.replace(" ", "-"), f"{choice} of {len(results.arms)} arms")
        st.caption(f"{seeds_told(selection, up)} {_sizes(results)} {_rim(results, across, up)}")
        names = [
            f"{place}. {literal(arm.label)}" for place, arm in enumerate(bubbles.both(results, across, up), 1)
        ]
        for column, part in zip(
            st.columns(2), (names[: (len(names) + 1) // 2], names[(len(names) + 1) // 2 :]), strict=True
        ):
            column.markdown("\n".join(part))
    _fronts(results)
    figure = charts.bars(results, "joules_per_token")
    if figure is not None:
        st.header("Energy")
        chart(figure, "energy", "energy per token of each arm")
        st.caption(seeds_told(selection, "joules_per_token"))


def _sizes(results: Results) -> str:
    sizes = {found.mean for arm in results.arms if (found := words.known(arm, "parameters")) is not None}
    return "Larger marks have more parameters." if len(sizes) > 1 else ""


def _rim(results: Results, across: str, up: str) -> str:
    """What a thick rim says."""
    fronts = bubbles.fronts_of(results, across, up)
    if not fronts:
        return ""
    return f"A thick rim: no other arm of its group beats it in {_listed(fronts[0].metrics)}."


def _fronts(results: Results) -> None:
    if not results.fronts:
        return
    st.header("Arms that nothing beats")
    lines = []
    for front in results.fronts:
        title = next((words.group_title(g) for g in results.groups if g.name == front.group), front.group)
        names = [literal(arm.label) for arm in results.arms if arm.id in front.arms]
        unclear = [literal(arm.label) for arm in results.arms if arm.id in front.unclear]
        where = f"{literal(title)}: " if len(results.groups) > 1 else ""
        line = f"- {where}**in {_listed(front.metrics)}**: {'; '.join(names) or 'none of those shown'}."
        if unclear:
            line += f" Perhaps also, the intervals do not say: {'; '.join(unclear)}."
        lines.append(line)
    st.markdown("\n".join(lines))


def _listed(keys: list[str]) -> str:
    names = [words.metric(key).label for key in keys]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
